"""What an own loss, an average of weights, and a policy for spikes cannot be combined with."""

from collections.abc import Iterator

from howdah.plan.layout import Layout
from howdah.plan.method import LOW, Method


def own_problems(layout: Layout, method: Method) -> Iterator[str]:
    """Why a loss of the user, an average or a spike policy cannot run on a layout, as sentences."""
    yield from _of_loss(layout, method)
    yield from _of_gathers(layout, method)
    yield from _of_sums(layout, method)
    if method.optimizer.average and method.sync:
        yield (
            "method.optimizer.average is of all weights after one update, and under method.sync "
            "servers update their parts at times of their own; leave one of the two out"
        )
    if method.spike and method.sync:
        yield (
            "method.spike compares losses of the global batch, and under method.sync there is no "
            "such batch; leave one of the two out"
        )
    if method.spike and not (method.spike.deviations or method.spike.ratio):
        yield (
            "method.spike has neither deviations nor ratio, so nothing would be a spike; give one, "
            "such as method.spike.deviations=6"
        )
    if method.spike and 0 < method.spike.ratio <= 1:
        yield (
            f"method.spike.ratio is {method.spike.ratio:g}, so a loss like those before would be a "
            "spike; it must be above 1, such as 1.5"
        )


def _of_loss(layout: Layout, method: Method) -> Iterator[str]:
    if not method.loss:
        return
    if layout.tp > 1:
        yield (
            f"method.loss needs each token's logits of the whole vocabulary, and tp{layout.tp} "
            "cuts it; use dp with zero, pp or cp in place of tp"
        )
    if method.label_smoothing or method.z_loss:
        yield (
            "method.label_smoothing and method.z_loss are terms of cross-entropy, and method.loss "
            "takes its place; leave them out, or add them in your function"
        )


def _of_gathers(layout: Layout, method: Method) -> Iterator[str]:
    """Why weights cannot be gathered in 8 bits."""
    if method.gather_dtype == "full":
        return
    says = f"method.gather_dtype={method.gather_dtype}"
    if layout.zero != 3 or (layout.dp is not None and layout.sharers == 1):
        yield (
            f"{says} is of weights that zero3 gathers; use a layout such as dp2 zero3, or leave it "
            "out"
        )
    if layout.tp > 1 or layout.ep > 1:
        word = f"tp{layout.tp}" if layout.tp > 1 else f"ep{layout.ep}"
        yield (
            f"{says} rounds blocks of whole weights, and {word} cuts weights, so that blocks would "
            f"be others; drop {word}, or leave it out"
        )
    if layout.weights != "device":
        yield (
            f"{says} with weights={layout.weights} is not built: weights would be rounded on their "
            "way from home; leave one of the two out"
        )
    if method.precision in LOW:
        yield (
            f"{says} with method.precision={method.precision} would round weights twice, by two "
            "kinds of scales; leave it out, or use method.precision=bf16"
        )


def _of_sums(layout: Layout, method: Method) -> Iterator[str]:
    """Why gradients cannot be summed in 4 bits."""
    if method.gradient_feedback and method.gradient_dtype != "int4":
        yield (
            "method.gradient_feedback is of what int4 rounds away, and method.gradient_dtype is "
            f"{method.gradient_dtype}; use gradient_dtype=int4, or leave it out"
        )
    if method.gradient_feedback and method.precision == "fp16":
        yield (
            "method.gradient_feedback keeps parts of gradients from one step for the next, and "
            "under method.precision=fp16 their scale changes between; use precision=bf16, or leave "
            "it out"
        )
    if method.gradient_dtype != "int4":
        return
    says = "method.gradient_dtype=int4"
    if layout.accumulate != "shard" or (layout.dp is not None and layout.replicas == 1):
        yield (
            f"{says} is of gradients that are reduced to shares; use a layout such as dp2 zero2, "
            "or gradient_dtype=bf16"
        )
    axes = {word: getattr(layout, word) for word in ("pp", "cp", "tp", "ep")}
    if cuts := [f"{word}{size}" for word, size in axes.items() if size > 1]:
        yield f"{says} is built for dp alone, and the layout has {cuts[0]}; use gradient_dtype=bf16"
    if layout.shard:
        yield f"{says} with shard{layout.shard} is not built; use hpz for nodes, or drop shard"
    if layout.gradients != "device":
        yield (
            f"{says} with gradients={layout.gradients} is not built; keep gradients on the device, "
            "or use gradient_dtype=bf16"
        )
