"""What is trained in the benchmark, as plain data: models, batches, methods.

A case is one model in one precision on so many ranks. Every rank takes `rows` rows of `sequence`
tokens per step, in one micro-batch (x1) or one row at a time (x4): the same tokens, so that what
accumulation costs shows, in time and in bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from howdah.plan.method import LearningRate, Method, Optimizer, Precision
from howdah.shapes.shape import ModelShape
from howdah.text.batches import Micro

SEED = 1
RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """One comparison.

    steps   in a block, the stretch that is timed
    blocks  that count, of each contestant
    """

    model: str
    shape: ModelShape
    precision: Precision
    sequence: int
    ranks: int
    micros: int
    steps: int
    blocks: int
    rows: int = 4

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}, dp{self.ranks} x{self.micros}"

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.ranks * self.rows * self.sequence

    def replica(self, rank: int) -> int:
        """Whose part of the batch a rank takes: here its own."""
        return rank


def model(*, layers: int, width: int, ffn: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        width=width,
        heads=8,
        kv_heads=2,
        ffn_size=ffn,
        vocab=4096,
        context=256,
        tie_embeddings=True,
    )


SMALL = model(layers=4, width=256, ffn=800)  # 4.2M parameters
LARGE = model(layers=8, width=512, ffn=1408)  # 24.6M
TINY = model(layers=2, width=64, ffn=96)


def cases(*, tiny: bool) -> Iterator[Case]:
    """Few steps where a step is long: a dozen contestants take their turns in each repeat."""
    if tiny:
        yield Case("tiny", TINY, "float32", 16, ranks=2, micros=1, steps=3, blocks=2)
        yield Case("tiny", TINY, "float32", 16, ranks=4, micros=4, steps=3, blocks=2)
        yield Case("tiny", TINY, "bf16", 16, ranks=2, micros=4, steps=3, blocks=2)
        return
    yield Case("4.2M", SMALL, "float32", 128, ranks=2, micros=1, steps=3, blocks=3)
    yield Case("4.2M", SMALL, "float32", 128, ranks=2, micros=4, steps=3, blocks=3)
    yield Case("4.2M", SMALL, "bf16", 128, ranks=2, micros=4, steps=3, blocks=3)
    yield Case("4.2M", SMALL, "float32", 128, ranks=4, micros=1, steps=2, blocks=3)
    yield Case("24.6M", LARGE, "float32", 256, ranks=2, micros=1, steps=1, blocks=3)


def method(case: Case) -> Method:
    """AdamW with the usual constants, clipping at 1, a constant rate."""
    return Method(case.precision, Optimizer("adamw"), LearningRate(RATE, schedule="constant"))


def batch(case: Case, *, step: int, rank: int) -> list[Micro]:
    """The micro-batches of one replica: skewed random tokens, so that there is something to learn.

    Every token has a label, and every row is one document.
    """
    draw = np.random.default_rng([SEED, step, rank]).random((case.rows, case.sequence + 1))
    ids = (case.shape.vocab * draw**4).astype(np.int64)
    positions = np.tile(np.arange(case.sequence), (case.rows, 1))
    samples = np.arange(case.rows) + case.rows * (case.ranks * step + rank)
    parts = np.split(np.arange(case.rows), case.micros)
    return [
        Micro(
            tokens=np.ascontiguousarray(ids[rows, :-1]),
            labels=np.ascontiguousarray(ids[rows, 1:]),
            positions=positions[rows],
            documents=np.zeros((len(rows), case.sequence), dtype=np.int32),
            samples=samples[rows],
        )
        for rows in parts
    ]
