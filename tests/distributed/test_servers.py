"""Parallel equals single: parameter servers by collectives against plain PyTorch on one device.

layouts   1 to 3 workers, 1 to 3 servers, micro-batches, recomputation, both wires; servers that
          update, and servers that only add
bytes     a worker pushes its gradients, a server sends each worker its range of the weights
runs      with servers and without, each resumed as the other
"""

from dataclasses import replace

import pytest
from small_cases import FORMS, case_of, prove
from small_runs import train_on
from typer.testing import CliRunner

from howdah.cli.commands import app
from howdah.config.recipe import load_run
from howdah.config.save import save_run
from howdah.plan.sharding import local_buffers
from howdah.sim.traffic import step_traffic
from howdah.verify.evidence import gather

CONTROLS = ["a wrong count", "a norm counted twice", "a shifted micro-batch"]


def prove_noticed(case, workers):
    verdict = prove(case, workers, controls=True)
    several = ["a sum skipped"] * (case.layout.workers > 1)
    again = ["another second run"] * (case.layout.recompute != "none")
    update = case.layout.update == "servers"
    pushes = ["a push skipped"] * (update or case.layout.workers > 1)
    pulls = ["a pull skipped"] * (update and case.method.precision == "float64")
    noticed = [name for name, failing in verdict.controls if failing]
    assert sorted(noticed) == sorted([*several, *CONTROLS, *pushes, *pulls, *again])


SLOW = pytest.mark.slow


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "server2 x1",
        "dp2 server2 x1",
        "dp3 server1 x3",
        "dp2 server2 x1 update=workers",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                *("server1 x2", "dp2 server1 x2", "server2 x1 update=workers"),
                *("dp3 server1 x3 update=workers", "dp2 server2 x2 recompute=full update=workers"),
            )
        ),
    ],
)
def test_servers_equal_one_device(workers, layout):
    prove_noticed(case_of(layout), workers)


@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(name, marks=SLOW) for name in ("adam", "rmsprop"))]
)
def test_every_optimizer_runs_on_servers(workers, optimizer):
    case = case_of("dp2 server2 x1", steps=3)
    settings = replace(case.method.optimizer, name=optimizer)
    prove_noticed(replace(case, method=replace(case.method, optimizer=settings)), workers)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_every_optimizer_runs_on_workers_beside_servers(workers, optimizer):
    case = case_of("dp2 server2 x1 update=workers", steps=3)
    settings = replace(case.method.optimizer, name=optimizer)
    prove_noticed(replace(case, method=replace(case.method, optimizer=settings)), workers)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("float32", marks=SLOW)])
def test_servers_in_lower_precisions(workers, precision):
    prove_noticed(case_of("dp2 server2 x2", precision=precision), workers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 server2 x1 recompute=full", "server3 x2", "dp3 server1"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "laptop"])
def test_every_form_with_servers(workers, form, layout):
    prove_noticed(case_of(layout, form=form), workers)


@pytest.mark.slow
def test_servers_that_only_add_in_bf16(workers):
    prove_noticed(case_of("dp2 server2 x2 update=workers", precision="bf16"), workers)


@pytest.mark.parametrize(
    "layout", ["dp2 server2 x1", pytest.param("dp2 server2 x1 update=workers", marks=SLOW)]
)
def test_gloo_carries_servers(workers, layout):
    prove(case_of(layout), workers, transport="torch")


def test_the_same_run_twice_gives_the_same_bits(workers):
    first, second = (workers.run(gather, case_of("dp2 server2 x1"), ranks=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms, one.checksums) == (
            other.losses,
            other.norms,
            other.checksums,
        )


def test_a_worker_sends_its_gradients_and_a_server_its_range_to_each_worker():
    plan = case_of("dp3 server2 x1").plan
    elements = sum(buffer.length for buffer in local_buffers(plan, 0))

    def sent(rank, operation):
        rows = step_traffic(plan, rank)
        return sum(n for row, n in rows.items() if row.operation == operation)

    assert [sent(rank, "reduce") for rank in range(5)] == [8 * elements] * 3 + [0, 0]
    assert [sent(rank, "broadcast") for rank in range(3)] == [0, 0, 0]
    first, second = (sent(rank, "broadcast") for rank in (3, 4))
    assert first + second == 3 * 8 * elements and abs(first - second) <= 3 * 8 * 10


def test_servers_that_only_add_send_each_worker_the_sum_of_their_range():
    plan = case_of("dp3 server2 x1 update=workers", precision="bf16").plan
    elements = sum(buffer.length for buffer in local_buffers(plan, 0))
    rows = [step_traffic(plan, rank) for rank in range(5)]
    sent = [
        {row.operation: n for row, n in one.items() if row.operation != "scalars"} for one in rows
    ]
    assert sent[:3] == [{"reduce": 4 * elements}] * 3
    assert [*sent[3], *sent[4]] == ["broadcast"] * 2
    assert sent[3]["broadcast"] + sent[4]["broadcast"] == 3 * 4 * elements


def test_a_run_with_servers_sends_what_was_predicted_and_has_a_trace(
    workers, make_job, recipe, tmp_path
):
    settings = ("layout=dp2 server1 x1", "train.steps=3", "train.evaluate_samples=2")
    job = make_job("served", *settings)
    train_on(workers, job)
    save_run(load_run(recipe, settings), tmp_path / "served" / "run.toml")
    log = (tmp_path / "served" / "log.txt").read_text()
    (sent,) = [line for line in log.splitlines() if line.startswith("sent ")]
    assert sent.endswith("equal")
    assert CliRunner().invoke(app, ["trace", str(tmp_path / "served")]).exit_code == 0
