"""Batches: the tokens that a rank computes on, as arrays, cut the same way for every layout.

A global batch is a list of samples. It is padded with rows without labels until it divides
evenly, so that every rank runs the same collectives even when the last batch is short:

    6 samples, micro 2, 2 replicas        replica 0      replica 1
                              micro 0     s0 s1          s2 s3
                              micro 1     s4 s5          --  --       -1: no sample, no labels

Row j goes to micro-batch j // (replicas · micro), replica j % (replicas · micro) // micro. The
samples of a batch depend on the order alone, so the rows of all replicas together are the same
list for every layout.

Labels are shifted here, before the sequence is cut into slices. Positions and document numbers are
explicit arrays, so every pipeline stage and sequence slice has them without communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from howdah.plan.batch import MASKED, micro_steps
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.text.labelled import row_of
from howdah.text.order import Numbers, Order, locate, shares
from howdah.text.tokens import Corpus, Tokens, packed, require_samples

NO_SAMPLE = -1

Pair = tuple[Numbers, Numbers]  # tokens of source and target, each with the end token
Pairs = dict[int, Pair]  # by row of a batch


@dataclass(frozen=True)
class Rows:
    """Selects the rows of a global batch that one replica computes on.

    micro     rows of a micro-batch on one replica
    replicas  number of replicas that share the batch
    replica   index of this replica
    """

    micro: int
    replicas: int = 1
    replica: int = 0


def rows_of(layout: Layout, rank: int, *, micro: int) -> Rows:
    """The rows of `rank`; ranks that differ only along cp, tp or pp have the same rows."""
    return Rows(micro, layout.readers, axis(layout, "dp").index_of(rank))


@dataclass(frozen=True, eq=False)
class Micro:
    """A micro-batch of b rows of s positions.

    tokens     [b, s] int64: the input tokens
    labels     [b, s] int64: the next token, to be predicted; -100 where there is no label
    positions  [b, s] int64: counted from 0 at each document, and at the start of the row
    documents  [b, s] int32: number of the document within the row, ascending from 0
    samples    [b] int64: number of the sample in the run; -1 for a row of padding
    more       further arrays by name, [b, s] int64; of an encoder, token_types; of one in front of
               a decoder, the tokens that it reads, `source`, and where they are no padding, `seen`
    """

    tokens: Numbers
    labels: Numbers
    positions: Numbers
    documents: npt.NDArray[np.int32]
    samples: Numbers
    more: Mapping[str, Numbers] = field(default_factory=dict)


def order_of(corpus: Corpus, *, sequence: int, seed: int) -> Order:
    """The sample order of a run on `corpus`. Raises UserError when a source has no full sample."""
    require_samples(corpus, sequence=sequence, batch=1)
    counts = tuple(tokens.samples(sequence) for tokens in corpus.sources)
    return Order(seed, sequence, counts, shares(corpus.weights), corpus.order)


def micros(corpus: Corpus, order: Order, rows: Rows, *, first: int, size: int) -> list[Micro]:
    """The micro-batches of one replica, for the global batch of samples [first, first + size).

    Every replica gets the same number of micro-batches, of equal shapes.
    """
    numbers = _share(np.arange(first, first + size), rows)
    real = np.flatnonzero(numbers != NO_SAMPLE)
    source, index = locate(order, numbers[real])
    batch = _empty(len(numbers), order.sequence, end=corpus.end)
    pairs: Pairs = {}
    for one, tokens in enumerate(corpus.sources):
        here = source == one
        pairs |= _fill(batch, real[here], tokens, index[here], end=corpus.end)
    batch.samples[:] = numbers
    batch = _with_pairs(batch, pairs, corpus)
    return list(_split(batch, rows.micro))


def held_out_micros(
    corpus: Corpus, rows: Rows, *, sequence: int, limit: int | None = None
) -> Iterator[Micro]:
    """Yields the micro-batches of one replica for one pass over the held-out text, in order.

    The last sample is padded with labels of -100, so that every token is predicted. `limit` is
    the most samples read by all replicas together; they are spread evenly over the text.
    """
    windows = corpus.held_out.windows(sequence)
    total = windows if limit is None else min(limit, windows)
    chosen = np.arange(total) * windows // max(total, 1)
    together = rows.replicas * rows.micro
    for first in range(0, total, together):
        numbers = _share(np.arange(first, min(first + together, total)), rows)
        batch = _empty(len(numbers), sequence, end=corpus.end)
        real = np.flatnonzero(numbers != NO_SAMPLE)
        pairs = _fill(batch, real, corpus.held_out, chosen[numbers[real]], end=corpus.end)
        batch.samples[:] = numbers
        yield _with_pairs(batch, pairs, corpus)


def _share(numbers: Numbers, rows: Rows) -> Numbers:
    """The sample numbers of one replica's rows, micro-batch after micro-batch, with padding."""
    count = micro_steps(len(numbers), micro=rows.micro, replicas=rows.replicas)
    padded = np.full(count * rows.replicas * rows.micro, NO_SAMPLE, dtype=np.int64)
    padded[: len(numbers)] = numbers
    return padded.reshape(count, rows.replicas, rows.micro)[:, rows.replica].reshape(-1)


def _empty(rows: int, sequence: int, *, end: int) -> Micro:
    """Rows of padding: each is one document of end tokens, without labels."""
    shape = rows, sequence
    return Micro(
        tokens=np.full(shape, end, dtype=np.int64),
        labels=np.full(shape, MASKED, dtype=np.int64),
        positions=np.tile(np.arange(sequence), (rows, 1)),
        documents=np.zeros(shape, dtype=np.int32),
        samples=np.full(rows, NO_SAMPLE, dtype=np.int64),
    )


def laid_out(micro: Micro, pairs: Sequence[Pair | None], start: int) -> Micro:
    """The micro-batch with these sources and targets in its rows; None: a row of padding.

    start  the token with which decoders begin, and which stands for padding

    Of a row without a pair everything is seen: attention to nothing has no result.
    """
    rows, length = micro.tokens.shape
    tokens, source = np.full((2, rows, length), start)
    labels, seen = np.full((rows, length), MASKED), np.zeros((rows, length), np.int64)
    for row, pair in enumerate(pairs):
        if pair is None:
            seen[row] = 1
            continue
        given, wanted = pair
        source[row, : len(given)], seen[row, : len(given)] = given, 1
        labels[row, : len(wanted)], tokens[row, 1 : len(wanted)] = wanted, wanted[:-1]
    return replace(
        micro,
        tokens=tokens,
        labels=labels,
        positions=np.tile(np.arange(length), (rows, 1)),
        documents=np.zeros((rows, length), np.int32),
        more={"source": source, "seen": seen},
    )


def _with_pairs(batch: Micro, pairs: Pairs, corpus: Corpus) -> Micro:
    """The batch with pairs in its rows, if the corpus has pairs."""
    if not corpus.sources[0].paired:
        return batch
    assert corpus.start is not None, "the corpus was prepared for a model without a decoder"
    return laid_out(batch, [pairs.get(row) for row in range(len(batch.samples))], corpus.start)


def _fill(batch: Micro, rows: Numbers, tokens: Tokens, index: Numbers, *, end: int) -> Pairs:
    """Reads the samples `index` of a stream into the rows `rows` of `batch`; returns pairs by row.

    Positions past the last token, of the stream or of a padded document, contain `end` and have no
    label. A pair that is longer than a sample is cut. A text with a label has that at its last
    token.
    """
    if tokens.paired:
        most = batch.tokens.shape[1] - 1
        read = map(tokens.pair, index.tolist())
        both = [(np.append(a[:most], end), np.append(b[:most], end)) for a, b in read]
        return dict(zip(rows.tolist(), both, strict=True))
    if tokens.trained is not None:
        _fill_conversations(batch, rows, tokens, index)
        return {}
    if tokens.frame is not None:
        for row, one in zip(rows.tolist(), index.tolist(), strict=True):
            ids, label, place = row_of(
                tokens.document(one)[1:], tokens.frame, batch.tokens.shape[1]
            )
            batch.tokens[row, : len(ids)], batch.labels[row, place] = ids, label
            batch.documents[row, len(ids) :] = 1
            batch.positions[row, len(ids) :] -= len(ids)
        return {}
    sequence, last = batch.tokens.shape[1], np.full((len(index), 1), len(tokens.ids) - 1)
    first = index * sequence
    if tokens.padded:
        first, last = tokens.places(index, sequence)
        last = last[:, None]
    at = first[:, None] + np.arange(sequence + 1)
    ids = tokens.ids[np.minimum(at, last)].astype(np.int64)  # uint16 cannot hold -100
    ids[at > last] = end
    batch.tokens[rows] = ids[:, :-1]
    batch.labels[rows] = np.where(at[:, 1:] > last, MASKED, ids[:, 1:])
    reads = at[:, :-1]
    document = np.searchsorted(tokens.starts, reads, side="right") - 1
    batch.documents[rows] = document - document[:, :1]
    batch.positions[rows] = reads - np.maximum(tokens.starts[document], reads[:, :1])
    if tokens.padded:
        padding = reads >= last
        batch.documents[rows] = padding
        batch.positions[rows] = reads - np.where(padding, last, reads[:, :1])
    return {}


def _fill_conversations(batch: Micro, rows: Numbers, tokens: Tokens, index: Numbers) -> None:
    """Reads rows of conversations: each is a document, and so is the padding behind the last."""
    assert tokens.trained is not None
    found = packed(tokens, batch.tokens.shape[1])
    for row, number in zip(rows.tolist(), index.tolist(), strict=True):
        at, place = 0, -1
        for place, one in enumerate(found.of(number)):
            first, size = int(tokens.starts[one]) + 1, int(found.sizes[one])
            here, reads = slice(at, at + size), slice(first, first + size)
            predicted = slice(first + 1, first + 1 + size)
            batch.tokens[row, here] = tokens.ids[reads]
            wanted = tokens.ids[predicted].astype(np.int64)
            batch.labels[row, here] = np.where(tokens.trained[predicted], wanted, MASKED)
            batch.positions[row, here] = np.arange(size)
            batch.documents[row, here] = place
            at += size
        batch.documents[row, at:] = place + 1
        batch.positions[row, at:] = np.arange(batch.tokens.shape[1] - at)


def _split(batch: Micro, micro: int) -> Iterator[Micro]:
    for first in range(0, len(batch.samples), micro):
        part = slice(first, first + micro)
        yield Micro(
            batch.tokens[part],
            batch.labels[part],
            batch.positions[part],
            batch.documents[part],
            batch.samples[part],
            {name: array[part] for name, array in batch.more.items()},
        )
