"""What a run writes into its checkpoints to know them again: its model, its text, its optimizer.

A checkpoint keeps `meta` for whoever saved it, and believes nothing of it. Here it becomes typed:
what is missing, of another type or out of bounds is a sentence, before a tensor is read.
"""

from dataclasses import dataclass, fields

from howdah.base.errors import UserError, several
from howdah.base.tables import read_table
from howdah.checkpoint.load import Checkpoint
from howdah.shapes.shape import ModelShape, check_shape
from howdah.text.order import Order


@dataclass(frozen=True)
class Facts:
    """The training that a checkpoint belongs to.

    model      its sizes; a field that was not known when it was saved has its usual value
    tokenizer  the hash of the tokenizer
    end        the token between documents
    optimizer  whose states it holds
    order      what the order of samples depends on
    best_loss  the lowest held-out loss so far
    """

    model: ModelShape
    tokenizer: str
    end: int
    optimizer: str
    order: Order
    best_loss: float | None = None


def facts(checkpoint: Checkpoint) -> Facts:
    """What `checkpoint` says of its training. Raises UserError when it does not say it soundly."""
    known = {field.name for field in fields(Facts)}
    meta = {name: value for name, value in checkpoint.meta.items() if name in known}
    found, problems = read_table(Facts, meta)
    if found and not problems:
        problems = [*check_shape(found.model), *_check_order(found.order)]
        if not 0 <= found.end < found.model.vocab:
            problems.append(f"end is {found.end}, which is no token")
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
