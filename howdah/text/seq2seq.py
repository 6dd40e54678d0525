"""What an encoder reads and a decoder behind it writes: spans of a text, or pairs of texts.

    text       Thank you for inviting me to your party last week .      (1910.10683, figure 2)
    source     Thank you <0> me to your party <1> week .                </s>
    target     <0> for inviting <1> last                                </s>
    decoder    <pad> <0> for inviting <1> last                          reads the target one later

Spans that are left out of a text (span corruption) are a function of (seed, sample), as all noise
is: not of the layout, nor of what was read before; held-out samples have a key of their own. A row
of text is one source, whatever documents are in it. Of a pair source and target are what they are;
what is longer than a sample is cut. Both have places for as many tokens as a sample: the rest is
padding, which is not seen, and whose labels are masked.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from howdah.base.errors import UserError
from howdah.base.seeds import key, mix
from howdah.plan.batch import MASKED
from howdah.plan.method import Spans
from howdah.text.batches import Micro, Pair, laid_out
from howdah.text.order import Numbers


@dataclass(frozen=True)
class SpanCorruption:
    """What leaving spans out depends on, besides the sample.

    sentinels  tokens that stand for the spans, in this order
    start, end  the tokens with which decoders begin, and with which source and target end
    name       of the text: training and held-out samples have the same numbers
    """

    spans: Spans
    seed: int
    sentinels: tuple[int, ...]
    start: int
    end: int
    name: str = "spans"

    def __call__(self, micro: Micro) -> Micro:
        """The micro-batch with spans of its rows as targets."""
        real = (micro.labels != MASKED).sum(1)
        rows = zip(micro.tokens, real, micro.samples, strict=True)
        room = micro.tokens.shape[1]
        pairs = [self._pair(row[:count], int(sample), room) for row, count, sample in rows]
        return laid_out(micro, pairs, self.start)

    def _pair(self, text: Numbers, sample: int, room: int) -> Pair | None:
        counts = self._counts(len(text), room)
        if sample < 0 or counts is None:
            return None
        hidden, stay, spans = counts
        if spans > len(self.sentinels):
            raise UserError(
                f"method.spans leaves {spans} spans out of a sample, and the tokenizer has "
                f"{len(self.sentinels)} tokens for them, <extra_id_0> and so on; make "
                "method.spans.length larger, or data.sequence_length smaller"
            )
        kept = self._lengths("kept", sample, stay, spans)
        left = self._lengths("left out", sample, hidden, spans)
        edges = np.cumsum(np.stack([kept, left], 1).flatten())
        parts = np.split(text[: edges[-1]], edges[:-1])
        marks = [np.array([token]) for token in self.sentinels[:spans]]
        ends = np.array([self.end])
        source = [part for both in zip(parts[::2], marks, strict=True) for part in both]
        target = [part for both in zip(marks, parts[1::2], strict=True) for part in both]
        return np.concatenate([*source, ends]), np.concatenate([*target, ends])

    def _counts(self, most: int, room: int) -> tuple[int, int, int] | None:
        """(tokens that are left out, tokens that stay, spans) of the longest text of at most so
        many tokens whose source and target have `room`; None: there is none.
        """
        for length in range(most, 1, -1):
            hidden = min(max(round(length * self.spans.share), 1), length - 1)
            stay = length - hidden
            spans = min(max(round(hidden / self.spans.length), 1), hidden, stay)
            if max(hidden, stay) + spans + 1 <= room:
                return hidden, stay, spans
        return None

    def _lengths(self, what: str, sample: int, total: int, parts: int) -> npt.NDArray[np.int64]:
        """`total` tokens cut into so many parts, each of one at least; all cuts are as likely."""
        bits = mix(key(self.seed, self.name, what, sample), np.arange(total - 1, dtype=np.uint64))
        cuts = np.sort(np.argsort(bits, kind="stable")[: parts - 1]) + 1
        return np.array([b - a for a, b in pairwise([0, *cuts.tolist(), total])])
