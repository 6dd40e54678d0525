"""A run that a machine cannot hold is refused by arithmetic, with what would fit."""

import re
from dataclasses import replace

import pytest

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.search.capacity import Room, holds, lacks
from howdah.shapes.presets import preset
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak

LARGE = Room(memory=10**13, cores=8, ranks=2)


def plan(layout, name="gpt2-124m"):
    shape = preset(name)
    return make_plan(shape, parse_layout(layout), Batch(None, 1), sequence=256, method=Method())


def test_what_fits_is_not_talked_about():
    assert lacks(plan("dp2 x1"), LARGE) == []
    assert lacks(plan("dp2 x1"), replace(LARGE, memory=None)) == []  # a system that does not tell


def test_memory_is_the_states_the_processes_and_the_copy_of_a_save():
    """gpt2-124m in float32 holds 16 bytes a parameter, and 12 more are copied while it is saved."""
    states = 124_439_808 * (16 + 12)
    (sentence,) = lacks(plan("dp2 x1"), replace(LARGE, memory=2 * states))
    assert sentence.startswith("dp2 x1 takes about ")
    assert ", and this machine has free for 2 ranks 3.484 GB each, " in sentence
    assert lacks(plan("dp2 x1"), replace(LARGE, memory=4 * states)) == []


def test_a_layout_that_would_fit_is_named_if_it_can_run():
    (sentence,) = lacks(plan("dp8 x1"), Room(memory=8 * 3_000_000_000, cores=8, ranks=8))
    assert sentence.endswith("layout='dp8 zero1 x1' would fit")


@pytest.mark.parametrize("batch", [Batch(512, 16), Batch(9, 1), Batch(None, 2)])
def test_the_layout_that_would_fit_runs_with_the_batch_of_the_recipe(batch):
    """It had the x of the layout that does not fit, and the zero of replicas that it lacks."""
    words = "dp8 zero1 x4" if batch.global_batch is None else "dp8 zero1"
    shape, method, room = preset("gpt2-124m"), Method(), Room(2 * 10**10, cores=8, ranks=8)
    before = make_plan(shape, parse_layout(words), batch, sequence=1024, method=method)
    (sentence,) = lacks(before, room)
    hint = parse_layout(sentence.split("'")[-2])
    assert sentence.endswith("' would fit") and (hint.replicas > 1 or not hint.zero)
    after = make_plan(shape, hint, batch, sequence=1024, method=method)
    assert after.batch.global_batch == before.batch.global_batch and lacks(after, room) == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("memory", "way_out"),
    [
        (24 * 10**9, "million parameters would fit"),
        (400 << 20, "stop what else takes memory here, or take another machine"),
    ],
)
def test_where_no_layout_helps_a_size_is_named(memory, way_out):
    (sentence,) = lacks(plan("dp2 x1", "llama3-8b"), Room(memory=memory, cores=2, ranks=2))
    assert sentence.endswith(way_out)


def test_ranks_without_cores_and_an_accelerator_that_is_too_small():
    crowded = Room(memory=10**13, cores=2, ranks=64)
    (sentence,) = lacks(plan("dp64 x1"), crowded)
    assert sentence == (
        "64 ranks on 2 cores would wait for each other; this machine takes 32 at most"
    )
    card = Room(memory=10**9, cores=8, ranks=1, device=10**9)
    (sentence,) = lacks(plan("single x1"), card)
    assert ", and its accelerator has 1 GB each, 1.205 GB too little; " in sentence
    assert lacks(plan("single x1"), replace(card, device=80 * 10**9)) == []


def test_homes_without_room_are_told_with_what_is_missing():
    """Moments and masters of gpt2-124m on the disk; on a CPU, its host's memory is the device's."""
    away = plan("dp2 x1 optimizer=disk")
    away = replace(away, storage=replace(away.storage, folder="/there/scratch"))
    assert lacks(away, LARGE) == lacks(away, replace(LARGE, disk=10**10)) == []
    (sentence,) = lacks(away, replace(LARGE, disk=10**9))
    assert " on the disk of /there/scratch, which has 1 GB free, 1.98" in sentence
    small = replace(away, storage=replace(away.storage, pool=1000))
    (sentence,) = lacks(small, LARGE)
    assert "storage.pool 1,000 bytes is too small for the largest unit, tied" in sentence
    states = 124_439_808 * (16 + 12)
    (sentence,) = lacks(plan("dp2 x1 optimizer=host"), replace(LARGE, memory=2 * states))
    assert "takes about" in sentence
    # 12 bytes a parameter, and three sets of buffers for the gradients of the largest unit
    assert " a rank, 1.956 GB of it in its home on the host, and " in sentence
    assert re.search(r" each, [\d.]+ GB too little; ", sentence)
    (sentence,) = lacks(plan("dp2 x1"), replace(LARGE, memory=2 * states))
    assert "home" not in sentence


def test_an_accelerator_whose_host_is_too_small_for_homes_is_refused():
    """llama3-8b in float32: 16 bytes a parameter are at home on the host, and lock its pages."""
    away = plan("single weights=host gradients=host optimizer=host x1", "llama3-8b")
    card = Room(memory=150 * 10**9, cores=8, ranks=1, device=80 * 10**9)
    assert lacks(away, card) == [] and holds(away, card)
    small = replace(card, memory=64 * 10**9)
    (sentence,) = lacks(away, small)
    assert not holds(away, small)
    assert " in the memory of this host, which has 64 GB free, " in sentence
    assert sentence.endswith("use the disk for a part (optimizer=disk), or more hosts")
    assert lacks(away, replace(card, memory=None)) == []


def test_homes_that_make_a_model_fit_an_accelerator_are_named_where_the_host_has_room():
    card = Room(memory=200 * 10**9, cores=8, ranks=1, device=40 * 10**9)
    (sentence,) = lacks(plan("single x1", "llama3-8b"), card)
    hint = plan(sentence.split("'")[-2], "llama3-8b")
    assert sentence.endswith("' would fit") and "=host" in sentence
    assert lacks(hint, card) == []
    (sentence,) = lacks(plan("single x1", "llama3-8b"), replace(card, memory=10**9))
    assert "=disk" in sentence and "=host" not in sentence


def test_stages_of_unequal_size_need_their_sum():
    """Two layers and ten: the second stage alone has most of the states."""
    away = plan("pp2 x2 stages=2,10 optimizer=disk")
    both = [peak(memory(away, rank, kernels_of(away)), "disk") for rank in range(2)]
    assert lacks(away, replace(LARGE, disk=sum(both))) == []
    assert len(lacks(away, replace(LARGE, disk=sum(both) - 1))) == 1
    assert len(lacks(away, replace(LARGE, ranks=1, disk=max(both) - 1))) == 1
    assert 2 * max(both) > sum(both)
