"""What an encoder-decoder writes: token by token that of transformers' generate, in float64."""

from functools import partial
from pathlib import Path

import pytest
import torch
from their_texts import BEAMS, PROMPTS, VOCAB, assert_beams_agree, assert_greedy_texts_agree

from howdah.base.errors import UserError
from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import Draw, listed
from howdah.generate.placed import decoding_plan
from howdah.generate.predictor import BehindEncoder, OneDevice
from howdah.generate.rows import generate_rows
from howdah.model.hub import read_hub
from howdah.plan.layout import parse_layout
from howdah.train.resume import read_folder
from howdah.train.whole_model import loaded_model

transformers = pytest.importorskip("transformers")

START = 3
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "n_positions": 32,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": START,
}
FORMS = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
TEXTS = [[START]] * len(PROMPTS)


@pytest.fixture(scope="module", params=FORMS)
def both(request, tmp_path_factory) -> tuple:
    """Their model and ours, of the same weights."""
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, **FORMS[request.param])
    theirs = transformers.T5ForConditionalGeneration(config).eval().double()
    if request.param == "1.1":  # transformers 5 ties what it makes
        theirs.lm_head.weight = torch.nn.Parameter(torch.zeros_like(theirs.shared.weight))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    folder: Path = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(folder)
    shape, _ = read_hub(folder)
    fill = read_folder(folder, shape)
    return theirs, loaded_model(fill, shape, dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_texts_are_those_of_generate(both, penalty):
    theirs, model = both
    ours = partial(BehindEncoder, model, PROMPTS)
    assert_greedy_texts_agree(theirs, ours, TEXTS, penalty, decoder_start_token_id=START)


@pytest.mark.parametrize("beams", BEAMS, ids=str)
def test_beams_are_those_of_generate(both, beams):
    theirs, model = both
    ours = partial(BehindEncoder, model, PROMPTS)
    assert_beams_agree(theirs, ours, TEXTS, beams, decoder_start_token_id=START)


def test_a_drawn_text_is_that_of_its_source_alone_and_ends_at_the_context(both):
    _, model = both

    def drawn(sources):
        ours, draw = BehindEncoder(model, sources), Draw(seed=2)
        texts = [[START]] * len(sources)
        return listed(generate_rows(ours, texts, length=99, draw=draw, ends=[7]), len(sources))

    together = drawn(PROMPTS)
    assert together == [drawn([source])[0] for source in PROMPTS]
    assert max(map(len, together)) <= model.shape.context - 1


def test_what_cannot_be_decoded_is_told(both):
    _, model = both
    with pytest.raises(UserError, match="has 33 tokens, and the model's context is 32"):
        BehindEncoder(model, [[5], [1] * 33])
    with pytest.raises(UserError, match="reads sources first; use BehindEncoder"):
        OneDevice(model)
    with pytest.raises(UserError, match="decoded on one process; leave --layout out"):
        decoding_plan(model.shape, parse_layout("tp2"))
    with pytest.raises(UserError, match="beams is 40"):
        ours = BehindEncoder(model, [[5]])
        beam_search(ours, [[START]], length=2, beams=Beams(40), ends=[])
