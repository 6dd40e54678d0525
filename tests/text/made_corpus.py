"""Corpora for tests: small, and with tokens that say where they came from."""

from pathlib import Path

import numpy as np

from howdah.text.tokens import Corpus, Tokens

END = 0


def stream(*lengths, first=1):
    """Documents of these lengths whose tokens count up from `first`, between ends."""
    ids, starts = [], []
    for length in lengths:
        starts.append(len(ids))
        ids += [END, *range(first, first + length)]
        first += length
    return Tokens(np.array([*ids, END], dtype=np.uint16), np.array(starts, dtype=np.int64))


def corpus(*sources, weights=None, held_out=None):
    return Corpus(
        folder=Path("nowhere"),
        sources=sources,
        weights=weights or (1.0,) * len(sources),
        names=tuple(f"source {i}" for i in range(len(sources))),
        held_out=held_out or stream(3),
        fingerprint="",
        entries=1 << 16,
        end=END,
        documents=0,
        duplicates=0,
        skipped=0,
        held_out_bytes=0,
        held_out_gzip=0,
        held_out_xz=0,
    )
