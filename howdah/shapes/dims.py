"""Named dims, and how much of each a rank works with: the ground of flops and activations.

Both are lists of plain data. A matrix product or a saved tensor says what there is one of it for
(a token, a pair of tokens, …) and which dims it has, by name and whole size. A layout changes
no list. It changes how many tokens a rank sees, and which share of a dim is its own:

    tp          heads, kv_heads, query, key, ffn, expert_ffn, vocab      so many columns each
    cp          token, pair, source, …                                   a part of each sequence
    sp with tp  sp_token, sp_source       norms and residuals: a part of the part of a sequence

    query projection: 12 tokens, h = 16, a·d = 16        cp2 tp4: 6 tokens, columns 4, inner 16
    norm's input:     12 tokens, h = 16                  cp2 tp4 sp: 2 tokens, width 16

`local` cuts as evenly as it goes, and gives what the rank with the most of each has. A caller
that knows better (heads cut by hand, another order of tokens) writes its own `RankSizes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal, NamedTuple

from howdah.shapes.shape import Experts, ModelShape

CHUNK = 2048  # tokens whose logits the head of howdah's model makes at one time

# What there is one of something for. `pair` is a query and a key of it, so that attention over s
# tokens has s² in each sequence; `cross_pair` is a query and a token of the encoder; `expert_row`
# is a place for a token at one of its experts, and `taken_row` one at an expert of this rank;
# `traded` is a token of all ranks of cp, which have traded the sequence for heads (`traded heads`,
# `traded query`, `traded key`), and `traded_pair` a pair of these.
Per = Literal[
    "token",
    "sp_token",
    "pair",
    "source",
    "sp_source",
    "source_pair",
    "cross_pair",
    "expert_row",
    "taken_row",
    "traded",
    "traded_pair",
    "chunk",
    "once",
]
# The lists are written for a decoder; an encoder in front of one reads the source.
OF_SOURCE: dict[Per, Per] = {"token": "source", "sp_token": "sp_source", "pair": "source_pair"}


class Dim(NamedTuple):
    """A named dim and its whole size."""

    name: str
    size: int


@dataclass(frozen=True)
class Tokens:
    """A micro-batch: rows of `sequence` tokens; in an encoder-decoder `source` more to encode."""

    rows: int
    sequence: int
    source: int = 0


@dataclass(frozen=True)
class RankSizes:
    """A rank's part: how many there are of what is counted, and its share of each named dim.

    Dims without a share are whole.
    """

    counts: Mapping[Per, int]
    shares: Mapping[str, Fraction]

    def size(self, dim: Dim) -> int:
        """How much of the dim the rank has, rounded up."""
        share = self.shares.get(dim.name)
        return dim.size if share is None else -(-dim.size * share.numerator // share.denominator)


def local(
    shape: ModelShape, tokens: Tokens, *, tp: int = 1, cp: int = 1, sp: bool = False
) -> RankSizes:
    """The part of the rank with the most. Key-value heads are copied where tp exceeds them."""
    own = tokens.rows * ceil(tokens.sequence / cp)
    source = tokens.rows * ceil(tokens.source / cp)
    slices = tp if sp else 1
    counts: dict[Per, int] = {
        "token": own,
        "sp_token": ceil(own / slices),
        "pair": own * tokens.sequence,
        "source": source,
        "sp_source": ceil(source / slices),
        "source_pair": source * tokens.source,
        "cross_pair": own * tokens.source,
        "expert_row": tokens.rows * expert_rows(shape, ceil(tokens.sequence / cp)),
        "taken_row": tokens.rows * expert_rows(shape, ceil(tokens.sequence / cp)),
        "chunk": (own - 1) % CHUNK + 1,
        "once": 1,
    }
    query, key = _share(shape.heads, tp), _share(shape.k, tp)
    shares = {
        "heads": query,
        "query": query,
        "kv_heads": key,
        "key": key,
        "ffn": _share(shape.ffn_size, tp),
        "vocab": _share(shape.vocab, tp),
        "expert_ffn": _share(shape.experts.ffn_size, tp) if shape.experts else Fraction(1),
        "shared_ffn": _share(max(shape.experts.shared, 1), tp) if shape.experts else Fraction(1),
    }
    return RankSizes(counts, shares)


def expert_rows(shape: ModelShape, sequence: int, capacity: float = 0.0) -> int:
    """The places for tokens at all experts, for a sequence of so many tokens: a place for each
    choice, or with a `capacity` (`method.routing`) the same number at each expert.
    """
    if shape.experts is None:
        return 0
    if capacity == 0:
        return sequence * shape.experts.top_k
    return shape.experts.count * expert_places(shape.experts, sequence, capacity)


def expert_places(experts: Experts, sequence: int, capacity: float) -> int:
    """The most tokens of a sequence that one expert takes."""
    even = Fraction(sequence * experts.top_k, experts.count)
    return min(ceil(Fraction(str(capacity)) * even), sequence)


def _share(size: int, parts: int) -> Fraction:
    """What the largest of `parts` has, one of them at least."""
    return Fraction(ceil(size / parts), size)
