"""Flat units: parameters are views, gradients land in place, fresh weights know no layout."""

import sys
from itertools import pairwise
from subprocess import run
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE, TIED, loss_of, micro

from howdah.base.seeds import key
from howdah.model.noise import normal
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import fill_masters, flatten, random_init
from howdah.plan.boxes import Box, Piece, whole_piece
from howdah.plan.flat_buffers import buffers, pieces
from howdah.shapes.weights import weights

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = [SHAPE, TIED]


def laid(shape=SHAPE, dtype=torch.float64, seed=5):
    with torch.device("meta"):
        model = Transformer(shape)
    units = flatten(model, buffers(weights(shape)), dtype=dtype, device=CPU)
    fill_masters(units, random_init(weights(shape), seed))
    return model, units


def inside(view, flat):
    """Whether a tensor is a view into a flat one."""
    return view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["untied", "tied"])
def test_every_parameter_is_a_view_of_its_unit(shape, dtype):
    model, units = laid(shape, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    parameters = dict(model.named_parameters())
    assert set(parameters) == {weight.name for weight in weights(shape)}
    for unit in units.values():
        assert (unit.weights.dtype, unit.masters.dtype, unit.gradients.dtype) == (dtype, wide, wide)
        assert len(unit.weights) == len(unit.masters) == len(unit.gradients) == unit.buffer.length
        unit.weights.fill_(3.0)
        for segment in unit.buffer.segments:
            parameter = parameters.pop(segment.name)
            assert parameter.shape == segment.shape and parameter.requires_grad
            assert inside(parameter.data, unit.weights) and inside(parameter.grad, unit.gradients)
            assert (parameter == 3.0).all()
    assert not parameters


def test_weights_are_their_own_masters_when_wide():
    for unit in laid(dtype=torch.float32)[1].values():
        assert unit.masters.data_ptr() == unit.weights.data_ptr()
    for unit in laid(dtype=torch.bfloat16)[1].values():
        assert not inside(unit.masters, unit.weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["untied", "tied"])
def test_gradients_accumulate_in_the_flat_buffer(shape, dtype):
    """Two micro-batches add up; bf16 weights get float32 gradients, summed in float32."""
    model, units = laid(shape, dtype)
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    once = []
    for number in range(2):
        for unit in units.values():
            unit.gradients.zero_()
        loss_of(model, micro(number, shape=shape)).backward()
        once.append({name: unit.gradients.clone() for name, unit in units.items()})
    loss_of(model, micro(0, shape=shape)).backward()
    for name, unit in units.items():
        assert unit.gradients.abs().sum() > 0
        assert torch.equal(unit.gradients, once[1][name] + once[0][name])
    for name, parameter in model.named_parameters():
        assert parameter.grad.data_ptr() == places[name], f"{name} has a gradient of its own"


def test_bf16_gradients_keep_what_bf16_would_lose():
    """Added in bf16, a second gradient of 1/1024 of the first would leave no trace."""
    model, units = laid(dtype=torch.bfloat16)
    parameter = dict(model.named_parameters())["norm.weight"]
    (parameter.sum() * 1.0).backward()
    (parameter.sum() * 2.0**-10).backward()
    assert (units["head"].views(units["head"].gradients)["norm.weight"] == 1 + 2.0**-10).all()


def test_publish_casts_the_masters():
    _, units = laid(dtype=torch.bfloat16)
    unit = units["layers.0"]
    unit.masters.mul_(1.7)
    before = unit.weights.clone()
    unit.copy_to_weights()
    assert not torch.equal(unit.weights, before)
    assert torch.equal(unit.weights, unit.masters.to(torch.bfloat16))


def test_padding_is_zero():
    model, units = laid(TIED)
    loss_of(model, micro(0, shape=TIED)).backward()
    padded = 0
    for unit in units.values():
        used = torch.zeros(unit.buffer.length, dtype=torch.bool)
        for segment in unit.buffer.segments:
            used[segment.start : segment.stop] = True
        padded += int((~used).sum())
        assert not unit.masters[~used].any() and not unit.gradients[~used].any()
    assert padded > 0


def test_a_weight_that_the_table_forgets_is_told():
    with torch.device("meta"):
        model = Transformer(SHAPE)
    table = [weight for weight in weights(SHAPE) if weight.name != "layers.1.feedforward.up.weight"]
    with pytest.raises(AssertionError, match=r"layers\.1\.feedforward\.up\.weight"):
        flatten(model, buffers(table), dtype=torch.float32, device=CPU)


# -- fresh weights


def test_fresh_weights_are_those_of_the_table():
    model, _ = laid(TIED, torch.float32)
    for weight in weights(TIED):
        value = dict(model.named_parameters())[weight.name].detach()
        if weight.spread == 0:
            assert (value == weight.mean).all()
        else:
            drawn = normal(key(5, "weight", weight.name), torch.arange(weight.elements))
            assert torch.equal(value.reshape(-1), weight.mean + weight.spread * drawn)


def test_seeds_and_names_make_different_weights():
    one, other = (laid(SHAPE, seed=seed)[1]["layers.0"] for seed in (5, 6))
    assert not torch.equal(one.weights, other.weights)
    named = one.views(one.weights)
    gate, up = named["layers.0.feedforward.gate.weight"], named["layers.0.feedforward.up.weight"]
    assert gate.shape == up.shape and not torch.equal(gate, up)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHAPES), st.data())
def test_fresh_weights_are_the_same_however_they_are_cut(shape, data):
    fill = random_init(weights(shape), 5)
    _, units = laid(shape, torch.float32)
    unit = data.draw(st.sampled_from(list(units.values())))
    length = unit.buffer.length
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    again = torch.zeros(length)
    for start, stop in pairwise(cuts):
        for piece, first, last in pieces(unit.buffer, start, stop):
            fill(piece, again[first:last])
    assert torch.equal(again, unit.masters)


def test_fresh_weights_are_drawn_in_float32_whatever_the_precision():
    wide, narrow = laid(dtype=torch.float64)[1], laid(dtype=torch.bfloat16)[1]
    for name in wide:
        assert torch.equal(wide[name].masters.float(), narrow[name].masters)


@pytest.mark.parametrize(
    ("corner", "size"), [((0, 3), (37, 5)), ((4, 0), (9, 16)), ((2, 1), (3, 2)), ((0, 0), (37, 16))]
)
def test_fresh_weights_of_a_box_are_those_of_the_whole(corner, size):
    fill, shape = random_init(weights(SHAPE), 5), (37, 16)
    everything = torch.empty(37 * 16)
    fill(whole_piece("head.weight", shape), everything)
    box = everything.view(shape)[corner[0] : corner[0] + size[0], corner[1] : corner[1] + size[1]]
    part = torch.empty(size[0] * size[1] - 3)
    fill(Piece("head.weight", shape, Box(corner, size), 2, size[0] * size[1] - 1), part)
    assert torch.equal(part, box.reshape(-1)[2:-1])


def checksum():
    total = 0
    for unit in laid(dtype=torch.float32)[1].values():
        total = crc32(unit.masters.numpy().tobytes(), total)
    return total


def test_fresh_weights_do_not_depend_on_the_process():
    """Python's own `hash` of a name differs from process to process."""
    script = "import test_flat_params; print(test_flat_params.checksum())"
    told = run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout) == checksum()
