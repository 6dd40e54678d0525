"""Training by chosen algorithms equals one device, and sends the bytes that are predicted."""

from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from small_cases import case_of
from small_runs import train_on

from howdah.base.errors import UserError
from howdah.collectives.choice import everywhere
from howdah.comm.rendezvous import choose
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.method import Adapter
from howdah.plan.trace_file import FOLDER, read_traces
from howdah.shapes.weights import weights
from howdah.sim.chosen import choice_misfits, collectives_of
from howdah.sim.traffic import step_traffic
from howdah.train.loop import train
from howdah.train.report import predicted_memory
from howdah.train.step import StepContext, train_step
from howdah.verify.compare import compare
from howdah.verify.evidence import _batch, gather, rate_of
from howdah.verify.reference import reference
from howdah.verify.verify import report, verify

PAIRWISE = Algorithms(
    all_reduce="double_tree to 2 kB, torus",
    reduce_scatter="default to 1 kB, pairwise",
    all_gather="bruck",
)


def prove(workers, layout, algorithms, kind):
    case = replace(case_of(layout), comm=Comm(algorithms))
    assert choice_misfits(case.plan) == []
    calls = [*collectives_of(case.plan, 0)]
    assert any(call.program(algorithms, [0] * len(call.ranks)) for call in calls)
    verdict = verify(case, workers, controls=False, transport=kind)
    assert verdict.proved, "\n".join(report(verdict))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "kind"), [("dp3 zero2 x2", "engine"), ("dp2 tp2 sp zero3 x2", "torch")]
)
def test_a_ring_equals_one_device(workers, layout, kind):
    prove(workers, layout, everywhere("ring"), kind)


def test_algorithms_by_operation_and_size_equal_one_device(workers):
    prove(workers, "dp4 zero2 shard2 x2", PAIRWISE, "torch")


def test_a_run_tells_what_it_has_chosen(workers, make_job, tmp_path):
    train_on(workers, make_job("ring", "layout=dp2 zero1", "comm.algorithm=ring"))
    told = (tmp_path / "ring" / "log.txt").read_text()
    chosen = f"algorithms  {everywhere('ring')}"
    assert chosen in told.splitlines() and "NOT EQUAL" not in told
    (one, _) = read_traces(tmp_path / "ring" / FOLDER, "dp2 zero1 x1", 2)
    assert one.algorithms == str(everywhere("ring"))


def other_rank(transport, job):
    """`train`, on a rank whose recipe has another algorithm."""
    plan = replace(job.plan, comm=Comm(everywhere(["ring", "tree"][transport.rank])))
    try:
        train(replace(job, plan=plan), transport)
    except UserError as problem:
        return str(problem)
    return "nothing"


def test_ranks_whose_recipes_differ_are_told(ended_workers, make_job):
    for said in ended_workers.run(other_rank, make_job("two", "layout=dp2"), ranks=2):
        assert said.startswith("the ranks have different algorithms, rank ")


CHANGED = {
    "seed": lambda job: replace(job, seed=job.seed + 1),
    "train.steps": lambda job: replace(job, train=replace(job.train, steps=9)),
    "method.grad_clip": lambda job: replace(
        job, plan=replace(job.plan, method=replace(job.method, grad_clip=0.5))
    ),
    "method.adapter": lambda job: replace(
        job, plan=replace(job.plan, method=replace(job.method, adapter=Adapter()))
    ),
}


def other_settings(transport, job, key):
    """What `train` says where rank 1 has another value of a key."""
    try:
        train(CHANGED[key](job) if transport.rank else job, transport)
    except UserError as problem:
        return str(problem)
    return "nothing"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("key", CHANGED)
def test_settings_that_differ_between_ranks_are_told(ended_workers, make_job, key):
    """Two machines with different seeds trained together, and nobody was told."""
    job = make_job("two", "layout=dp2")
    for said in ended_workers.run(other_settings, job, key, ranks=2):
        assert said.startswith(f"the ranks have different settings: {key} is ")
        assert said.endswith("; give all machines the same recipe and keys")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "torch"])
@pytest.mark.parametrize(
    "layout",
    [
        *("dp4 x2", "dp4 zero1 x2", "dp4 zero3 x2", "dp4 zero2 shard2 x2", "dp3 x1"),
        *("dp2 tp2 x2", "dp2 tp2 sp zero3 x2", "tp4 sp x2", "dp2 pp2 x2"),
    ],
)
def test_every_form_equals_one_device(workers, layout, kind):
    for algorithms in (everywhere("ring"), everywhere("recursive_doubling"), PAIRWISE):
        prove(workers, layout, algorithms, kind)


def gather_on(transport, case, machines):
    """`gather`, on ranks that say they are on these machines."""
    rank, store = transport.rank, dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        closing(
            choose(store, rank=rank, size=transport.size, seconds=600, secret=b"s" * 32)
        ) as wire,
    ):
        return gather(wire, case)


@pytest.mark.parametrize(
    ("layout", "machines"),
    [
        ("dp4 zero1 x2", "aabb"),
        pytest.param("dp4 zero1 x2", "abab", marks=pytest.mark.slow),
        pytest.param("dp4 x2", "abbb", marks=pytest.mark.slow),
        pytest.param("dp2 tp2 zero2 x2", "aabb", marks=pytest.mark.slow),
    ],
)
def test_a_hierarchy_uses_shared_memory_inside_its_machines(workers, layout, machines):
    chosen = Algorithms(
        all_reduce="hierarchical", reduce_scatter="hierarchical", all_gather="hierarchical"
    )
    case = replace(case_of(layout, steps=1), comm=Comm(chosen))
    ranks = workers.run(gather_on, case, machines, ranks=4)
    for rank, evidence in enumerate(ranks):
        predicted = step_traffic(case.plan, rank, evidence.wires)
        assert {row: count for row, count in evidence.sent.items() if count} == predicted
    if machines in ("aabb", "abab") and "tp" not in layout:
        rows = [row for evidence in ranks for row in evidence.sent if row.operation != "scalars"]
        assert {row.link for row in rows if row.axis == "dp"} == {"tcp", "shared"}
    assert all(d.used <= 1 for d in compare(case, ranks[0], reference(case), None))


def staged(transport, case):
    """Bytes of the staging of programs after a step, kept and predicted."""
    with connect_mesh(case.layout, transport, torch.device("cpu"), case.comm.algorithm) as mesh:
        placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
        context = StepContext(placed, mesh, case.method, case.seed)
        train_step(context, _batch(case, 0, rank=mesh.rank), step=0, rate=rate_of(case, 0))
        groups = {mesh.world, *mesh.groups.values(), *(group for group, _ in mesh.joined)}
        kept = sum(group.staging_bytes for group in groups)
        return kept, predicted_memory(case.plan, mesh.rank)["programs"]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("dp4 zero1 x2", "ring"),
        pytest.param("dp3 x2", "tree", marks=pytest.mark.slow),
        pytest.param("dp4 zero2 shard2 x2", "ring", marks=pytest.mark.slow),
        pytest.param("dp2 tp2 zero3 x2", "ring", marks=pytest.mark.slow),
    ],
)
def test_staging_of_programs_is_in_the_memory_of_the_plan(workers, layout, text):
    case = replace(case_of(layout, steps=1), comm=Comm(everywhere(text)))
    found = workers.run(staged, case, ranks=case.layout.world)
    assert [kept for kept, _ in found] == [predicted for _, predicted in found]
    assert any(kept for kept, _ in found)
