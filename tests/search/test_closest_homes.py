"""Where nothing near fits, the nearest plan has its states off the device."""

from dataclasses import replace

import pytest

from howdah.machines.cluster import usable_memory
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.search.closest import closest
from howdah.search.search import home_of
from howdah.shapes.presets import preset


def found(words, devices, memory=None):
    """The nearest layout for 13B on cards of 24 GB; memory: bytes of the host of a node."""
    cluster = load_cluster("rtx-3090", devices=devices)
    if memory is not None:
        cluster = replace(cluster, host=replace(cluster.host, memory=memory))
    layout = resolve(parse_layout(words), devices)
    shape, method = preset("llama2-13b"), Method(precision="bf16")
    plan = make_plan(shape, layout, Batch(micro_batch=1), sequence=4096, method=method)
    other = closest(plan, usable_memory(cluster), lambda one: home_of(one, cluster))
    return str(other) if other else None


@pytest.mark.parametrize(
    ("words", "devices", "memory", "nearest"),
    [
        ("single x8", 1, 512e9, "weights=host gradients=host optimizer=host"),
        ("single x8", 1, 64e9, "weights=disk gradients=disk optimizer=disk"),
        ("dp2 x8", 2, 512e9, "dp2 zero3 x8 recompute=full gradients=host optimizer=host"),
    ],
)
def test_13b_on_cards_of_24_gb_has_its_states_elsewhere(words, devices, memory, nearest):
    """Nothing was said of them: the only home that was tried was that of the optimizer."""
    told = found(words, devices, memory)
    assert told is not None and told.endswith(nearest), told


def test_nothing_fits_without_room_anywhere():
    plan = found("single x8", 1, 64e9)
    assert plan and "disk" in plan
    cluster = load_cluster("rtx-3090", devices=1)
    none = replace(cluster, host=replace(cluster.host, memory=1e9, disk=1e9))
    layout, method = parse_layout("single x8"), Method(precision="bf16")
    plan = make_plan(
        preset("llama2-13b"), layout, Batch(micro_batch=1), sequence=4096, method=method
    )
    assert closest(plan, usable_memory(none), lambda one: home_of(one, none)) is None
