"""Workers and servers that are stopped (SIGSTOP) in the middle of a run, and never go on.

The limits are small here: two seconds of silence in place of ten, and in place of sixty.
"""

import os
import signal
from functools import partial
from unittest.mock import patch

import pytest

from howdah.plan.method import Sync
from howdah.server.client import Client
from howdah.server.desk import Desk
from howdah.server.ledger import read_ledger, twice
from howdah.server.outbox import Outbox
from howdah.server.way import Way
from howdah.train import crew as crew_module
from howdah.train import serving
from howdah.train.crew import Crew, Member
from howdah.train.served import chunks_for

SERVED = (
    *("method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *("train.log_every=1", "train.steps=6", "train.save_every=0"),
)


def quickly(function, *given):
    """Calls a role with ends that speak ten times a second, and are missed after two."""
    usual = {**Outbox.__init__.__kwdefaults__, "pulse": 0.1}
    with (
        patch.object(Outbox.__init__, "__kwdefaults__", usual),
        patch("howdah.server.host.SILENCE", 2.0),
        patch("howdah.server.host.GRACE", 0.2),
    ):
        return function(*given)


def quick_worker(pipe, store, meeting):
    return quickly(serving.work_here, pipe, store, meeting)


def quick_server(pipe, store, meeting):
    return quickly(serving.serve_here, pipe, store, meeting)


def freeze(marker):
    """Stops this process for good, the first time."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)


def freezing_worker(marker, pipe, store, meeting):
    """Worker 1 is stopped in its third step, between two pushes."""
    push = Client.push

    def push_or_freeze(client, unit):
        if meeting.number == 1 and client.clock == 2:
            freeze(marker)
        return push(client, unit)

    with patch.object(Client, "push", push_or_freeze):
        return quick_worker(pipe, store, meeting)


def freezing_server(marker, pipe, store, meeting):
    """Server 0 is stopped when the first push of the third step has come."""
    push = Desk.push

    def push_or_freeze(desk, update, term):
        if meeting.number == 0 and update.clock == 2:
            freeze(marker)
        return push(desk, update, term)

    with patch.object(Desk, "push", push_or_freeze):
        return quick_server(pipe, store, meeting)


def applied_once(job, all_of=True):
    """Every update of the steps of all workers is in the ledgers once; or of one of them at least,
    and none twice.
    """
    for shard, chunks in enumerate(chunks_for(job)):
        events = read_ledger(job.folder / "ledgers" / f"server-{shard}-from-0")
        pushes = [event for event in events if event.kind == "push"]
        assert twice(events) == []
        assert not all_of or len(pushes) == 2 * job.train.steps * len(chunks)
        of_first = [event for event in pushes if event.update.worker == 0]
        assert len(of_first) == job.train.steps * len(chunks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_frozen_worker_is_ended_and_another_does_its_steps(make_job, tmp_path, kind):
    """Under asp the run waited for ever for the steps of its place. Under ssp the other one goes on
    alone meanwhile, and its successor joins it there.
    """
    bound = ", bound = 1" * (kind == "ssp")
    sync = f'method.sync={{kind = "{kind}", workers = 2{bound}}}'
    job, said = make_job("frozen", "layout=server2", *SERVED, sync), []
    worker = partial(freezing_worker, str(tmp_path / "frozen worker"))
    with (
        patch.object(serving, "work_here", worker),
        patch.object(serving, "serve_here", quick_server),
    ):
        assert serving.train_served(job, show=said.append) == 0
    (line,) = [line for line in said if line.startswith("worker 1 is frozen")]
    assert "cut off from server" in line and line.endswith("; another one takes its place")
    assert (tmp_path / "frozen worker").exists()
    applied_once(job, all_of=kind == "asp")


@pytest.mark.slow
def test_a_frozen_server_is_ended_and_its_replica_takes_its_place(make_job, tmp_path):
    sync = 'method.sync={kind = "asp", workers = 2, replicas = 1}'
    job, said = make_job("frozen", "layout=server2", *SERVED, sync), []
    server = partial(freezing_server, str(tmp_path / "frozen server"))
    with (
        patch.object(serving, "serve_here", server),
        patch.object(serving, "work_here", quick_worker),
        patch.object(crew_module, "STALLED", 2.0),
    ):
        assert serving.train_served(job, show=said.append) == 0
    why = "server 0 has said nothing for 2 s; its replica on server 1 has taken its place"
    assert any(line.startswith(why) for line in said), said
    applied_once(job)


@pytest.mark.slow
def test_a_frozen_server_without_a_replica_ends_the_run_in_a_sentence(make_job, tmp_path):
    sync = 'method.sync={kind = "asp", workers = 2}'
    job, said = make_job("frozen", "layout=server1", *SERVED, sync), []
    server = partial(freezing_server, str(tmp_path / "frozen server"))
    soon = partial(Way, silence=0.5, patience=1.0)
    with patch.object(serving, "serve_here", server), patch.object(crew_module, "Way", soon):
        assert serving.train_served(job, show=said.append) == 1
    last, again = said[-1], f"go on with howdah train {job.folder}"
    assert last.startswith("server 0 at 127.0.0.1:") and "did not answer for 1 s (" in last
    assert last.endswith(f"what it had since the last checkpoint is lost: {again}")


def test_the_worker_whose_process_a_server_has_given_up_is_ended_and_no_other(make_job):
    """A server goes on telling of the first process while the second has not joined yet."""
    sync = 'method.sync={kind = "asp", workers = 2}'
    job, ended = make_job("crew", "layout=server1", *SERVED, sync), []
    crew = Crew(job, ended.append, step=-1, again="it")
    assert job.method.sync == Sync("asp", workers=2)
    for place, process in ((0, 4), (1, 7)):
        one = Member("worker", place, ended.append, partial(ended.append, process), process=process)
        crew.members[one.name] = one
    server = Member("server", 0, ended.append, ended.clear)
    for gone in ({}, {"1": 6}, {"0": 0}):
        crew.hear(server, {"server": 0, "gone": gone})
    assert ended == []
    crew.hear(server, {"server": 0, "gone": {"1": 7}})
    crew.hear(server, {"server": 0, "gone": {"1": 7}})
    assert ended == [7]
    why = "worker 1 is frozen, or cut off from server 0"
    assert crew.members["worker 1"].told == ("stalled", why)
