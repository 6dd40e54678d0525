"""Held-out loss, perplexity and bits per byte; of labels, accuracy and F1.

Bits per byte are the summed loss of the held-out text in bits, divided by the size of the text in
bytes. They compare models with different tokenizers, and models with compressors.
"""

from dataclasses import dataclass
from math import exp, log

from howdah.text.batches import held_out_micros, rows_of
from howdah.text.masking import task_of
from howdah.text.tokens import Corpus
from howdah.train.label_scores import LabelCounts, Scores
from howdah.train.step import StepContext, held_out_loss


@dataclass(frozen=True)
class HeldOut:
    """The result of one evaluation.

    loss    mean loss per token, in nats
    tokens  number of tokens that were evaluated; of labels, that of texts
    scores  of labels; None where tokens are predicted
    """

    loss: float
    tokens: int
    bits_per_byte: float
    scores: Scores | None = None

    @property
    def values(self) -> dict[str, float]:
        """The numbers by name: bits per byte of a text, scores of labels."""
        more = self.scores._asdict() if self.scores else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, **more}

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
    if plan.shape.labels:
        counts = LabelCounts(context.placed)
        loss, texts = held_out_loss(context, map(task, micros), counts.loss)
        return HeldOut(loss, texts, float("nan"), counts.scores())
    loss, tokens = held_out_loss(context, map(task, micros))
    bytes_per_token = corpus.held_out_bytes / max(corpus.held_out.predicted, 1)
    return HeldOut(loss, tokens, loss / log(2) / bytes_per_token)
