"""Texts beside those of transformers' generate: of decoders, and of what follows an encoder."""

import pytest
import torch

from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import Draw, listed
from howdah.generate.rows import generate_rows

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 61, 14
PROMPTS = [[5, 9, 2, 33, 8], [17, 4], [60, 1, 1, 7, 20, 31, 5, 5]]
BEAMS = [
    Beams(3),
    Beams(4, length_penalty=2.0, early_stopping=True),
    Beams(2, length_penalty=-1.0, early_stopping="never", repetition_penalty=1.4),
    Beams(3, length_penalty=0.5, early_stopping="never"),
]


def their_texts(model, prompt, ends, **how):
    """The tokens behind a prompt, or behind the start, one list for each text that is returned;
    without padding.
    """
    tokens = torch.tensor([prompt])
    config = transformers.GenerationConfig(
        max_new_tokens=LENGTH, eos_token_id=ends or None, pad_token_id=0, do_sample=False, **how
    )
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    before = 1 if model.config.is_encoder_decoder else len(prompt)
    return [cut(text.tolist()[before:], ends) for text in found]


def cut(tokens, ends):
    """`tokens` up to the first end, which is kept."""
    first = [at for at, token in enumerate(tokens) if token in ends]
    return tokens[: first[0] + 1] if first else tokens


def assert_greedy_texts_agree(theirs, ours, texts, penalty, **how):
    """ours: gives a predictor for each use; texts: of our decoder, which it goes on with."""
    draw, how = (
        Draw(temperature=0, repetition_penalty=penalty),
        how | {"repetition_penalty": penalty},
    )
    expected = [their_texts(theirs, p, [], **how)[0] for p in PROMPTS]
    ends = [expected[0][6], expected[1][9]]
    each = [their_texts(theirs, p, ends, **how)[0] for p in PROMPTS]
    without = [text[:-1] if text[-1] in ends else text for text in each]
    found = generate_rows(ours(), texts, length=LENGTH, draw=draw, ends=ends)
    assert listed(found, len(PROMPTS)) == without


def assert_beams_agree(theirs, ours, texts, beams, **how):
    """As for greedy texts."""
    how |= {
        "num_beams": beams.count,
        "num_return_sequences": beams.count,
        "length_penalty": beams.length_penalty,
        "early_stopping": beams.early_stopping,
        "repetition_penalty": beams.repetition_penalty,
    }
    best = [their_texts(theirs, p, [], **how)[0] for p in PROMPTS]
    for ends in ([], [best[0][4], best[1][8]]):
        found = beam_search(ours(), texts, length=LENGTH, beams=beams, ends=ends)
        for prompt, mine in zip(PROMPTS, found, strict=True):
            assert [list(text.tokens) for text in mine] == their_texts(theirs, prompt, ends, **how)
