"""Batches: which tokens a rank computes on, as arrays, cut the same way for every layout.

A global batch is a list of samples. It is padded with rows that count for nothing until it
divides evenly, so that every rank makes the same calls however short the last batch is:

    6 samples, micro 2, 2 replicas        replica 0      replica 1
                              micro 0     s0 s1          s2 s3
                              micro 1     s4 s5          --  --       -1: no sample, no labels

Row j goes to micro-batch j // (replicas · micro), replica j % (replicas · micro) // micro. Which
samples there are depends on the order alone, so the rows of all replicas together are the same
list for every layout.

Labels are shifted here, before anything cuts the sequence. Positions and document numbers are
explicit, so that every stage and slice can know them without asking.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from howdah.plan.batch import MASKED, micro_steps
from howdah.text.order import Numbers, Order, locate, shares
from howdah.text.tokens import Corpus, Tokens, require_samples

NO_SAMPLE = -1


@dataclass(frozen=True)
class Rows:
    """Which rows of a global batch a replica takes.

    micro     rows of a micro-batch on one replica
    replicas  how many replicas share the batch
    replica   which of them this is
    """

    micro: int
    replicas: int = 1
    replica: int = 0


@dataclass(frozen=True, eq=False)
class Micro:
    """A micro-batch of b rows of s positions.

    tokens     [b, s] int64: what is read
    labels     [b, s] int64: what is predicted, the token after each; -100 where nothing is
    positions  [b, s] int64: counted from 0 at each document, and at the start of the row
    documents  [b, s] int32: number of the document inside the row, rising from 0
    samples    [b] int64: number of the sample in the run; -1 for a row of padding
    """

    tokens: Numbers
    labels: Numbers
    positions: Numbers
    documents: npt.NDArray[np.int32]
    samples: Numbers


def order_of(corpus: Corpus, *, sequence: int, seed: int) -> Order:
    """The order of a run that trains on `corpus`. Raises UserError if a source has no sample."""
    require_samples(corpus, sequence=sequence, batch=1)
    counts = tuple(tokens.samples(sequence) for tokens in corpus.sources)
    return Order(seed, sequence, counts, shares(corpus.weights))


def micros(corpus: Corpus, order: Order, rows: Rows, *, first: int, size: int) -> list[Micro]:
    """The micro-batches of one replica, for the global batch of samples [first, first + size).

    Every replica gets equally many, of equal shapes.
    """
    numbers = _share(np.arange(first, first + size), rows)
    real = np.flatnonzero(numbers != NO_SAMPLE)
    source, index = locate(order, numbers[real])
    batch = _empty(len(numbers), order.sequence, end=corpus.end)
    for one, tokens in enumerate(corpus.sources):
        here = source == one
        _fill(batch, real[here], tokens, index[here], end=corpus.end)
    batch.samples[:] = numbers
    return list(_split(batch, rows.micro))


def held_out_micros(
    corpus: Corpus, rows: Rows, *, sequence: int, limit: int | None = None
) -> Iterator[Micro]:
    """The micro-batches of one replica that together read the held-out text once, in order.

    The last sample is padded with labels of -100, so that every token is predicted. `limit`
    stops after that many samples of all replicas together.
    """
    total = corpus.held_out.windows(sequence)
    total = total if limit is None else min(limit, total)
    together = rows.replicas * rows.micro
    for first in range(0, total, together):
        numbers = _share(np.arange(first, min(first + together, total)), rows)
        batch = _empty(len(numbers), sequence, end=corpus.end)
        real = np.flatnonzero(numbers != NO_SAMPLE)
        _fill(batch, real, corpus.held_out, numbers[real], end=corpus.end)
        batch.samples[:] = numbers
        yield batch


def _share(numbers: Numbers, rows: Rows) -> Numbers:
    """The replica's rows of a global batch, micro-batch after micro-batch, padding included."""
    count = micro_steps(len(numbers), micro=rows.micro, replicas=rows.replicas)
    padded = np.full(count * rows.replicas * rows.micro, NO_SAMPLE, dtype=np.int64)
    padded[: len(numbers)] = numbers
    return padded.reshape(count, rows.replicas, rows.micro)[:, rows.replica].reshape(-1)


def _empty(rows: int, sequence: int, *, end: int) -> Micro:
    """Rows of padding: one document of ends, of which nothing is predicted."""
    shape = rows, sequence
    return Micro(
        tokens=np.full(shape, end, dtype=np.int64),
        labels=np.full(shape, MASKED, dtype=np.int64),
        positions=np.tile(np.arange(sequence), (rows, 1)),
        documents=np.zeros(shape, dtype=np.int32),
        samples=np.full(rows, NO_SAMPLE, dtype=np.int64),
    )


def _fill(batch: Micro, rows: Numbers, tokens: Tokens, index: Numbers, *, end: int) -> None:
    """Reads samples `index` of a stream into the rows `rows`.

    Positions past the stream's last token read the end, and have no label.
    """
    sequence, last = batch.tokens.shape[1], len(tokens.ids) - 1
    at = index[:, None] * sequence + np.arange(sequence + 1)
    ids = tokens.ids[np.minimum(at, last)].astype(np.int64)  # uint16 has no -100
    ids[at > last] = end
    batch.tokens[rows] = ids[:, :-1]
    batch.labels[rows] = np.where(at[:, 1:] > last, MASKED, ids[:, 1:])
    reads = at[:, :-1]
    document = np.searchsorted(tokens.starts, reads, side="right") - 1
    batch.documents[rows] = document - document[:, :1]
    batch.positions[rows] = reads - np.maximum(tokens.starts[document], reads[:, :1])


def _split(batch: Micro, micro: int) -> Iterator[Micro]:
    for first in range(0, len(batch.samples), micro):
        part = slice(first, first + micro)
        yield Micro(
            batch.tokens[part],
            batch.labels[part],
            batch.positions[part],
            batch.documents[part],
            batch.samples[part],
        )
