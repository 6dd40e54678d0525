"""Held-out loss, perplexity and bits per byte.

Bits per byte compare models with different tokenizers, and with compressors: the summed loss of
the held-out text in bits, over its size in bytes.
"""

from dataclasses import dataclass
from math import exp, log

from howdah.text.batches import held_out_micros, rows_of
from howdah.text.tokens import Corpus
from howdah.train.step import StepContext, held_out_loss


@dataclass(frozen=True)
class HeldOut:
    """One evaluation: mean loss per token (nats), over `tokens` tokens."""

    loss: float
    tokens: int
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))


def evaluate(
    context: StepContext, corpus: Corpus, *, sequence: int, micro: int, limit: int | None = None
) -> HeldOut:
    """The loss on the held-out text, or on its first `limit` samples; all ranks call together.

    Of a part, bits per byte are estimated from the bytes per token of the whole.
    """
    mesh = context.mesh
    rows = rows_of(mesh.layout, mesh.rank, micro=micro)
    loss, tokens = held_out_loss(
        context, held_out_micros(corpus, rows, sequence=sequence, limit=limit)
    )
    bytes_per_token = corpus.held_out_bytes / max(len(corpus.held_out.ids) - 1, 1)
    return HeldOut(loss, tokens, loss / log(2) / bytes_per_token)
