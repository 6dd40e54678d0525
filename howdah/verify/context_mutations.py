"""Controls of context parallelism: breaks of runs whose ranks share sequences (`mutations.py`).

a loss scaled by cp           every rank of cp counts the tokens of the whole sample as its own
a chunk out of order          the first cp rank has its late chunk in front of its early one
a document across its border  the first two documents of each row are one
a wrong merge                 the mean of two blocks of keys, whatever their log-sum-exps (ring)
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from howdah.model.documents import Blocks, Mask
from howdah.parallel.context import Ring, Trade
from howdah.parallel.executor import Loss
from howdah.parallel.stages import Given
from howdah.plan.plan import Plan
from howdah.plan.sharding import chunks
from howdah.train.step import StepContext, count_tokens
from howdah.verify.evidence import Mutate


def breaks_of(plan: Plan) -> dict[str, Mutate]:
    """The breaks that are possible on a plan with cp, by name."""
    found: dict[str, Mutate] = {
        "a loss scaled by cp": scale_the_loss,
        "a chunk out of order": swap_chunks,
    }
    if plan.shape.family != "encoder-decoder":  # a source is one text, whatever is in it
        found["a document across its border"] = join_documents
    return found | {"a wrong merge": merge_evenly} if plan.layout.context != "all-to-all" else found


def scale_the_loss(context: StepContext) -> StepContext:
    """The loss is divided by the tokens of each cp rank's samples, added up."""
    return replace(context, count=lambda micros: count_tokens(micros) * context.mesh.layout.cp)


def swap_chunks(context: StepContext) -> StepContext:
    """On the first cp rank, tokens and labels of the late chunk come first, with their positions;
    of an encoder without, or it would see the same.
    """
    mesh, executor, train = context.mesh, context.placed.executor, context.placed.executor.train
    (start, stop), _ = chunks(mesh.layout, context.placed.plan.sequence, mesh.rank)
    if mesh.index_of("cp") > 0:
        return context
    causal = context.placed.plan.shape.causal

    def turned(x: Tensor) -> Tensor:
        return x.roll(start - stop, 1)

    def swapped(given: Sequence[Given], loss: Loss, *, tokens: float) -> Tensor:
        others = [
            replace(
                one,
                tokens=turned(one.tokens),
                labels=turned(one.labels),
                positions=turned(one.positions) if causal else one.positions,
            )
            for one in given
        ]
        return train(others, loss, tokens=tokens)

    executor.train = swapped  # type: ignore[method-assign]
    return context


def join_documents(context: StepContext) -> StepContext:
    """Tokens of the second document of a row attend to the first."""
    model, cut = context.placed.model, context.placed.model.cut

    def joined(documents: Tensor, device: torch.device, length: int) -> Mask:
        one = documents.clamp(min=1)
        if documents.ndim == 1:  # where documents start
            one = torch.cat([documents[:1], documents[2:]])
        return cut(one, device, length)

    model.cut = joined
    return context


def merge_evenly(context: StepContext) -> StepContext:
    """The output of two blocks of keys is their mean."""

    def mean(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
        out.lerp_(part.to(out.dtype), 0.5)
        sums.copy_(torch.logaddexp(sums, part_sums))

    core = context.placed.core
    core = core.ring if isinstance(core, Trade) else core
    assert isinstance(core, Ring)
    core.merge = mean
    return context


def own_blocks_again(mask: Blocks) -> Blocks:
    """During recomputation (which has a graph), a mask without the other ranks' tokens."""
    return replace(mask, others=((),) * len(mask.others)) if torch.is_grad_enabled() else mask
