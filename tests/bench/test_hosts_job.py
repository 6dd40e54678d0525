"""The script of bench/hosts_job: what must leave a card, and what is made of turns."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TRACE = ["layout dp4, step 3", "overlap     40.0% of the 0.5000 s in which there are calls"]


@pytest.fixture
def scripts(monkeypatch):
    """Imports modules of the folder, whose names others have too."""
    before = set(sys.modules)

    def load(*names):
        folders = ("", "cluster", "data_parallel", "forms", "hosts_job")
        for path in (BENCH / name for name in folders):
            monkeypatch.syspath_prepend(str(path))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCH):
            del sys.modules[name]


def test_what_must_leave_a_card_is_the_bound_of_the_form(scripts):
    (jobs,) = scripts("jobs")
    for job in jobs.jobs(tiny=False):
        size = 4 * sum(weight.elements for weight in job.plan.weights)
        times = 3 * 0.75 if "zero3" in job.layout else 2 * 0.75
        assert job.leaves == pytest.approx(times * size, rel=0.01), job.name
        rate = 1e8 if "1g" in job.profile else 1e7
        assert job.link == pytest.approx(job.leaves / rate / 1.25 * 1514 / 1448, rel=1e-6)


def turns(scripts, job, seconds, *, loss=2.0, seen=None):
    """The turns of each rank, of contestants that take so many `seconds(name)` a step."""
    measure, entrants = scripts("measure")[0], scripts("on_hosts")[0].entrants
    seen = job.leaves * job.steps if seen is None else seen

    def turn(name, rank):
        took = job.steps * seconds(name) * (1 + rank / 1000)
        return measure.Block(took, 0.1, (loss,) * job.steps, seen + rank, None)

    return [
        {one.name: [turn(one.name, rank)] * (1 + job.blocks) for one in entrants(job)}
        for rank in range(job.ranks)
    ]


def test_a_job_is_judged_beside_its_peers_and_its_bound(scripts):
    jobs, tables = scripts("jobs", "job_tables")
    slow = next(job for job in jobs.jobs(tiny=False) if job.name == "dp4 zero3, edge-100m")
    took = {"howdah": 4.0, "FSDP2": 6.0, "bound": 1.0}
    ranks = turns(scripts, slow, lambda name: took.get(name, 5.0))
    row = tables.summary(slow, ranks, TRACE)
    assert row["problems"] == []
    assert [(goal["beside"], goal["verdict"]) for goal in row["goals"]] == [
        ("DDP", "met"),
        ("FSDP2", "met"),
    ]
    assert [goal["got"] for goal in row["goals"]] == pytest.approx([1.25, 1.5])
    ours = row["rows"]["howdah"]
    assert ours["tokens per second"]["median"] == pytest.approx(2048 / 4.012)  # the slowest rank
    assert ours["share of the bound"]["median"] == pytest.approx(slow.link / 4.012)
    text = tables.report("A machine.", [row])
    assert "## No slower than a peer: 2 of 2 met" in text and "| FSDP2 | 1.50 | met |" in text
    assert "| 37.47 | 3135 | 40.0% of the 0.5000 s in which there are calls |" in text
    took["bound"] = 3.5  # longer than the link
    row = tables.summary(slow, turns(scripts, slow, lambda name: took.get(name, 5.0)), TRACE)
    assert row["rows"]["howdah"]["share of the bound"]["median"] == pytest.approx(3.5 / 4)


def test_peers_that_are_faster_train_otherwise_or_send_more_are_told(scripts):
    jobs, tables = scripts("jobs", "job_tables")
    job = next(job for job in jobs.jobs(tiny=False) if job.name == "dp4 tp2, flat-1g")
    ranks = turns(scripts, job, lambda name: 1.0 if "DDP" in name else 2.0)
    row = tables.summary(job, ranks, TRACE)
    assert [goal["verdict"] for goal in row["goals"]] == ["missed", "met"]
    assert "**missed**" in tables.report("A machine.", [row])
    for rank, other in zip(ranks, turns(scripts, job, lambda _: 1.0, loss=2.1), strict=True):
        rank["DTensor and FSDP2"] = other["DTensor and FSDP2"]
    (told,) = tables.summary(job, ranks, TRACE)["problems"]
    assert (
        told == "dp4 tp2, flat-1g: the losses of DTensor and FSDP2 differ by 5.0e-02 from howdah's"
    )
    for seen in (0, 2 * job.leaves * job.steps):
        ranks = turns(scripts, job, lambda _: 1.0, seen=seen)
        (told,) = tables.summary(job, ranks, TRACE)["problems"]
        assert "howdah's busiest card sent" in told


@pytest.mark.root
@pytest.mark.slow
def test_small_jobs_train_alike_on_hosts():
    words = [sys.executable, BENCH / "hosts_job" / "run.py", "--tiny"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| dp4 zero3, flat-10g | FSDP2 |" in done.stdout
