"""What is left out before it is priced: nothing that could be among the fastest."""

from dataclasses import replace

import numpy as np
import pytest

from howdah.machines.cluster import resized
from howdah.machines.cluster_file import load_cluster
from howdah.plan.method import Method
from howdah.search import shortlist as file
from howdah.search.closed_form import ClosedForm
from howdah.search.search import SLOWER, search
from howdah.search.shortlist import PASSES, shortlist, with_blocks
from howdah.search.space import Question, alike, space
from howdah.shapes.presets import preset
from howdah.sim.measured import profile_for

CASES = {  # model, layers, cluster, devices, samples of a step, tokens of a sample
    "one wire": ("llama3-1b", 6, "h100", 8, 16, 1024),
    "slow wire": ("laptop", 6, "rack-10gbe", 12, 8, 256),
    "experts": ("mixtral-8x7b", 4, "h100", 16, 8, 1024),
}


def form_of(case, memory=None):
    model, layers, cluster, devices, batch, sequence = CASES[case]
    cluster = resized(load_cluster(cluster), devices)
    if memory:
        device = replace(cluster.device, memory=memory, reserved=0.0)
        cluster = replace(cluster, device=device)
    shape = replace(preset(model), layers=layers)
    question = Question(shape, cluster, Method("bf16"), sequence, batch)
    return ClosedForm(question, profile_for(cluster, question.method))


@pytest.fixture
def few(monkeypatch):
    """Layouts are priced a few at a time, so that most of a small space is left out."""
    monkeypatch.setattr(file, "FIRST", 16)
    monkeypatch.setattr(file, "MORE", 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", CASES)
def test_no_layout_is_faster_than_the_bound_of_its_group(case):
    form = form_of(case)
    rows, _ = space(form.question)
    groups, number = alike(rows, PASSES)
    for name in file.STATES:
        groups[name] = 0
    least = form.least(groups)[number]
    seconds = form.price(rows).seconds
    assert (least <= seconds * (1 + 1e-12)).all() and len(groups) < len(rows) / 3
    assert np.mean(least > 0.5 * seconds) > 0.2, "a bound that is worth something"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_the_fastest_are_those_of_the_whole_space(few, case, share):
    """On devices that hold a part of the layouts, all are priced, and some with a few blocks
    recomputed.
    """
    form = form_of(case)
    rows, _ = space(form.question)
    closed = form.price(rows)
    capacity = float(np.quantile(closed.memory, share))
    every, priced = with_blocks(form.question, rows, closed, capacity)
    fitting = np.flatnonzero(priced.memory <= capacity * file.MEMORY_ERROR)
    best = fitting[np.argsort(priced.seconds[fitting], kind="stable")][:20]
    found = shortlist(form, rows, 20, capacity)
    mine = np.flatnonzero(found.fitting(capacity))
    mine = mine[np.argsort(found.closed.seconds[mine], kind="stable")][:20]
    assert found.rows[mine].tolist() == every[best].tolist()
    assert found.closed.seconds[mine].tolist() == priced.seconds[best].tolist()
    assert found.slower == len(rows) - np.sum(found.rows["blocks"] == 0)
    assert found.slower > len(rows) / 4 or share == 0.1, "something is left out"


def test_a_search_finds_the_same_with_and_without(few, monkeypatch):
    question = form_of("one wire").question
    found = search(question, refined=5)
    monkeypatch.setattr(file, "FIRST", 1 << 20)
    whole = search(question, refined=5)
    assert found.best == whole.best and found.compared == whole.compared
    assert found.ruled_out[SLOWER] > whole.ruled_out[SLOWER] == 0


def test_where_nothing_fits_the_whole_space_is_priced(few):
    """So that what takes least memory is looked at before it is said that nothing fits."""
    form = form_of("one wire", memory=1e6)
    assert search(form.question).ruled_out[SLOWER] == 0
