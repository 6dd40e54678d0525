"""What an encoder-decoder writes: token by token that of transformers' generate, in float64."""

from functools import partial
from pathlib import Path

import pytest
import torch
from their_texts import (
    BEAMS,
    LENGTH,
    PROMPTS,
    VOCAB,
    assert_beams_agree,
    assert_greedy_texts_agree,
    their_texts,
)

from howdah.base.errors import UserError
from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import GREEDY, Draw, listed
from howdah.generate.placed import decoding_plan, place
from howdah.generate.predictor import BehindEncoder, OneDevice, WholeStacks
from howdah.generate.rows import generate_rows
from howdah.model.hub import read_hub
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import parse_layout
from howdah.train.resume import read_folder
from howdah.train.whole_model import loaded_model

transformers = pytest.importorskip("transformers")

CPU, START = torch.device("cpu"), 3
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
def made(request, tmp_path_factory) -> tuple:
    """Their model, and its folder."""
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
    return theirs, folder


@pytest.fixture(scope="module")
def both(made) -> tuple:
    """Their model and ours, of the same weights."""
    theirs, folder = made
    shape, _ = read_hub(folder)
    whole = loaded_model(read_folder(folder, shape), shape, dtype=torch.float64, device=CPU)
    return theirs, WholeStacks(whole)


def searched_on_ranks(transport, folder, words):
    """For workers: greedy texts, and those of a search, on a layout."""
    shape, _ = read_hub(folder)
    plan, fill = decoding_plan(shape, parse_layout(words)), read_folder(folder, shape)
    with connect_mesh(plan.layout, transport, CPU) as mesh:
        ours = BehindEncoder(place(plan, mesh, fill, dtype=torch.float64), PROMPTS)
        greedy = generate_rows(ours, TEXTS, length=LENGTH, draw=GREEDY, ends=[])
        found = beam_search(ours, TEXTS, length=LENGTH, beams=BEAMS[1], ends=[])
        return listed(greedy, len(TEXTS)), [[list(one.tokens) for one in each] for each in found]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_texts_are_those_of_generate(both, penalty):
    theirs, model = both
    ours = partial(BehindEncoder, model, PROMPTS)
    assert_greedy_texts_agree(theirs, ours, TEXTS, penalty, decoder_start_token_id=START)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("beams", BEAMS, ids=str)
def test_beams_are_those_of_generate(both, beams):
    theirs, model = both
    ours = partial(BehindEncoder, model, PROMPTS)
    assert_beams_agree(theirs, ours, TEXTS, beams, decoder_start_token_id=START)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["tp2", "pp2", pytest.param("pp2 tp2", marks=pytest.mark.slow)])
def test_several_ranks_write_what_generate_writes(workers, made, words):
    theirs, folder = made
    start, beams = {"decoder_start_token_id": START}, BEAMS[1]
    how = start | {
        "num_beams": beams.count,
        "num_return_sequences": beams.count,
        "length_penalty": beams.length_penalty,
        "early_stopping": beams.early_stopping,
    }
    greedy = [their_texts(theirs, prompt, [], **start)[0] for prompt in PROMPTS]
    searched = [their_texts(theirs, prompt, [], **how) for prompt in PROMPTS]
    ranks = parse_layout(words).world
    for found in workers.run(searched_on_ranks, folder, words, ranks=ranks):
        assert found == (greedy, searched)


@pytest.mark.slow_after(1)
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
        OneDevice(model.model)
    with pytest.raises(UserError, match="decoding takes tp and pp alone"):
        decoding_plan(model.shape, parse_layout("dp2"))
    with pytest.raises(UserError, match="beams is 40"):
        ours = BehindEncoder(model, [[5]])
        beam_search(ours, [[START]], length=2, beams=Beams(40), ends=[])
