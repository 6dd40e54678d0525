"""The window of weights that the planner chooses: as wide as makes a step shorter, and as fits."""

from dataclasses import replace

import pytest

from howdah.config.auto import with_plan
from howdah.config.recipe import load_run
from howdah.draw.found import show_found
from howdah.machines.cluster import Host, Link, resized, usable_memory
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.storage import Storage
from howdah.search.layer_window import has_window, wider
from howdah.search.notes import notes_on
from howdah.search.search import search
from howdah.search.space import Question
from howdah.shapes.presets import preset
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.sim.profile import PLAIN
from howdah.sim.step_time import step_time

BF16 = Method("bf16")


def planned(words, layers=6):
    shape = replace(preset("laptop"), layers=layers)
    return make_plan(shape, parse_layout(words), Batch(micro_batch=4), sequence=256, method=BF16)


def machine(link, memory=None):
    """One device with a link of so many bytes/s to its host."""
    found = resized(load_cluster("h100"), 1)
    device = replace(found.device, memory=memory or found.device.memory, reserved=0.0)
    return replace(found, device=device, host=Host(1e12, Link("pcie", link, 0.0), 1e12, link / 2))


def seconds(plan, window, cluster):
    return step_time(replace(plan, storage=Storage(window=window)), cluster, PLAIN).seconds


@pytest.mark.parametrize("link", [1e9, 1e10, 1e12])
def test_the_narrowest_window_is_taken_that_makes_the_step_as_short_as_any(link):
    plan, cluster = planned("single x2 weights=host optimizer=host"), machine(link)
    every = {window: seconds(plan, window, cluster) for window in range(2, 12)}
    found = wider(plan, cluster, PLAIN, capacity=usable_memory(cluster))
    best = min(every.values())
    if found is None:
        assert every[2] <= best * 1.01
        return
    chosen = found.plan.storage.window
    assert found.time.seconds == every[chosen] <= best * 1.01 < every[2]
    assert found.peak == peak(memory(found.plan, 0, kernels_of(found.plan)))


def test_a_window_is_no_wider_than_the_device_has_room_for():
    plan, slow = planned("single x2 weights=host optimizer=host"), machine(1e9)
    free = wider(plan, slow, PLAIN, capacity=usable_memory(slow))
    assert free is not None and free.plan.storage.window > 3
    three = replace(plan, storage=Storage(window=3))
    room = peak(memory(three, 0, kernels_of(three)))
    bounded = wider(plan, slow, PLAIN, capacity=room)
    assert bounded is not None and bounded.plan.storage.window == 3
    assert wider(plan, slow, PLAIN, capacity=room - 1) is None


def test_only_weights_that_come_from_a_home_have_one():
    words = "single x2", "single x2 optimizer=host", "dp2 zero3 release=step optimizer=host"
    assert not any(has_window(parse_layout(one)) for one in words)
    assert wider(planned("single x2"), machine(1e9), PLAIN, capacity=1e12) is None


def test_a_plan_says_which_window_would_be_faster():
    plan, slow = planned("single x2 weights=host optimizer=host"), machine(1e9)
    (note,) = [one for one in notes_on(plan, slow) if "storage.window" in one]
    assert "units of weights on the device in place of 2, a step takes" in note
    settled = wider(plan, slow, PLAIN, capacity=usable_memory(slow)).plan
    assert not [one for one in notes_on(settled, slow) if "storage.window" in one]
    assert not [one for one in notes_on(planned("single x2"), slow) if "storage.window" in one]


def test_a_search_widens_windows_and_a_recipe_has_them():
    shape = replace(preset("laptop"), layers=6, width=512, ffn_size=2048)
    room = machine(2e9, memory=100e6)
    found = search(Question(shape, room, BF16, 256, 4, 1, True))
    best = [one for one in found.best if has_window(one.plan.layout)]
    assert best and any(one.plan.storage.window > 2 for one in best)
    for one in best:
        assert one.peak <= one.capacity
        narrow = replace(one.plan, storage=Storage())
        assert one.seconds <= step_time(narrow, room, one.time.profile).seconds
    wide = next(one for one in best if one.plan.storage.window > 2)
    told = "\n".join(show_found(found, None))
    assert f"(storage.window={wide.plan.storage.window})" in told
    run = with_plan(load_run("laptop"), wide.plan)
    assert run.storage.window == wide.plan.storage.window
    plain = with_plan(load_run("laptop", ["storage.window=5"]), planned("single x2"))
    assert plain.storage.window == 5
