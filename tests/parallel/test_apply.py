"""Applying a layout: everything is in its place, and all replicas begin with equal bits."""

from zlib import crc32

import pytest
import torch
from tiny import SHAPE, TIED, place

from howdah.comm.transport import SingleRank
from howdah.parallel.flat_params import DTYPES
from howdah.plan.flat_buffers import buffers
from howdah.shapes.weights import weights


@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_ranges_cover_every_unit_once_and_share_its_memory(shape, precision):
    _, placed = place(SingleRank(), shape=shape, precision=precision)
    assert tuple(unit.buffer for unit in placed.units.values()) == buffers(weights(shape))
    decays = {weight.name: weight.decay for weight in weights(shape)}
    for name, unit in placed.units.items():
        ranges = [part for part in placed.ranges if part.unit == name]
        assert [(r.start, r.stop) for r in ranges] == [
            (0, unit.buffer.decay_stop),
            (unit.buffer.decay_stop, unit.buffer.length),
        ]
        for part in ranges:
            assert torch.equal(part.master, unit.masters[part.start : part.stop])
            if part.start < part.stop:
                assert part.master.data_ptr() == unit.masters[part.start :].data_ptr()
                assert part.gradient.data_ptr() == unit.gradients[part.start :].data_ptr()
            for segment in unit.buffer.segments:
                if part.start <= segment.start < part.stop:
                    assert decays[segment.name] is part.decay
    assert {p.dtype for p in placed.model.parameters()} == {DTYPES[precision]}


def test_the_optimizer_sees_the_masters_and_never_the_model():
    _, placed = place(SingleRank(), precision="bf16")
    seen = [p for group in placed.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in seen} == {id(r.master) for r in placed.ranges if r.master.numel()}
    assert all(p in placed.optimizer.state for p in seen)  # a checkpoint can be read into them


def test_one_replica_has_nothing_to_reduce():
    assert place(SingleRank())[1].sums.sums == []


def test_no_weight_is_left_on_the_meta_device():
    _, placed = place(SingleRank(), shape=TIED)
    assert not any(p.is_meta for p in placed.model.parameters())
    assert not list(placed.model.buffers())


def first_bits(transport, precision):
    mesh, placed = place(transport, precision=precision)
    mesh.close()
    total = 0
    for unit in placed.units.values():
        total = crc32(unit.masters.numpy().tobytes(), total)
        total = crc32(unit.weights.view(torch.uint8).numpy().tobytes(), total)
    return total, placed.sums.sums != []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
def test_every_layout_begins_with_the_same_bits(workers, precision):
    one, _ = first_bits(SingleRank(), precision)
    for ranks in (1, 2, 3, 4):
        told = workers.run(first_bits, precision, ranks=ranks)
        assert told == [(one, ranks > 1)] * ranks
