"""What a layout asks of a model that is not howdah's and cannot have, as sentences with reasons.

A layout's words that cut matrices, sequences or the chain of blocks need to know what the
operations of a model mean: howdah's own models say it (`plan/sharding.py`), a module does not.
"""

from collections.abc import Iterator

from howdah.base.errors import UserError
from howdah.plan.layout import Layout

OWN = "howdah's own models have it (howdah train)"
AXES = {
    "tp": "cuts matrices, and howdah does not know which matrices of a foreign module go together",
    "pp": "cuts a model into stages, and howdah does not know in which order a foreign module runs",
    "cp": "cuts sequences, and howdah does not know what a foreign module's attention looks at",
    "ep": "divides experts, and howdah does not know which weights of a foreign module are experts",
}


def refuse(layout: Layout) -> None:
    """Raises UserError for the first word that a foreign model cannot have."""
    for problem in problems(layout):
        raise UserError(f"layout '{layout}': {problem}")


def problems(layout: Layout) -> Iterator[str]:
    """A sentence for each such word."""
    for word, reason in AXES.items():
        if (number := getattr(layout, word)) > 1:
            yield f"{word}{number} {reason}; use dp and zero, {OWN}"
    if layout.sp:
        yield f"sp belongs to tp, which {AXES['tp']}; use dp and zero, {OWN}"
    if layout.server:
        yield f"server{layout.server} needs howdah train, which starts servers; use dp{layout.dp}"
    if layout.hpz:
        yield (
            f"hpz{layout.hpz} keeps a second copy of weights in the order in which howdah's own "
            f"passes use them; drop it, {OWN}"
        )
    if layout.recompute == "selective":
        yield (
            "recompute=selective keeps the products of an attention, and howdah does not know "
            "those of a foreign module; use recompute=full"
        )
    if layout.recompute_blocks is not None:
        yield 'recompute of chosen blocks is said by units=["layers.3", ...]; use recompute=full'
    for word in ("weights", "gradients", "optimizer", "activations"):
        if (home := getattr(layout, word)) != "device":
            yield (
                f"{word}={home} moves what howdah's own operations use, and a foreign module has "
                f"those of torch; drop it, {OWN}"
            )
