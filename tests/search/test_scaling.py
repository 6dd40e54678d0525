"""The fewest devices and the largest model: against every size, and against exact memory."""

from dataclasses import replace

import pytest

from howdah.machines.cluster import resized
from howdah.machines.cluster_file import load_cluster
from howdah.plan.homes import homes
from howdah.plan.method import Method
from howdah.search.scaling import fewest, fits, largest, largest_preset, scaled
from howdah.search.search import home_of, room, search
from howdah.search.space import Question
from howdah.shapes.check import check_shape
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset

BF16 = Method(precision="bf16")


def question_of(model="llama3-8b", cluster="h100x8", batch=8, sequence=2048):
    return Question(preset(model), load_cluster(cluster), BF16, sequence, batch)


@pytest.mark.slow
def test_a_model_fits_where_a_search_finds_a_layout_and_nowhere_else():
    for devices in (1, 2, 4):
        for model in ("llama3-1b", "llama3-8b"):
            question = question_of(model, f"h100x{devices}")
            assert fits(question) == bool(search(question, refined=1).best), (model, devices)


def test_the_fewest_devices_are_the_first_on_which_anything_fits():
    question = question_of("llama3-1b", cluster="rtx-4090x16", batch=16)
    shape = replace(question.shape, layers=4)
    question = replace(question, shape=shape, micro_batch=1, cluster=holding(question, 2.5e9))
    found = fewest(question, None)
    count = found.question.devices
    assert found.best and 1 < count <= 16
    smaller = [n for n in range(1, count) if n < 2 or n % 2 == 0]
    for n in smaller:
        other = replace(question, cluster=resized(question.cluster, n))
        assert not search(other, refined=1).best
    assert fewest(replace(question, cluster=holding(question, 1e8)), None) is None
    twice = fewest(question, None, meets=lambda one: one.question.devices >= 2 * count)
    assert twice.question.devices >= 2 * count


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-1.5b", "qwen3-0.6b", "laptop"])
def test_a_scaled_shape_keeps_its_kind(model):
    shape = preset(model)
    assert scaled(shape, shape.k, shape.layers) == shape
    twice = scaled(shape, 2 * shape.k, 2 * shape.layers)
    assert check_shape(twice) == []
    assert (twice.width, twice.d, twice.heads // twice.k) == (
        2 * shape.width,
        shape.d,
        shape.heads // shape.k,
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("disk", [0.0, 200e9])
def test_the_largest_model_fits_and_one_layer_more_does_not(disk):
    """On the devices; or on a disk, where there is one."""
    question = question_of(cluster="rtx-4090x2", sequence=1024)
    memory = 64e9 if disk else 0.0  # through which states move
    host = replace(question.cluster.host, memory=memory, disk=disk)
    question = replace(question, cluster=replace(question.cluster, host=host))
    found = largest(question)
    shape = found.shape
    assert fits(found) and search(found, refined=1).best
    more = replace(found, shape=replace(shape, layers=shape.layers + 1))
    assert not fits(more)
    held = parameters(shape).total * 16
    there = disk or 2 * room(question.cluster)
    assert 0.5 * there < held < there


def test_the_largest_preset_is_the_first_that_fits():
    name, shape = largest_preset(question_of(cluster="rtx-4090x2", sequence=1024))
    assert name in ("llama3-1b", "gpt2-1.5b", "gpt3-xl", "gpt3-2.7b") or (
        parameters(shape).total > 1e9
    )
    assert largest(replace(question_of(), cluster=holding(question_of(), 1e6))) is None


def test_a_model_whose_homes_have_no_room_does_not_fit_and_another_layout_is_tried():
    """A model grew past the host and the disk, for the device alone was asked: and then there was
    no layout of it.
    """
    question = replace(question_of("llama2-13b", "rtx-3090x1", 16, 1024), planned=True)
    assert fits(question)  # on the disk: the host has no room for 18 bytes a parameter
    assert parameters(question.shape).total * 18 > question.cluster.host.memory
    host = replace(question.cluster.host, disk=0.0)
    assert not fits(replace(question, cluster=replace(question.cluster, host=host)))
    host = replace(host, memory=300e9)
    assert fits(replace(question, cluster=replace(question.cluster, host=host)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("model", "cluster", "planned"),
    [("laptop", "laptop-cpu", False), ("llama2-13b", "rtx-3090x1", True)],
)
def test_the_largest_model_has_room_in_its_homes(model, cluster, planned):
    method = Method() if model == "laptop" else BF16
    question = Question(preset(model), load_cluster(cluster), method, 256, 8, planned=planned)
    host = replace(question.cluster.host, memory=24e9, disk=40e9)
    found = largest(replace(question, cluster=replace(question.cluster, host=host)))
    assert found is not None
    (best,) = search(found, refined=1).best
    assert homes(best.plan.layout) > {"device"} and not home_of(best.plan, found.cluster)
    assert 0.7 * host.disk < 12 * parameters(found.shape).total < host.disk
    more = replace(found, shape=replace(found.shape, layers=found.shape.layers + 1))
    assert not fits(more)


def holding(question, memory):
    """The same devices with so many bytes."""
    cluster = question.cluster
    return replace(cluster, device=replace(cluster.device, memory=memory, reserved=0.0))
