"""The facts that a training run stores in its checkpoints: model, tokenizer, optimizer, order.

A checkpoint stores them as `meta`, which it does not check. Here `meta` becomes a typed dataclass:
a field that is missing, of the wrong type or out of bounds is a UserError, before any tensor is
read.
"""

from dataclasses import dataclass, fields
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
    base       of an adapter; None where the checkpoint holds the whole model
    """

    model: ModelShape
    tokenizer: str
    end: int
    optimizer: str
    order: Order
    best_loss: float | None = None
    text: tuple[int, ...] = ()
    spikes: Past | None = None
    base: Base | None = None


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
    if problems:
        raise UserError(
            f"{checkpoint.path} does not say what it was trained with: {several(problems)}; use "
            "another checkpoint"
        )
    assert isinstance(found, Facts)
    return found


def _check_order(order: Order) -> list[str]:
    counts = (order.sequence, *order.samples, *order.shares)
    sound = counts and min(counts) >= 1 and len(order.samples) == len(order.shares) > 0
    return [] if sound else ["order holds a number that is no count"]
