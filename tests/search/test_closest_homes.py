"""Where nothing near fits, the nearest plan has its states off the device; the homes of a node have
room for all of its devices.
"""

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


@pytest.mark.slow_after(1)
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


@pytest.mark.parametrize(
    ("devices", "stages", "full"),
    [
        (2, "2,38", True),  # the first rank's stage alone would have room
        (2, "38,2", True),
        (4, "10,10,10,10", False),
        (4, "5,5,15,15", True),  # the second node; a layer has 5.7 GB, and a node 128
        (4, "1,19,1,19", False),  # a device has more than its half of a node, its neighbour less
    ],
)
def test_the_homes_of_a_node_have_room_for_all_of_its_stages(devices, stages, full):
    """The first rank was taken for all."""
    cluster = load_cluster("rtx-3090", devices=devices)
    words = f"pp{devices} 1f1b x8 stages={stages} recompute=full "
    words += "weights=host gradients=host optimizer=host"
    shape, method = preset("llama2-13b"), Method(precision="bf16")
    batch, layout = Batch(micro_batch=1), parse_layout(words)
    plan = make_plan(shape, resolve(layout, devices), batch, sequence=1024, method=method)
    found = home_of(plan, cluster)
    assert (found is not None and found[0] == "host" and found[2] == 128e9) == full
    assert found is None or found[1] > found[2]
