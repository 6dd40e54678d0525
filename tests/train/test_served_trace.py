"""What a worker and a server did last: recorded on both ends, written, read and drawn."""

import json

import pytest
from small_serving import serving_here
from typer.testing import CliRunner

from howdah.base.errors import UserError
from howdah.cli.commands import app
from howdah.comm.meeting import this_machine
from howdah.config.recipe import load_run
from howdah.config.save import save_run
from howdah.draw.served_trace import report, to_perfetto
from howdah.model.embedding import _Lookup
from howdah.plan.recording import Call, RankTrace, Span, StepTrace
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.plan.trace_file import FOLDER, read_members, write_trace
from howdah.server.client import Client
from howdah.server.moments import Message, Moments
from howdah.server.pulled import Pulled
from howdah.train import served_worker, serving
from howdah.train.served import chunks_for
from howdah.train.served_trace import served, writer

SYNC = 'method.sync={kind = "asp", workers = 2}'
SERVED = (
    *("layout=server2 x2", "method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *(SYNC, "train.steps=3", "train.save_every=2", "train.evaluate_samples=2"),
)


def test_no_barrier_is_between_steps_and_pushes_leave_while_gradients_are_computed(
    make_job, monkeypatch
):
    """The forward pass begins before the last units' weights have come, and the first units of the
    backward pass are pushed before the last are computed.
    """
    job, events = make_job("ahead", *SERVED), []
    push, pull, wait = Client.push, Client.pull, Pulled.result
    ahead, back = _Lookup.forward, _Lookup.backward

    def pushed(client, unit):
        events.append(("push", unit))
        return push(client, unit)

    def pulled(client, unit):
        events.append(("pull", unit))
        return pull(client, unit)

    def waited(handle):
        events.append(("wait", handle._unit))
        return wait(handle)

    def forward(*given):
        events.append(("forward", "embedding"))
        return ahead(*given)

    def backward(*given):
        events.append(("backward", "embedding"))
        return back(*given)

    monkeypatch.setattr(Client, "push", pushed)
    monkeypatch.setattr(Client, "pull", pulled)
    monkeypatch.setattr(Pulled, "result", waited)
    monkeypatch.setattr(_Lookup, "forward", staticmethod(forward))
    monkeypatch.setattr(_Lookup, "backward", staticmethod(backward))
    corpus = serving.corpus_of(job)
    with serving_here(job) as (_, way):
        start = serving.start_of(job, -1, corpus)
        given = {"start": start, "corpus": corpus, "tell": events.append}
        served_worker.work(job, 0, way, **given)
    steps = [n for n, one in enumerate(events) if isinstance(one, dict)]
    last = events[steps[0] + 1 : steps[1]]  # the second step
    units = [unit for what, unit in last if what == "pull"]
    assert len(units) >= 4
    first = last.index(("forward", "embedding"))
    end = len(last) - 1 - last[::-1].index(("backward", "embedding"))  # of two micro-batches
    waits = [unit for what, unit in last[:first] if what == "wait"]
    assert waits == units[: len(waits)] and len(waits) <= 2, "no more than the first units"
    early = [unit for what, unit in last[:end] if what == "push"]
    assert early == [*reversed(units)][:-1]


def test_a_unit_is_pushed_from_its_first_chunk_to_its_last():
    found = []
    moments = Moments(lambda *call: found.append(call))
    message = Message("server 0", "push of head", 3)
    moments.begin(message, chunks=2, size=80)
    moments.end(message._replace(clock=2))
    moments.end(message)
    assert found == []
    moments.begin(message, chunks=2, size=80)  # it asks again behind a lost connection
    moments.end(message)
    assert len(found) == 1
    moments.end(message)
    ((peer, what, size, took),) = found
    assert (peer, what, size) == ("server 0", "push of head", 80)
    assert took.began <= took.ended
    moments.begin(message)
    moments.forget("server 1")
    moments.forget("server 0")
    moments.end(message)
    assert len(found) == 1


def worker(number):
    """A worker that computes for a second in each step, waits for half of one, and pushes 2 MB."""
    instruction = Instruction(Verb.COMPUTE, Action(Kind.FORWARD, 0, 0))
    calls = [
        Call("servers", "wait for weights of head", 0, 0.0, 0.5),
        Call("server 0", "push of head", 2_000_000, 1.5, 1.75),
        Call("server 0", "pull of head", 1_000_000, 0.0, 0.5),
    ]
    return StepTrace(number, 100.0 + 2 * number, [Span(instruction, 0.5, 1.5)], calls)


def test_the_report_has_means_of_workers_and_the_longest_wait_of_each_server(make_job, tmp_path):
    job = make_job("drawn", *SERVED, "layout=server1 x2")
    calls = [
        Call("worker 0", "push of head 0", 5, 101.0, 101.5),
        Call("worker 0", "pull of head 0", 5, 102.0, 102.5),
        Call("worker 1", "pull of norm 0", 5, 102.0, 105.5),
        Call("worker 1", "push of head 0", 5, 103.0, 103.5),
        Call("worker 1", "push of norm 0", 5, 103.5, 104.0),
        Call("worker 0", "push of head 0", 6, 104.0, 105.0),
    ]
    writer(job)("server-0", served(calls))
    assert served([]) == []
    folder, layout, here = job.folder / FOLDER, "server1 x2", this_machine()
    write_trace(folder, "worker-0", RankTrace(layout, here, [worker(6), worker(7)]))
    members = read_members(folder, layout, workers=2, servers=2)
    assert [*report(members, layout, "asp")] == [
        "layout      server1 x2 asp, the last steps of each worker and pushes of each server",
        "          last step  computes    waits    pushes     pulls",
        "worker 0          7   1.0000s  0.5000s  2.000 MB  1.000 MB",
        "          pushes  of each  pulls  wait of each  longest  at once             stale",
        "server 0       4  0.6250s      2       2.0000s  3.5000s        2  1.00 (at most 1)",
        "server 0: the longest wait is worker 1's, pull of norm 0",
    ]
    events = json.loads(to_perfetto(members, job.plan))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["worker 0", "server 0"]
    begins = {e["name"]: e["ts"] for e in events if e["ph"] == "b" and e["pid"] == 1}
    assert begins["worker 0 push of head 0 5e-06 MB"] == 0.0  # the server's clock is the worker's
    starts = [e["ts"] for e in events if e["ph"] == "X"]
    assert starts == [11.5e6, 13.5e6]  # of the computations, behind the server's first push


def test_members_of_other_layouts_or_no_worker_at_all_are_one_sentence(tmp_path):
    write_trace(tmp_path, "server-0", RankTrace("server1", "here", [worker(1)]))
    with pytest.raises(UserError, match="has no worker's file; workers that howdah train starts"):
        read_members(tmp_path, "server1", workers=1, servers=1)
    write_trace(tmp_path, "worker-0", RankTrace("server2", "here", [worker(1)]))
    with pytest.raises(UserError, match=r"worker-0\.json is of layout 'server2', and the run"):
        read_members(tmp_path, "server1", workers=1, servers=1)
    (tmp_path / "worker-0.json").write_text('{"layout": "server1", "machine": "a", "steps": [{}]}')
    with pytest.raises(UserError, match=r"worker-0\.json is damaged \(.*train on to have it"):
        read_members(tmp_path, "server1", workers=1, servers=1)


@pytest.mark.slow
def test_a_run_leaves_the_pushes_pulls_and_waits_of_all_members(make_job, recipe, tmp_path):
    job = make_job("served", *SERVED)
    assert serving.train_served(job, show=lambda line: None) == 0
    save_run(load_run(recipe, SERVED), job.folder / "run.toml")
    result = CliRunner().invoke(app, ["trace", str(job.folder)])
    assert result.exit_code == 0, result.output
    for name in ("worker 0", "worker 1", "server 0", "server 1"):
        assert f"\n{name} " in result.output
    members = read_members(job.folder / FOLDER, "server2 x2", workers=2, servers=2)
    units = {chunk.unit for mine in chunks_for(job) for chunk in mine}
    for place in (0, 1):
        steps = members[f"worker-{place}"].steps
        assert [step.number for step in steps] == [1, 2, 3]
        calls = [call for step in steps for call in step.calls]
        waits = [call for call in calls if call.operation.startswith("wait for weights of")]
        pulls = {(c.axis, c.operation) for c in calls if c.operation.startswith("pull of")}
        assert len(waits) == 3 * len(units)
        assert pulls == {(f"server {n}", f"pull of {unit}") for n in (0, 1) for unit in units}
        pushed = sum(call.sent for call in calls if call.operation.startswith("push of"))
        whole = sum(chunk.length for mine in chunks_for(job) for chunk in mine) * 4
        assert whole <= pushed <= 3 * whole  # others may be acknowledged behind the last step
    for shard, chunks in enumerate(chunks_for(job)):
        (step,) = members[f"server-{shard}"].steps
        for way in ("push", "pull"):
            of = [call for call in step.calls if call.operation.startswith(f"{way} of")]
            assert len(of) == 2 * 3 * len(chunks)
            wide = 4 * sum(chunk.length for chunk in chunks)
            assert sum(call.sent for call in of) == 2 * 3 * wide
