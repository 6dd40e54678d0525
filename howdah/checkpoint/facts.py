"""The facts that a training run stores in its checkpoints: model, tokenizer, optimizer, order.

A checkpoint stores them as `meta`, which it does not check. Here `meta` becomes a typed dataclass:
a field that is missing, of the wrong type or out of bounds is a UserError, before any tensor is
read.
"""

from dataclasses import dataclass, field, fields
from math import isfinite

from howdah.base.errors import UserError, several
from howdah.base.tables import read_table
from howdah.checkpoint.load import Checkpoint
from howdah.plan.method import Adapter
from howdah.shapes.check import check_shape
from howdah.shapes.shape import RENAMED, ModelShape
from howdah.text.order import Order


@dataclass(frozen=True)
class Past:
    """What a run with `method.spike` knows of its losses; equal on all ranks, so that any number of
    ranks may go on with it.

    losses  the window, in the order of its places
    seen    how many losses there were in all
    count   how many of them were spikes
    """

    losses: tuple[float, ...] = ()
    seen: int = 0
    count: int = 0


@dataclass(frozen=True)
class Routed:
    """How many tokens each expert had in the steps before a checkpoint; equal on all ranks.

    blocks  their names
    tokens  of each block, those of each of its experts
    steps   how many steps
    """

    blocks: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    steps: int = 0

    @property
    def by_block(self) -> dict[str, tuple[int, ...]]:
        """The tokens of each expert, by name of the block."""
        return dict(zip(self.blocks, self.tokens, strict=True))


@dataclass(frozen=True)
class Base:
    """The model beside which an adapter was trained.

    folder   the Hugging Face folder
    crc32    checksum of its weights that are frozen (`train/adapted.py`)
    adapter  what was trained beside them
    """

    folder: str
    crc32: int
    adapter: Adapter


@dataclass(frozen=True)
class Facts:
    """The training run that a checkpoint belongs to.

    model      sizes of the model; fields unknown to the version that saved it have their defaults
    tokenizer  hash of the tokenizer file
    end        id of the end token between documents
    optimizer  name of the optimizer whose states the checkpoint holds
    order      what the order of samples depends on
    best_loss  the lowest held-out loss so far
    text       CRC-32 of the tokens of each source, and of the held-out ones; empty in checkpoints
               of versions that did not store them
    spikes     of the losses, where somebody watches them
    routed     tokens of experts; empty in dense models, and of versions that did not store it
    base       of an adapter; None where the checkpoint holds the whole model
    updates    that the optimizer's states have seen; None: one a step
    """

    model: ModelShape
    tokenizer: str
    end: int
    optimizer: str
    order: Order
    best_loss: float | None = None
    text: tuple[int, ...] = ()
    spikes: Past | None = None
    routed: Routed = field(default_factory=Routed)
    base: Base | None = None
    updates: int | None = None


def facts(checkpoint: Checkpoint) -> Facts:
    """The facts in `checkpoint.meta`. Raises UserError when one is missing or wrong."""
    known = {field.name for field in fields(Facts)}
    meta = {name: value for name, value in checkpoint.meta.items() if name in known}
    found, problems = read_table(Facts, meta, renamed=RENAMED)
    if found and not problems:
        problems = [*check_shape(found.model), *_check_order(found.order)]
        if not 0 <= found.end < found.model.vocab:
            problems.append(f"end is {found.end}, which is no token")
        past = found.spikes or Past()
        if not (0 <= len(past.losses) <= past.seen and past.count >= 0):
            problems.append("spikes holds numbers that are no counts")
        if not all(map(isfinite, past.losses)):
            problems.append("spikes holds a loss that is not finite")
        if found.updates is not None and found.updates < 0:
            problems.append(f"updates is {found.updates}, which is no count")
        if not _counts_experts(found.routed, found.model):
            problems.append("routed holds numbers that are no counts of its experts")
    if problems:
        raise UserError(
            f"{checkpoint.path} does not say what it was trained with: {several(problems)}; use "
            "another checkpoint"
        )
    assert isinstance(found, Facts)
    return found


def updates_of(checkpoint: Checkpoint) -> int:
    """How many updates the optimizer's states of a checkpoint have seen. Raises UserError."""
    found = facts(checkpoint).updates
    return checkpoint.step if found is None else found


def _counts_experts(routed: Routed, model: ModelShape) -> bool:
    """Whether there is a count for each expert of some blocks."""
    count = model.experts.count if model.experts else 0
    each = all(len(some) == count and min(some, default=0) >= 0 for some in routed.tokens)
    return each and len(routed.blocks) == len(routed.tokens)


def _check_order(order: Order) -> list[str]:
    counts = (order.sequence, *order.samples, *order.shares)
    sound = counts and min(counts) >= 1 and len(order.samples) == len(order.shares) > 0
    return [] if sound else ["order holds a number that is no count"]
