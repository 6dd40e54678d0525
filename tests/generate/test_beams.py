"""Beam search: all texts where there are enough beams, scores that are sums, and mistakes."""

import pytest
import torch
from random_model import LLAMA, random_model

from howdah.base.errors import UserError
from howdah.generate.beams import Beams, Found, beam_search
from howdah.generate.draw import GREEDY
from howdah.generate.predictor import OneDevice
from howdah.generate.rows import generate

PROMPT, VOCAB = [3, 1], LLAMA.vocab


@pytest.fixture(scope="module")
def model():
    return OneDevice(random_model(LLAMA))


@torch.no_grad()
def log_probs(model, text):
    """The log-probabilities [V] of the token behind `text`."""
    hidden = model.model(torch.tensor([text]), torch.arange(len(text))[None])
    return model.model.logits(hidden)[0, -1].log_softmax(-1)


def test_two_steps_find_the_best_of_all_pairs_of_the_beams(model):
    """With beams for half of all first tokens, the best pair begins with one of them."""
    (found,) = beam_search(model, [PROMPT], length=2, beams=Beams(VOCAB // 2), ends=())
    first = log_probs(model, PROMPT)
    pairs = torch.stack([first[n] + log_probs(model, [*PROMPT, n]) for n in range(VOCAB)])
    assert found[0].tokens == divmod(int(pairs.argmax()), VOCAB)
    assert found[0].score == pytest.approx(float(pairs.max()) / 2, rel=1e-5)
    assert found == sorted(found, key=lambda text: -text.score)


def test_a_beam_that_is_alone_is_greedy(model):
    (found,) = beam_search(model, [PROMPT], length=5, beams=Beams(1), ends=())
    greedy = generate(model, PROMPT, length=5, draw=GREEDY, ends=())
    assert found[0].tokens == tuple(greedy)


def test_a_long_text_wins_by_a_higher_power_of_its_length(model):
    ends = range(20)

    def best(penalty):
        beams = Beams(6, length_penalty=penalty, early_stopping="never")
        return len(beam_search(model, [PROMPT], length=8, beams=beams, ends=ends)[0][0].tokens)

    assert best(-2.0) == 1 and best(4.0) == 8


def test_prompts_together_are_each_alone(model):
    prompts, ends = [[3, 1], [7], [5] * 9, [1] * LLAMA.context], [4, 9, 11]
    together = beam_search(model, prompts, length=10, beams=Beams(3), ends=ends)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = beam_search(model, [prompt], length=10, beams=Beams(3), ends=ends)
        assert [text.tokens for text in found] == [text.tokens for text in alone]
    assert together[3] == [Found((), 0.0)]


@pytest.mark.parametrize(
    ("beams", "sentence"),
    [
        (Beams(0), "beams is 0; it must be at least 1, and at most half of the 40 tokens"),
        (Beams(21), "beams is 21"),
        (Beams(2, length_penalty=float("nan")), "length_penalty is nan"),
        (Beams(2, repetition_penalty=-1.0), "repetition_penalty is -1"),
    ],
)
def test_what_cannot_be_searched_is_said(model, beams, sentence):
    with pytest.raises(UserError, match=sentence):
        beam_search(model, [PROMPT], length=2, beams=beams, ends=())
