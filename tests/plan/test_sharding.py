"""The table of weights: names, units, decay, dims, and the spread each weight starts with."""

from dataclasses import replace
from math import sqrt

import pytest

from howdah.plan.layout import Layout
from howdah.plan.presets import preset
from howdah.plan.shapes import ModelShape
from howdah.plan.sharding import SPREAD, placement, weights

SHAPE = ModelShape(layers=2, width=12, heads=6, kv_heads=2, ffn=20, vocab=50, context=8)

BLOCK = """
attention_norm.weight    width        12     no
attention.q.weight       query,width  12,12  yes
attention.k.weight       key,width    4,12   yes
attention.v.weight       key,width    4,12   yes
attention.o.weight       width,query  12,12  yes
feedforward_norm.weight  width        12     no
feedforward.gate.weight  ffn,width    20,12  yes
feedforward.up.weight    ffn,width    20,12  yes
feedforward.down.weight  width,ffn    12,20  yes
"""


def table(shape):
    return {weight.name: weight for weight in weights(shape)}


def row(weight, prefix=""):
    sizes = ",".join(map(str, weight.shape))
    decay = "yes" if weight.decay else "no"
    return [weight.name.removeprefix(prefix), ",".join(weight.dims), sizes, decay]


def test_the_rows_of_a_block():
    drawn = [line.split() for line in BLOCK.strip().splitlines()]
    for unit in ("layers.0", "layers.1"):
        block = [weight for weight in weights(SHAPE) if weight.unit == unit]
        assert [row(weight, f"{unit}.") for weight in block] == drawn


def test_the_order_is_that_of_the_forward_pass():
    units = list(dict.fromkeys(weight.unit for weight in weights(SHAPE)))
    assert units == ["embedding", "layers.0", "layers.1", "head"]
    assert [row(weight) for weight in weights(SHAPE) if weight.unit == "head"] == [
        ["norm.weight", "width", "12", "no"],
        ["head.weight", "vocab,width", "50,12", "yes"],
    ]


def test_tied_weights_are_one_weight_in_a_unit_of_its_own():
    shape = replace(SHAPE, tied=True, positions="learned")
    units = list(dict.fromkeys(weight.unit for weight in weights(shape)))
    assert units == ["tied", "embedding", "layers.0", "layers.1", "head"]
    assert [weight.name for weight in weights(shape) if weight.unit == "tied"] == [
        "embedding.weight"
    ]
    assert "head.weight" not in table(shape)


def test_matrices_decay_and_nothing_else_does():
    gpt = table(preset("gpt2-124m"))
    for name, weight in gpt.items():
        matrix = len(weight.shape) == 2 and name != "positions.weight"
        assert weight.decay is matrix, name


def test_weights_start_small_and_smaller_where_they_write_to_the_residual_stream():
    start = table(replace(SHAPE, bias=True))
    assert start["layers.1.attention.q.weight"].spread == SPREAD == 0.02
    for name in ("attention.o", "feedforward.down"):
        assert start[f"layers.1.{name}.weight"].spread == pytest.approx(0.02 / sqrt(4))
        assert (start[f"layers.1.{name}.bias"].mean, start[f"layers.1.{name}.bias"].spread) == (
            0.0,
            0.0,
        )
    norm = start["norm.weight"]
    assert (norm.mean, norm.spread) == (1.0, 0.0)


def test_biases_have_the_dim_of_the_rows_they_are_added_to():
    biased = table(replace(SHAPE, bias=True))
    assert row(biased["layers.0.attention.k.bias"]) == [
        "layers.0.attention.k.bias",
        "key",
        "4",
        "no",
    ]
    assert biased["layers.0.feedforward.down.bias"].dims == ("width",)


def test_query_and_key_norms_have_one_size_for_all_heads():
    rows = table(replace(SHAPE, query_key_norm=True))
    for name in ("q_norm", "k_norm"):
        weight = rows[f"layers.0.attention.{name}.weight"]
        assert (weight.dims, weight.shape, weight.decay) == (("head",), (2,), False)


@pytest.mark.parametrize("name", ["laptop", "gpt2-124m", "llama3-1b", "qwen3-8b"])
def test_names_are_unique_and_every_dim_has_a_size(name):
    rows = weights(preset(name))
    assert len({weight.name for weight in rows}) == len(rows)
    assert all(len(weight.dims) == len(weight.shape) for weight in rows)


def test_data_parallelism_holds_every_weight_whole_on_every_rank():
    layout = Layout(dp=3)
    for weight in weights(SHAPE):
        for rank in range(3):
            held = placement(weight, layout, rank)
            assert held.box.size == weight.shape
            assert not any(held.box.corner)
            assert held.holders == (0, 1, 2)
