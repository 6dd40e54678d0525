"""Held-out loss, perplexity and bits per byte.

Bits per byte are the summed loss of the held-out text in bits, divided by the size of the text in
bytes. They compare models with different tokenizers, and models with compressors.
"""

from dataclasses import dataclass
from math import exp, log

from howdah.text.batches import held_out_micros, rows_of
from howdah.text.masking import task_of
from howdah.text.tokens import Corpus
from howdah.train.step import StepContext, held_out_loss


@dataclass(frozen=True)
class HeldOut:
    """The result of one evaluation.

    loss    mean loss per token, in nats
    tokens  number of tokens that were evaluated
    """

    loss: float
    tokens: int
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))


def evaluate(
    context: StepContext, corpus: Corpus, *, sequence: int, micro: int, limit: int | None = None
) -> HeldOut:
    """Evaluates on the held-out text, or on `limit` samples that are spread evenly over it. All
    ranks call together.

    sequence  positions of a sample
    micro     samples of a micro-batch

    Bits per byte are computed with the bytes per token of all held-out text; with `limit` this is
    an estimate.
    """
    mesh = context.mesh
    rows = rows_of(mesh.layout, mesh.rank, micro=micro)
    plan, micros = (
        context.placed.plan,
        held_out_micros(corpus, rows, sequence=sequence, limit=limit),
    )
    task = task_of(plan.shape, plan.method, corpus, seed=context.seed, held_out=True)
    loss, tokens = held_out_loss(context, map(task, micros))
    bytes_per_token = corpus.held_out_bytes / max(len(corpus.held_out.ids) - 1, 1)
    return HeldOut(loss, tokens, loss / log(2) / bytes_per_token)
