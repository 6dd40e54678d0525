"""Why this version cannot run a plan, as sentences.

More can be planned, priced and drawn than can be run yet. Every command that runs a plan calls
`unsupported` first, so that a layout is either run as planned, or refused by name.
"""

from collections.abc import Iterator

from howdah.plan.homes import away_problems
from howdah.plan.layout import Layout, family_of
from howdah.plan.method import PLANNED, Precision
from howdah.shapes.shape import ModelShape

EIGHT_BITS = 16  # sizes of matrices in fp8 are multiples of it, on GPUs


def unsupported(
    shape: ModelShape,
    layout: Layout,
    *,
    precision: Precision = "float32",
    compiled: bool = False,
) -> list[str]:
    """Why a model on a layout, in a precision, can be planned but not run; empty if it can be
    run.

    compiled  blocks go through torch.compile
    """
    problems = [f"{what} can be planned, but not run yet" for what in _layout_words(layout)]
    if precision in PLANNED:
        problems.append(f"method.precision {precision} can be planned, but not run yet")
    if precision == "fp8":
        problems += _fp8_words(shape, layout)
    problems += _expert_words(shape, precision)
    problems += away_problems(layout)
    if compiled and layout.activations != "device":
        problems.append(  # a compiled block keeps other tensors than those that are predicted
            f"activations={layout.activations} with compile=true can be planned, but not run yet; "
            "drop compile=true, or keep activations on the device"
        )
    apart = layout.pp > 1 and shape.tie_embeddings and not family_of(layout).folded
    if apart and layout.gradients == "disk":
        problems.append(
            "gradients=disk with an embedding that is tied over stages can be planned, but not run "
            "yet; use gradients=host"
        )
    problems += _source_words(shape, layout, precision, compiled=compiled)
    return problems + [
        f"a model with {what} can be planned, but not built yet" for what in _shape_words(shape)
    ]


def _fp8_words(shape: ModelShape, layout: Layout) -> Iterator[str]:
    if layout.tp > 1:
        yield (
            f"method.precision=fp8 on tp{layout.tp} can be planned, but not run yet: the parts of "
            "a matrix would be rounded each by its own scale; use method.precision=bf16"
        )
    names = {"model.width": shape.width, "model.ffn_size": shape.ffn_size}
    names |= {"heads x head_size": shape.heads * shape.d, "kv_heads x head_size": shape.k * shape.d}
    for name, size in names.items():
        if size % EIGHT_BITS:
            yield (
                f"method.precision=fp8 multiplies sizes that are multiples of {EIGHT_BITS}, and "
                f"{name} is {size}; use another size, or method.precision=bf16"
            )


def _expert_words(shape: ModelShape, precision: Precision) -> Iterator[str]:
    experts, later = shape.experts, "can be planned, but not run yet"
    if precision == "fp8" and (experts or shape.latent):
        what = "experts" if experts else "latent attention"
        yield f"method.precision=fp8 with {what} {later}; use method.precision=bf16"
    if experts and experts.scores == "input-sigmoid":
        yield f"model.experts.scores=input-sigmoid (Llama 4) {later}: use softmax or sigmoid"
    if experts and experts.top_k == 1 and experts.normalise:
        yield (
            "model.experts.top_k=1 with normalise gives every chosen expert the weight 1, from "
            "which no router can learn; use model.experts.normalise=false"
        )


def _source_words(
    shape: ModelShape, layout: Layout, precision: Precision, *, compiled: bool
) -> Iterator[str]:
    """What an encoder with a decoder behind it cannot do yet."""
    if shape.family != "encoder-decoder":
        return
    what, later = "with an encoder-decoder", "can be planned, but not run yet"
    if layout.activations != "device":
        yield f"activations={layout.activations} {what} {later}; use recompute=full"
    if layout.inputs == "gathered" and layout.sp:
        yield f"inputs=gathered {what} {later}; use inputs=sliced"
    if precision == "fp8":
        yield f"method.precision=fp8 {what} {later}; use method.precision=bf16"
    if compiled:
        yield f"compile=true {what} {later}; use compile=false"


def _layout_words(layout: Layout) -> list[str]:
    return [f"terapipe slices{layout.slices}"] if layout.slices > 1 else []


def _shape_words(shape: ModelShape) -> list[str]:
    relative, both = shape.positions == "relative", shape.family == "encoder-decoder"
    if not both:
        return [f"relative positions in an {shape.family}"] if relative else []
    said = {  # what T5 has not
        f"{shape.positions} positions": not relative,
        f"norm {shape.norm}": shape.norm != "rmsnorm",
        f"norm_at {shape.norm_at}": shape.norm_at != "before",
        f"kv_heads {shape.k}": shape.k != shape.heads,
        "biases": shape.bias or shape.qkv_bias,
        "qk_norm": shape.qk_norm,
        "embedding_norm": shape.embedding_norm,
        "token_types": shape.token_types > 0,
        "transform": shape.transform,
    }
    return [f"family {shape.family} and {what}" for what, wanted in said.items() if wanted]
