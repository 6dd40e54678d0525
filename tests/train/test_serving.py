"""Runs with `method.sync`: processes of workers and servers, from their start to their end."""

import os
import signal
import socket
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from small_runs import metrics, opened, tensors, train_on
from small_serving import replay_run, served, serving_here

from howdah.base.errors import UserError
from howdah.checkpoint.facts import updates_of
from howdah.cli import train as cli
from howdah.parallel.apply import apply
from howdah.parallel.mesh import connect_mesh
from howdah.server.client import Client
from howdah.server.clocks import Update
from howdah.server.desk import Desk
from howdah.server.ledger import read_ledger, twice
from howdah.server.shard import Term
from howdah.text.tokens import prepare
from howdah.train import serving
from howdah.train.crew import Crew, Member
from howdah.train.resume import read_weights
from howdah.train.served import SaveSteps, Server, chunks_for
from howdah.train.shards import Shards
from howdah.train.state import restore_states

SERVED = (
    *("layout=server2", "method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *("method.precision=float64", "train.log_every=1", "method.lr.schedule=inverse_sqrt"),
)
ALL_REDUCE = (*SERVED[1:], "layout=dp2", "batch.global_batch=4")


@pytest.mark.slow
def test_a_run_with_servers_goes_on_as_an_all_reduce_run_and_back(workers, make_job, tmp_path):
    """Under bsp it is the all-reduce run of as many replicas, whatever the order of arrival."""
    sync = 'method.sync={kind = "bsp", workers = 2}'
    train_on(workers, make_job("never", *ALL_REDUCE, "train.steps=4", "train.save_every=1"))
    uneven = *SERVED, sync, "comm.server_shares=[3, 1]"
    for leg, mine in ((1, ALL_REDUCE), (2, (*SERVED, sync)), (3, uneven), (4, ALL_REDUCE)):
        job = make_job("always", *mine, f"train.steps={leg}", "train.save_every=1")
        if job.method.sync:
            said = served(job)
            assert sum("loss:" in line for line in said) >= 1
            first, second = (sum(c.length for c in mine) for mine in chunks_for(job))
            assert first == pytest.approx((3 if leg == 3 else 1) * second, rel=1e-2)
        else:
            train_on(workers, job)
        assert opened(tmp_path / "always", leg).samples == 4 * leg
    one, other = (tensors(tmp_path / name, 4) for name in ("never", "always"))
    assert one.keys() == other.keys() and len(one) > 20
    for name, tensor in one.items():
        assert (other[name] - tensor).abs().max() <= 1e-10 * max(tensor.abs().max(), 1e-30), name


@pytest.mark.slow
def test_adam_counts_what_was_applied_when_a_run_goes_on_under_another_rule(
    workers, make_job, tmp_path
):
    """Two workers that are served one by one make two updates a step, an all-reduce makes one."""
    sync = 'method.sync={kind = "asp", workers = 2}'
    counts = []
    for leg, mine in ((2, (*SERVED, sync)), (3, ALL_REDUCE), (4, (*SERVED, sync))):
        job = make_job("changes", *mine, f"train.steps={leg}", "train.save_every=1")
        if job.method.sync:
            assert len(served(job)) > 1
        else:
            one = make_job("changes", *ALL_REDUCE, "layout=dp1")
            assert workers.run(adam_counts, one, ranks=1) == [{4.0}]
            train_on(workers, job)
        counts.append(updates_of(opened(tmp_path / "changes", leg)))
    assert counts == [4, 5, 7]


def adam_counts(transport, job):
    """The counts of updates that states have, restored on one rank."""
    mesh, checkpoint = (
        connect_mesh(job.layout, transport, torch.device("cpu")),
        opened(job.folder, 2),
    )
    placed = apply(job.plan, mesh=mesh, fill=read_weights(checkpoint, job))
    restore_states(placed, checkpoint)
    mesh.close()
    return {float(state["step"]) for state in placed.optimizer.state.values()}


# -- checkpoints


class Saved:
    """In the place of a Saver: what it was told to save, and the weights' versions at that time."""

    def __init__(self, server):
        self.steps, self._server = [], server

    busy = False

    def save(self, *, step, entries, about):
        versions = {*self._server.desk.clocks.versions}
        self.steps.append((step, versions, about.samples))


@pytest.fixture
def desk(make_job):
    """The only server of a run of two workers under bsp, and what it saves."""
    with desk_under(make_job, "bsp") as there:
        yield there


@contextmanager
def desk_under(make_job, kind, **options):
    sync = f'method.sync={{kind = "{kind}", workers = 2}}'
    more = ("layout=server1", sync, "train.steps=6", "train.save_every=2")
    job = make_job("saves", *SERVED[1:], *more)
    corpus = prepare(job.data, vocab=job.shape.vocab, cache=job.cache, say=lambda line: None)
    start = serving.start_of(job, -1, corpus)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(job, 0, start=start, listener=listener, secret=bytes(32))
        saved = Saved(server)
        server.desk.after = SaveSteps(server, saved, corpus, **options).look
        for worker in (0, 1):
            server.desk.join(worker)
        yield server.desk, saved.steps


def push(desk, worker, clock, incarnation=1, keys=None):
    """Pushes a step of a worker, or some of its keys."""
    for key, master in enumerate(desk.shard.masters):
        if keys is None or key in keys:
            term = Term(torch.ones_like(master), 1.0)
            assert desk.push(Update(worker, incarnation, clock, key), term)


def test_the_order_of_pushes_is_that_of_the_recipe_at_both_ends(make_job):
    for order, window in (("fifo", 1 << 16), ("urgency", 1 << 20)):
        words = f"comm.push_order={order}", f"comm.push_window={window}"
        job = make_job("ordered", *SERVED, 'method.sync={kind = "bsp", workers = 2}', *words)
        crew = Crew(job, print, step=-1, again="it")
        crew.members = {f"server {n}": server_at(n) for n in range(job.layout.server)}
        found = crew.way(b"", 1)
        assert (found.fifo, found.window) == (order == "fifo", window)
        with serving_here(job) as (servers, _):
            assert {one.desk.fifo for one in servers} == {order == "fifo"}


def server_at(number):
    return Member("server", number, print, print, addresses={number: ("here", 1)})


def test_checkpoints_under_bsp_are_between_two_steps_while_a_place_is_free(desk):
    desk, saved = desk
    push(desk, 0, 0)
    push(desk, 1, 0)
    push(desk, 0, 1)
    push(desk, 1, 1, keys=[0])  # it has not finished its second step
    desk.leave(1, 1)
    assert saved == [(2, {2}, 8)]
    push(desk, 0, 2)
    push(desk, 0, 3)
    push(desk, 0, 4, keys=[0])
    assert saved == [(2, {2}, 8), (4, {4}, 16)]
    incarnation, clock = desk.join(1)
    assert clock == 5  # it is not awaited in the step that has begun
    push(desk, 0, 4, keys=range(1, 1 << 20))
    push(desk, 0, 5)
    push(desk, 1, 5, incarnation)
    assert saved[2:] == [(6, {6}, 24)]


@pytest.mark.parametrize(("free", "steps"), [(0.0, [2, 4]), (1e9, [])])
def test_a_place_that_nobody_takes_holds_up_the_last_checkpoint_alone(make_job, free, steps):
    """And none before the time is over, or while the one before is being written."""
    with desk_under(make_job, "asp", free=free) as (desk, saved):
        push(desk, 1, 0)
        push(desk, 0, 0)
        push(desk, 0, 1)
        assert saved == []
        desk.leave(1, 1)
        for clock in range(2, 6):
            push(desk, 0, clock)
        assert [step for step, _, _ in saved] == steps
        incarnation, clock = desk.join(1)
        assert clock == 1
        desk.leave(0, 1, finished=True)
        for clock in range(1, 6):
            push(desk, 1, clock, incarnation)
        assert [step for step, _, _ in saved] == [2, 4, 6]


def test_the_last_checkpoint_is_saved_when_the_last_worker_dies_or_has_nothing_to_do(desk):
    desk, saved = desk
    for clock in range(5):
        push(desk, 0, clock)
        push(desk, 1, clock)
    push(desk, 0, 5)
    desk.leave(0, 1, finished=True)
    assert saved[-1][0] == 4
    push(desk, 1, 5, keys=[0])
    desk.leave(1, 1)  # what the other one has pushed is applied without it
    assert saved[-1] == (6, {6}, 24) and len(saved) == 3


def test_a_successor_that_has_nothing_to_do_ends_the_run(desk):
    """Both die in the last step, in which one key has its update, and the others have not."""
    desk, saved = desk
    for clock in range(5):
        push(desk, 0, clock)
        push(desk, 1, clock)
    desk.leave(0, 1)
    push(desk, 1, 5, keys=[0])
    desk.leave(1, 1)
    assert saved[-1][0] == 4
    incarnation, clock = desk.join(0)
    desk.begin(0, incarnation, clock)
    assert clock == 6 and saved[-1][0] == 6


def test_a_successor_that_begins_where_another_server_is_ends_the_run(desk):
    """Here nobody has pushed anything of the last step; elsewhere it is applied."""
    desk, saved = desk
    for clock in range(5):
        push(desk, 0, clock)
        push(desk, 1, clock)
    desk.leave(0, 1)
    desk.leave(1, 1)
    incarnation, clock = desk.join(0)
    assert clock == 5 and saved[-1][0] == 4
    desk.begin(0, incarnation, 6)
    assert saved[-1][0] == 6


def full(pipe, store, meeting):
    """A server whose disk is full, and that leaves what another one has written of a checkpoint."""
    (meeting.job.folder / "checkpoints" / "step-00000009.tmp").mkdir(parents=True)
    (meeting.job.folder / "trace").mkdir()  # and what a worker that was killed has left of a trace
    (meeting.job.folder / "trace" / "worker-7.new").write_text("{")
    with patch("howdah.checkpoint.save.write_part", side_effect=OSError(28, "No space left")):
        return serving.serve_here(pipe, store, meeting)


@pytest.mark.slow
def test_a_run_whose_last_step_cannot_be_saved_fails_and_nobody_trains_it_again(make_job, capsys):
    sync = 'method.sync={kind = "asp", workers = 1}'
    job = make_job("full", "layout=server1", *SERVED[1:], sync, "train.steps=1")
    with (
        patch.object(serving, "serve_here", full),
        patch.object(cli, "_train_alone", lambda job: pytest.fail("it trains again")),
    ):
        assert cli._train_served(job, 0) == 1  # no mistake of the user
        said = capsys.readouterr().out
        assert "the checkpoint of step 1 was not saved: No space left" in said
        assert said.splitlines()[-1].startswith("step 1 is not saved: No space left")
        assert [*(job.folder / "checkpoints").iterdir()] == []  # and no draft of one
        assert not [*(job.folder / "trace").glob("*.new")]
        with (
            patch.object(serving, "train_served", lambda job, show, restarts: 0),
            pytest.raises(UserError, match="step 1 is not among the checkpoints: there is none"),
        ):
            cli._train_served(job, 0)


@pytest.mark.parametrize(
    ("role", "told", "why"),
    [
        ("server", ("early", "15"), "server 0 was stopped by SIGTERM; what it had since"),
        ("worker", ("away", "server 1 did not answer"), "server 1 did not answer; what it had"),
    ],
)
def test_why_a_run_has_lost_a_server_is_said(make_job, role, told, why):
    run, said = object.__new__(serving._Run), []
    run._job = make_job("lost", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    run._crew = Crew(run._job, said.append, step=-1, again="it")
    child = SimpleNamespace(status=1, pid=1)
    one = serving.Process(
        role, 0, said.append, said.clear, told=told, children=[child], failed=child
    )
    with pytest.raises(serving.ServerDied, match=why):
        run._ended(one)


# -- a worker that is killed


def dying(marker, pipe, store, meeting):
    """A worker of which the first process is killed (SIGKILL) in the middle of its third step: it
    has pushed some units of it, and not the others.
    """
    pushed, push = [], Client.push

    def push_or_die(client, unit):
        handles = push(client, unit)
        if meeting.number == 1 and client.clock == 2 and not os.path.exists(marker):
            pushed.append(unit)
            if len(pushed) == 2:
                client.drain()
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return handles

    with patch.object(Client, "push", push_or_die), patch("howdah.plan.sums.BUCKET_BYTES", 1):
        return serving.work_here(pipe, store, meeting)


@pytest.mark.slow
def test_a_killed_worker_costs_its_unfinished_step_and_no_update_is_applied_twice(
    make_job, tmp_path
):
    sync = 'method.sync={kind = "asp", workers = 3}'
    job = make_job("killed", *SERVED, sync, "train.steps=6", "train.save_every=0")
    marker = str(tmp_path / "dead")
    with patch.object(serving, "work_here", partial(dying, marker)):
        said = served(job)
    assert any("was killed by SIGKILL" in line and "takes its place" in line for line in said)
    ledgers = [read_ledger(path) for path in sorted((tmp_path / "killed/ledgers").iterdir())]
    again = [event.update for events in ledgers for event in events if event.update.incarnation > 1]
    assert again and min(update.clock for update in again) == 2  # the step that it had not finished
    for events, chunks in zip(ledgers, chunks_for(job), strict=True):
        assert twice(events) == []
        pushes = [event for event in events if event.kind == "push"]
        assert len(pushes) == 3 * 6 * len(chunks)  # every update of every step, once
    replayed = replay_run(job, ledgers)
    for name, tensor in tensors(tmp_path / "killed", 6).items():
        if name[0] == "weight":
            assert (replayed[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name
    last = metrics(tmp_path / "killed", "served")[6]
    assert last["staleness"] and last["tps"] > 0 and len(last["servers"]) == 2


def dying_server(number, pipe, store, meeting):
    """A server that is killed (SIGKILL) between two pushes of the third step, at its own desk or at
    that of its replica of another one.
    """
    push, count = Desk.push, []

    def push_or_die(desk, update, term):
        if meeting.number == number and update.clock == 2:
            count.append(update)
            if len(count) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return push(desk, update, term)

    with patch.object(Desk, "push", push_or_die):
        return serving.serve_here(pipe, store, meeting)


def test_a_ledger_that_cannot_be_written_ends_no_run(make_job):
    """A full disk ended the run of the server that had one, with what was not saved."""
    job = make_job("full", *SERVED, 'method.sync={kind = "asp", workers = 2, replicas = 1}')
    corpus = prepare(job.data, vocab=job.shape.vocab, cache=job.cache, say=lambda line: None)
    (job.folder / "ledgers").parent.mkdir(parents=True)
    (job.folder / "ledgers").write_text("a file stands in the way")
    said, start = [], serving.start_of(job, -1, corpus)
    given = {"corpus": corpus, "secret": bytes(32), "at": "127.0.0.1", "saver": None}
    given |= {"keep": None}
    shards = Shards(job, 0, start=start, tell=said.append, **given)
    shards._report()
    shards._report()
    shards._close()
    told = [line["said"] for line in said if "said" in line]
    assert told == ["ledgers can no longer be written (File exists): training goes on without it"]


def ending_all(pipe, store, meeting):
    """A server that kills the process which has started it, and ends with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.slow
def test_a_run_whose_processes_were_killed_with_their_parent_ends_in_a_sentence(make_job):
    """It was a traceback: another worker was to take the place of the first one."""
    sync = 'method.sync={kind = "asp", workers = 2}'
    job, said = make_job("killed", *SERVED, sync), []
    with patch.object(serving, "serve_here", ending_all):
        assert serving.train_served(job, show=said.append, restarts=1) == 1
    first, last = said[-2:]
    assert first == f"{last}; starting it again"
    assert last.startswith("the process that started the ranks was killed; what it had since")


def test_processes_that_cannot_be_started_are_told_in_a_sentence(make_job, monkeypatch):
    """Here a module is not there; it may also be the limits of files, processes or memory."""
    monkeypatch.setattr(serving, "PRELOAD", ("howdah.no_such",))
    job = make_job("none", *SERVED, 'method.sync={kind = "asp", workers = 2}')
    with pytest.raises(UserError, match=r"^no process can be started: No module .*; start fewer"):
        serving.train_served(job, show=print)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["asp", "bsp"])
def test_a_killed_server_with_a_replica_loses_nothing(workers, make_job, tmp_path, kind, number):
    """Neither shard 0, whose server makes the checkpoints of all, nor shard 1 is missed."""
    sync = f'method.sync={{kind = "{kind}", workers = 2, replicas = 1}}'
    steps = ("train.steps=6", "train.save_every=2")
    job = make_job("killed", *SERVED, sync, *steps)
    with patch.object(serving, "serve_here", partial(dying_server, number)):
        said = served(job)
    other = 1 - number
    assert any(f"its replica on server {other} has taken its place" in line for line in said), said
    ledgers = [
        read_ledger(tmp_path / "killed/ledgers" / f"server-{shard}-from-0") for shard in (0, 1)
    ]
    for events, chunks in zip(ledgers, chunks_for(job), strict=True):
        assert twice(events) == []
        pushes = [event for event in events if event.kind == "push"]
        assert len(pushes) == 2 * 6 * len(chunks)  # every update of every step, once
    kept = {n: t for n, t in tensors(tmp_path / "killed", 6).items() if n[0] == "weight"}
    replayed = replay_run(job, ledgers)
    if kind == "bsp":
        alone = ("layout=dp2", "batch.global_batch=4")
        train_on(workers, make_job("never", *SERVED, *alone, *steps))
        replayed = tensors(tmp_path / "never", 6)
    for name, tensor in kept.items():
        assert (replayed[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name
