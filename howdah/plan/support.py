"""Why this version cannot run a plan, as sentences.

More can be planned, priced and drawn than can be run yet. Every command that runs a plan calls
`unsupported` first, so that a layout is either run as planned, or refused by name.
"""

from howdah.plan.layout import Layout, needs_own
from howdah.shapes.shape import ModelShape


def unsupported(shape: ModelShape, layout: Layout, *, compiled: bool = False) -> list[str]:
    """Why a model on a layout can be planned but not run; empty if it can be run.

    compiled  whether blocks go through torch.compile. It knows only parameters of torch: where
              howdah's operations read the weight store, it would break the graph, or treat the
              weights as constants
    """
    problems = [f"{what} can be planned, but not run yet" for what in _layout_words(layout)]
    if compiled and needs_own(layout):
        problems.append(
            f"compile is true, but on layout '{layout}' blocks compute with operations that "
            "torch.compile does not see through; leave compile out, or use a layout of dp and "
            "zero1 or zero2 alone"
        )
    return problems + [
        f"a model with {what} can be planned, but not built yet" for what in _shape_words(shape)
    ]


def _layout_words(layout: Layout) -> list[str]:
    words = [f"cp{layout.cp}"] if layout.cp > 1 else []
    words += [f"terapipe slices{layout.slices}"] if layout.slices > 1 else []
    homes = ("weights", "gradients", "optimizer", "activations")
    return words + [f"{n}={home}" for n in homes if (home := getattr(layout, n)) != "device"]


def _shape_words(shape: ModelShape) -> list[str]:
    said = {
        f"family {shape.family}": shape.family != "decoder",
        f"{shape.positions} positions": shape.positions not in ("rotary", "learned"),
        f"feedforward {shape.feedforward}": shape.feedforward == "geglu",
        "biases of query, key and value alone": shape.qkv_bias,
        "a norm behind the embedding": shape.embedding_norm,
        "token types": shape.token_types > 0,
        "a transform in front of the head": shape.transform,
        "latent attention": shape.latent is not None,
        "experts": shape.experts is not None,
    }
    return [what for what, wanted in said.items() if wanted]
