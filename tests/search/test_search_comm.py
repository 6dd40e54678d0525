"""The search under [comm]: what cannot travel so is left out, the rest has its programs' time."""

from dataclasses import replace

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.machines.cluster import resized
from howdah.machines.cluster_file import load_cluster
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.method import Method
from howdah.search.closed_form import ClosedForm
from howdah.search.search import search
from howdah.search.space import COLUMNS, WRONG_COMM, Question, layout_of, space
from howdah.shapes.presets import preset
from howdah.sim.chosen import choice_misfits
from howdah.sim.measured import profile_for
from howdah.sim.predict import predict
from howdah.sim.step_time import step_time

POWERS = Comm(Algorithms(all_reduce="hypercube", reduce_scatter="recursive_halving"))
NAIVE = Comm(Algorithms(all_reduce="naive", all_gather="bruck"))
ROWS = Comm(sparse=True)
BF16 = Method(precision="bf16")


def question(comm, *, devices=12, tied=False, cluster="rack-10gbe"):
    shape = replace(preset("laptop"), layers=3, tie_embeddings=tied)
    return Question(
        shape, resized(load_cluster(cluster), devices), BF16, 256, 12, micro_batch=1, comm=comm
    )


def planned(asked, rows):
    return [asked.plan(layout_of(row), int(row["micro_batch"])) for row in rows]


@pytest.mark.parametrize("comm", [POWERS, ROWS], ids=["algorithms", "sparse"])
def test_layouts_that_check_would_refuse_are_left_out_and_no_others(comm):
    asked = question(comm)
    every, found = space(replace(asked, comm=Comm())).rows, space(asked)
    kept = {tuple(row[list(COLUMNS)].item()) for row in found.rows}
    rows = every[:: max(len(every) // 150, 1)]
    for row, plan in zip(rows, planned(asked, rows), strict=True):
        here = tuple(row[list(COLUMNS)].item()) in kept
        if plan.layout.pp == 1 or here:
            assert here == (not choice_misfits(plan)), plan.layout
    assert found.ruled_out[WRONG_COMM] == len(every) - len(kept) > 0 < len(kept)


def test_a_search_with_sums_by_rows_takes_no_zero():
    found = search(question(ROWS), refined=5)
    layouts = [one.plan.layout for one in found.best]
    assert layouts and all(one.zero == 0 and one.replicas > 1 for one in layouts)
    with pytest.raises(UserError, match=r"comm\.sparse is true, but the embedding is tied"):
        search(question(ROWS, tied=True))


def test_the_search_prices_the_programs_that_are_chosen():
    """As `plan` prices the same layouts."""
    found = search(question(NAIVE), refined=5)
    for one in found.best:
        assert one.plan.comm == NAIVE
        assert one.seconds == predict(one.plan, found.question.cluster).time.seconds


@pytest.mark.parametrize("comm", [NAIVE, POWERS], ids=["naive", "powers"])
def test_the_closed_form_knows_the_programs(comm):
    """As near to the simulation as it is without [comm], where it would be off by half."""
    asked = question(comm, devices=8)
    rows = space(asked).rows
    rows = rows[(rows["pp"] == 1) & (rows["dp"] > 1) & (rows["tp"] < 4)]
    rows = rows[:: max(len(rows) // 12, 1)]
    profile = profile_for(asked.cluster, asked.method)
    closed = ClosedForm(asked, profile).price(rows).seconds
    direct = ClosedForm(replace(asked, comm=Comm()), profile).price(rows).seconds
    exact = [step_time(plan, asked.cluster, profile).seconds for plan in planned(asked, rows)]
    off = [np.abs(np.log(one / np.array(exact))) for one in (closed, direct)]
    assert np.quantile(off[0], 0.8) < np.log(1.1) and off[0].mean() < off[1].mean() / 2
