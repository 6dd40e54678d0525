"""Hidden tokens: how many, what stands in their place, and what the choice depends on."""

from dataclasses import replace

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.plan.batch import MASKED
from howdah.plan.method import Masking, Method
from howdah.shapes.presets import preset
from howdah.text.batches import Micro
from howdah.text.masking import Mask, task_of
from howdah.verify.case import Case, corpus_of

END, TOKEN, ENTRIES = 0, 99, 100
MASK = Mask(Masking(), seed=4, token=TOKEN, entries=ENTRIES, end=END)


def micro_of(samples, length=64):
    samples = np.array(samples)
    tokens = 1 + (samples[:, None] * 31 + np.arange(length) * 7) % 90
    tokens[:, ::16] = END
    places = np.tile(np.arange(length), (len(samples), 1))
    return Micro(tokens, tokens.copy(), places, np.zeros_like(tokens, np.int32), samples)


def test_the_shares_are_those_of_the_method():
    given = micro_of(range(400))
    found = MASK(given)
    wanted = found.labels != MASKED
    text = given.tokens != END
    assert not wanted[~text].any()
    assert wanted[text].mean() == pytest.approx(0.15, abs=0.01)
    assert np.array_equal(found.labels[wanted], given.tokens[wanted])
    assert np.array_equal(found.tokens[~wanted], given.tokens[~wanted])
    hidden, same = found.tokens[wanted] == TOKEN, found.tokens[wanted] == given.tokens[wanted]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02)
    assert same.mean() == pytest.approx(0.1, abs=0.02)
    others = found.tokens[wanted][~hidden & ~same]
    assert others.min() >= 0 and others.max() < ENTRIES and len(set(others.tolist())) > 60


def test_it_depends_on_seed_and_sample_alone():
    whole = MASK(micro_of([3, 4, 5, 6]))
    part = MASK(micro_of([5, 6]))
    assert np.array_equal(whole.tokens[2:], part.tokens)
    assert np.array_equal(whole.labels[2:], part.labels)
    assert not np.array_equal(whole.labels[0] == MASKED, whole.labels[1] == MASKED)
    for other in (replace(MASK, seed=5), replace(MASK, name="held-out mask")):
        assert not np.array_equal(other(micro_of([3])).labels, whole.labels[:1])


def test_padding_has_no_labels():
    found = MASK(micro_of([-1, 2]))
    assert (found.labels[0] == MASKED).all() and (found.labels[1] != MASKED).any()


def test_a_decoder_keeps_its_text_and_an_encoder_needs_a_mask_token():
    corpus = corpus_of(Case(preset("laptop"), None, None, 2, 1, 16, steps=1, seed=0))
    given = micro_of([1])
    assert task_of(preset("laptop"), Method(), corpus, seed=0)(given) is given
    task = task_of(preset("bert-base"), Method(), corpus, seed=0)
    assert (task(given).labels == MASKED).mean() > 0.5
    with pytest.raises(UserError, match=r"data\.mask_token is not given; give the token"):
        task_of(preset("bert-base"), Method(), replace(corpus, mask=None), seed=0)
