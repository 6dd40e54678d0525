"""Decoding on several ranks: the logits and texts of one device, with parts of the weights."""

from dataclasses import replace

import pytest
import torch
from random_model import BLOOM, GPT2, LATENT, LLAMA

from howdah.base.errors import UserError
from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import GREEDY, Draw, listed
from howdah.generate.placed import decoding_plan, place
from howdah.generate.predictor import BehindEncoder, OneDevice, WholeStacks
from howdah.generate.rows import generate_rows
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import parse_layout
from howdah.shapes.shape import Experts, ModelShape
from howdah.shapes.weights import weights
from howdah.train.whole_model import loaded_model

CPU = torch.device("cpu")
T5 = ModelShape(
    family="encoder-decoder",
    layers=2,
    encoder_layers=3,
    width=16,
    heads=4,
    head_size=6,
    ffn_size=24,
    vocab=41,
    context=32,
    feedforward="relu",
    norm_eps=1e-6,
    positions="relative",
    tie_embeddings=True,
)
PROMPTS = [[5, 9, 2], [17], [30, 1, 1, 7, 20]]
ENDS, START = (4,), 3
SHAPES = {
    "llama": replace(LLAMA, tie_embeddings=True),
    "gpt2": replace(GPT2, vocab=41),
    "bloom": BLOOM,
    "t5": T5,
    "flan": replace(T5, feedforward="geglu", tie_embeddings=False, heads=6, encoder_layers=1),
    "latent experts": replace(LATENT, experts=Experts(count=4, top_k=2, ffn_size=8, shared=8)),
}


def texts_of(model):
    """Greedy, drawn and searched texts, and the numbers that the model holds."""
    both = model.shape.encoder_layers > 0
    texts = [[START]] * len(PROMPTS) if both else PROMPTS
    model = BehindEncoder(model, PROMPTS) if both else model
    drawn = [
        listed(generate_rows(model, texts, length=6, draw=draw, ends=ENDS), len(PROMPTS))
        for draw in (GREEDY, Draw(seed=4, top_k=9, repetition_penalty=1.2))
    ]
    beams = beam_search(model, texts, length=6, beams=Beams(3), ends=ENDS)
    return drawn, [[found.tokens for found in texts] for texts in beams]


def placed_texts(transport, shape, words):
    """For workers: the same texts on a layout, and how many weights this rank has."""
    plan, fill = decoding_plan(shape, parse_layout(words)), random_init(weights(shape), seed=1)
    with connect_mesh(plan.layout, transport, CPU) as mesh:
        model = place(plan, mesh, fill, dtype=torch.float64)
        return texts_of(model), model.held


def proof(workers, shape, words):
    """Every rank has the texts of one device, and about its share of the weights."""
    fill = random_init(weights(shape), seed=1)
    whole = loaded_model(fill, shape, dtype=torch.float64, device=CPU)
    alone = texts_of(WholeStacks(whole) if shape.encoder_layers else OneDevice(whole))
    ranks = parse_layout(words).world
    found = workers.run(placed_texts, shape, words, ranks=ranks)
    total = sum(weight.elements for weight in weights(shape))
    for texts, held in found:
        assert texts == alone
        assert held < 0.75 * total


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["tp2", "pp2"])
@pytest.mark.parametrize("shape", ["llama", "t5"])
def test_two_ranks_write_the_texts_of_one(workers, shape, words):
    proof(workers, SHAPES[shape], words)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["tp2", "pp2", "pp2 tp2", "tp4", "pp4"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_write_the_texts_of_one_device(workers, shape, words):
    if words == "pp4" and not shape.encoder_layers:
        shape = replace(shape, layers=3)
    if words == "tp4" and shape is BLOOM:
        shape = replace(BLOOM, heads=6)
    elif words == "tp4" and shape.heads == 6:
        shape = replace(shape, heads=8)
    proof(workers, shape, words)


@pytest.mark.parametrize("words", ["dp2", "tp2 sp", "pp2 zero1", "cp2", "pp2 interleaved v2"])
def test_words_of_training_are_refused(words):
    with pytest.raises(UserError, match=r"is for training; decoding takes tp and pp alone"):
        decoding_plan(LLAMA, parse_layout(words))
