"""Masked language modelling (BERT, https://arxiv.org/abs/1810.04805): which tokens are hidden, and
what stands in their place.

    text       the cat sat on the mat
    model      the [M] sat on the mat         80 % of the hidden: the mask token
               the cat sat on the mat         10 %: as it was
               the cat sat up the mat         10 %: a random token
    labels      -  cat  -  on  -   -          only hidden tokens are predicted

What is hidden is a function of (seed, sample, position), as all noise is: not of the layout, nor of
what was read before. A sample that is read again in a later epoch has another number, and so other
tokens are hidden (https://arxiv.org/abs/1907.11692, section 4.1). Held-out samples have a key of
their own, the same at every evaluation. The end token is never hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from howdah.base.errors import UserError
from howdah.base.seeds import key, mix
from howdah.plan.batch import MASKED
from howdah.plan.method import Masking, Method
from howdah.shapes.shape import ModelShape
from howdah.text.batches import Micro
from howdah.text.seq2seq import SpanCorruption
from howdah.text.tokens import Corpus

Task = Callable[[Micro], Micro]  # makes of rows of text what a model is trained on


@dataclass(frozen=True)
class Mask:
    """What hiding depends on, besides the sample.

    token    the mask token
    entries  random tokens are below it
    end      the end token
    name     of the text: training and held-out samples have the same numbers
    """

    masking: Masking
    seed: int
    token: int
    entries: int
    end: int
    name: str = "mask"

    def __call__(self, micro: Micro) -> Micro:
        """The micro-batch with some tokens hidden; its labels are these tokens."""
        positions = np.arange(micro.tokens.shape[1])
        places = micro.samples[:, None] * micro.tokens.shape[1] + positions
        wanted = (micro.samples >= 0)[:, None] & (micro.tokens != self.end)
        wanted &= self._draw("hidden", places) < self.masking.share
        how = self._draw("how", places)
        kept = 1.0 - self.masking.random
        others = (self._bits("token", places) % np.uint64(self.entries)).astype(np.int64)
        shown = np.where(how < self.masking.masked, self.token, micro.tokens)
        shown = np.where(how >= kept, others, shown)
        return replace(
            micro,
            tokens=np.where(wanted, shown, micro.tokens),
            labels=np.where(wanted, micro.tokens, MASKED),
        )

    def _bits(self, what: str, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return mix(key(self.seed, self.name, what), places.astype(np.uint64))

    def _draw(self, what: str, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """A number in [0, 1) for each place."""
        return np.asarray((self._bits(what, places) >> np.uint64(11)) * 2.0**-53, np.float64)


def at_first_token(micro: Micro) -> Micro:
    """The micro-batch with the label of each text at its first token, of an encoder's texts."""
    labels = np.full_like(micro.labels, MASKED)
    labels[:, 0] = np.where(micro.labels == MASKED, np.int64(-1), micro.labels).max(1)
    labels[:, 0][labels[:, 0] < 0] = MASKED
    return replace(micro, labels=labels)


def task_of(
    shape: ModelShape, method: Method, corpus: Corpus, *, seed: int, held_out: bool = False
) -> Task:
    """What the rows of a corpus become for a model: of a decoder they stay as they are, of an
    encoder some tokens are hidden, and a decoder behind an encoder writes spans of them; pairs and
    labels stay, but those of an encoder's texts go to the first token. Raises UserError if the
    corpus has no mask token.
    """
    if shape.family == "decoder" or corpus.sources[0].paired:
        return lambda micro: micro
    if shape.labels:
        return at_first_token
    of, name = corpus, "held-out " if held_out else ""
    if shape.family == "encoder-decoder":
        assert of.start is not None, "the corpus was prepared for a model without a decoder"
        return SpanCorruption(method.spans, seed, of.sentinels, of.start, of.end, f"{name}spans")
    if of.mask is None:
        raise UserError(LACKING)
    return Mask(method.masking, seed, of.mask, of.entries, of.end, f"{name}mask")


NO_TEXT = "an encoder finds hidden tokens and does not write text"
NO_PAIRS = (
    "data.sources has pairs of a source and a target, and model.family is not encoder-decoder; "
    "leave target out, or train a T5"
)
NO_MASK = (
    "data.mask_token hides tokens from an encoder, and what the encoder of an encoder-decoder does "
    "not see are spans; leave it out, method.spans says how many"
)
NO_TASK = (
    "data.mask_token hides tokens from an encoder, and the model is a decoder, which sees no token "
    "that comes later anyway; leave it out"
)
LACKING = (
    "an encoder is trained to find hidden tokens, and data.mask_token is not given; give the token "
    "that hides them: of a tokenizer that is trained here any name, such as <|mask|>; of BERT's "
    "[MASK], of RoBERTa's <mask>"
)
