"""What an own loss, an average of weights, and a policy for spikes cannot be combined with."""

from collections.abc import Iterator

from howdah.plan.layout import Layout
from howdah.plan.method import Method


def own_problems(layout: Layout, method: Method) -> Iterator[str]:
    """Why a method's own parts cannot be trained on a layout, as sentences."""
    yield from _of_loss(layout, method)
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
