"""comm.sparse: an embedding's gradient by its rows equals the dense one; bytes, and refusals."""

from dataclasses import replace

import pytest
import torch
from small_cases import case_of
from small_runs import losses, train_on

from howdah.base.errors import UserError
from howdah.collectives.sparse import pays_below
from howdah.comm.group import Group
from howdah.parallel.row_sums import start_rows
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.recording import TCP
from howdah.plan.sums import sums_of
from howdah.sim.chosen import choice_misfits
from howdah.sim.traffic import expected_rows, rows_traffic, step_traffic
from howdah.verify.evidence import gather
from howdah.verify.verify import report, verify

SPARSE = Comm(sparse=True)


def sparse_case(layout, form="untied", **how):
    return replace(case_of(layout, form=form, **how), comm=SPARSE)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("dp2 x2", "untied"),
        ("dp2 tp2 x1", "qwen3"),
        pytest.param("dp2 pp2 x2", "untied", marks=pytest.mark.slow),
    ],
)
def test_rows_equal_one_device(workers, layout, form):
    case = sparse_case(layout, form)
    assert choice_misfits(case.plan) == []
    verdict = verify(case, workers, controls=layout == "dp2 x2")
    assert verdict.proved, "\n".join(report(verdict))
    assert all(failing for _, failing in verdict.controls)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["engine", "torch"])
@pytest.mark.parametrize("layout", ["dp3 x1", "dp4 x3", "dp2 recompute=full x2"])
def test_rows_on_every_wire_equal_one_device(workers, layout, transport):
    verdict = verify(sparse_case(layout), workers, controls=False, transport=transport)
    assert verdict.proved, "\n".join(report(verdict))


def test_every_gradient_is_that_of_the_dense_sum(workers):
    """Bit for bit, in a precision whose order of additions shows."""
    sparse = sparse_case("dp3 x1", precision="float32")
    dense = replace(sparse, comm=Comm())
    (one, *ranks), (other, *_) = (workers.run(gather, case, ranks=3) for case in (sparse, dense))
    assert one.rows[0] > 0 and one.rows[1] == 0
    for name, gradient in other.gradients.items():
        assert (one.gradients[name] == gradient).all(), name
    assert one.checksums == other.checksums
    assert len({rank.rows for rank in (one, *ranks)}) > 1, "ranks have different numbers of rows"
    assert sum(one.sent.values()) < sum(other.sent.values())


def summed(transport, density):
    """A gradient of 100 rows, of which each rank has so many; and what was counted."""
    group = Group(transport, axis="dp")
    gradient = torch.zeros(100, 8)
    draw = torch.Generator().manual_seed(transport.rank)
    rows = torch.randperm(100, generator=draw)[: int(density * 100) - transport.rank]
    gradient[rows] = torch.randn(len(rows), 8, generator=draw)
    terms = gradient.clone()
    start_rows(group, gradient)()
    group.all_reduce(terms)
    group.close()
    same = torch.equal(gradient, terms)
    return same, group.counters.rows_sent, group.counters.dense_sums


@pytest.mark.parametrize("density", [0.02, 0.5, 0.6, 0.9])
def test_above_the_density_where_it_stops_paying_the_sum_is_dense(workers, density):
    """Rank 0 has most rows, and decides for all."""
    dense = density >= pays_below(3, value_bytes=32, index_bytes=4)
    assert dense == (density > 0.59)
    for rank, (same, rows, sums) in enumerate(workers.run(summed, density, ranks=3)):
        assert same and sums == dense
        assert rows == (0 if dense else int(density * 100) - rank)


def test_bytes_follow_from_the_rows_that_were_sent():
    plan = sparse_case("dp2 x1").plan
    (row,) = (row for row in sums_of(plan, 0) if row.row)
    (elements,) = row.messages
    sent, dense = expected_rows(plan, 0)
    assert (sent, dense) == (2 * 16, 0) and sent < elements // row.row
    static, every = step_traffic(plan, 0, rows=False), step_traffic(plan, 0)
    added = {key: every[key] - static.get(key, 0) for key in every}
    assert sum(added.values()) == sent * (row.row * 8 + 4)
    assert sum(rows_traffic(plan, 0, TCP, 0, 1).values()) == elements * 8


@pytest.mark.parametrize(
    ("layout", "form", "more", "sentence"),
    [
        ("dp2 x1", "laptop", {}, "the embedding is tied to the head"),
        ("dp2 zero3 x1", "untied", {}, "zero3 cuts gradients into shares"),
        ("tp2 x1", "untied", {}, "there is one replica, which sums nothing"),
        ("dp2 x1", "untied", {"broadcast": "ring"}, "add comm.algorithm.broadcast=default"),
    ],
)
def test_where_it_cannot_be_it_is_refused(layout, form, more, sentence):
    comm = Comm(Algorithms(**more), sparse=True)
    (problem,) = choice_misfits(replace(case_of(layout, form=form), comm=comm).plan)
    assert problem.startswith("comm.sparse is true, but ") and sentence in problem


def test_a_run_learns_the_same_and_its_bytes_are_equal(workers, make_job, tmp_path):
    words = "layout=dp2", "model.tie_embeddings=false"
    train_on(workers, make_job("dense", *words))
    train_on(workers, make_job("rows", *words, "comm.sparse=true"))
    assert losses(tmp_path / "rows") == losses(tmp_path / "dense")
    told = (tmp_path / "rows" / "log.txt").read_text()
    assert ": equal" in told and "NOT EQUAL" not in told
    with pytest.raises(UserError, match=r"^comm.sparse is true, but the embedding is tied"):
        make_job("tied", "layout=dp2", "model.tie_embeddings=true", "comm.sparse=true")
