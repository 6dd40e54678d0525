"""Notes: what is allowed and perhaps not meant is said, and nothing else."""

from pathlib import Path

import pytest

from howdah.config.recipe import parse_run, plan_of
from howdah.plan.layout import parse_layout, resolve
from howdah.train.notes import device_note, notes_of, sample_note


def notes(layout="single", **tables):
    run = parse_run({"name": "a", "model": {"preset": "laptop"}, "layout": layout, **tables})
    return list(notes_of(plan_of(run, resolve(parse_layout(run.layout), None)), run.train))


EIGHT = {"batch": {"global_batch": 8}}


def test_a_usual_run_has_none():
    assert notes("dp2 zero1 x2", batch={"global_batch": 8, "micro_batch": 2}) == []
    assert notes(method={"lr": {"warmup_steps": 999}}, **EIGHT) == []
    assert notes("dp4 zero3 shard2", **EIGHT) == []


@pytest.mark.parametrize(
    ("layout", "tables", "note"),
    [
        (
            "single",
            {"method": {"lr": {"warmup_steps": 1000}}, **EIGHT},
            "the learning rate does not reach its peak: method.lr.warmup_steps is 1,000 and "
            "train.steps 1,000",
        ),
        (
            "single",
            {
                "method": {"lr": {"schedule": "wsd", "warmup_steps": 600, "decay_steps": 500}},
                **EIGHT,
            },
            "the learning rate's warm-up and decay overlap: 600 and 500 of 1,000 steps",
        ),
        ("zero2", EIGHT, "zero2 shards nothing: each copy of the states is on one rank"),
        ("dp2 zero3 shard1", EIGHT, "zero3 shards nothing: each copy of the states is on one rank"),
        (
            "dp2 x2",
            {"batch": {"global_batch": 8, "micro_batch": 3}},
            "4 of 12 places in a step stay empty: global_batch is 8, in micro-batches of 3 on "
            "'dp2 x2'",
        ),
    ],
)
def test_what_is_perhaps_not_meant_is_said(layout, tables, note):
    assert notes(layout, **tables) == [note]


def test_a_run_on_the_cpu_says_why_it_leaves_the_gpus_alone():
    assert device_note("cpu", "cpu", cards=2, lack="") == ""
    assert device_note("auto", "cuda", cards=2, lack="") == ""
    assert device_note("auto", "cpu", cards=0, lack="") == ""
    old = "the driver is too old for this torch; update the driver, or use device=cpu"
    assert device_note("auto", "cpu", cards=0, lack=old) == (
        "the run leaves this machine's GPUs alone: the driver is too old for this torch; update "
        "the driver"
    )
    said = device_note("auto", "cpu", cards=1, lack="")
    assert said.endswith("there are 1 for more ranks; device=cuda shares them")


def test_a_model_that_no_gpu_holds_gets_no_sample():
    run = parse_run({"name": "a", "model": {"preset": "laptop"}, **EIGHT})
    plan = plan_of(run, resolve(parse_layout("single"), None))
    needed = 4 * sum(weight.elements for weight in plan.weights)
    assert sample_note(plan, "once", room=needed) == sample_note(plan, "", room=0) == ""
    said = sample_note(plan, "once", room=needed - 1)
    assert said.startswith("no sample at the end: one GPU of ")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory")
def test_a_home_on_the_disk_that_is_memory_is_noted():
    away, storage = "single optimizer=disk", {"storage": {"folder": "/dev/shm/howdah"}}
    (note,) = notes(away, **storage, **EIGHT)
    assert note.startswith("the home on the disk, /dev/shm/howdah, is on tmpfs, which is memory")
    assert notes("single optimizer=host", **storage, **EIGHT) == []
