"""Workers of several ranks (tp2 server2): each pushes and pulls its own shards, at one clock."""

import os
import signal
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from small_runs import tensors, train_on
from small_serving import apart, replay_run, served, serving_here, whole

from howdah.parallel.mesh import connect_mesh
from howdah.plan.recording import Wires
from howdah.server.client import Client
from howdah.server.ledger import read_ledger, twice
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.sim.traffic import step_traffic
from howdah.train import served_worker, serving
from howdah.train.crew import Crew
from howdah.train.served import chunks_for

STEPS = 3
SMALL = (
    *("method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1", "train.save_every=0"),
    *("method.precision=float64", "method.lr.schedule=inverse_sqrt", f"train.steps={STEPS}"),
)


def sync(kind, workers):
    bound = ", bound = 2" * (kind == "ssp")
    return f'method.sync={{kind = "{kind}", workers = {workers}{bound}}}'


def work(transport, job, way):
    """A rank of a worker; what the worker has told, and what the rank has sent to others."""
    ranks = job.layout.workers
    place = transport.rank // ranks
    own = transport.among(range(place * ranks, place * ranks + ranks))
    corpus, told, meshes = serving.corpus_of(job), [], []

    def connect(*given):
        meshes.append(connect_mesh(*given))
        return meshes[0]

    start = serving.start_of(job, -1, corpus)
    given = {"start": start, "corpus": corpus, "tell": told.append, "transport": own}
    with closing(own), patch.object(served_worker, "connect_mesh", connect):
        served_worker.work(job, place, way, **given)
    return told, meshes[0].counters.sent()


def trained(workers, job):
    """Trains; the servers when all have left, and what each rank has told and sent."""
    with serving_here(job) as (servers, way):
        count = job.method.sync.workers * job.layout.workers
        found = workers.run(work, job, way, ranks=count)
    return servers, found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp2 server2", "tp2 sp server1 x2"])
@pytest.mark.parametrize("kind", ["bsp", "ssp"])
def test_a_worker_of_two_ranks_alone_is_local_training(workers, make_job, tmp_path, layout, kind):
    """Under asp its pulls may overtake its own pushes."""
    job = make_job("ranks", f"layout={layout}", sync(kind, 1), *SMALL)
    servers, found = trained(workers, job)
    assert [len(told) for told, _ in found] == [STEPS, 0]  # the first tells for both
    train_on(workers, make_job("alone", *SMALL, "layout=single"))
    alone = {n: t for n, t in tensors(tmp_path / "alone", STEPS).items() if n[0] == "weight"}
    assert apart(whole(servers), alone) < 1e-10


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["asp", "bsp"])
def test_the_ledgers_of_workers_of_two_ranks_give_their_weights(workers, make_job, kind):
    """One process computes a step from the versions that both ranks had pulled; so they had one of
    what both hold, and one clock.
    """
    job = make_job("ranks", "layout=tp2 server2", sync(kind, 2), *SMALL)
    servers, _ = trained(workers, job)
    ledgers = [server.desk.ledger for server in servers]
    for events, chunks in zip(ledgers, chunks_for(job), strict=True):
        assert {chunk.rank for chunk in chunks} == {0, 1} and twice(events) == []
        assert sum(event.kind == "push" for event in events) == 2 * STEPS * len(chunks)
    assert apart(whole(servers), replay_run(job, ledgers)) < 1e-10


def test_a_rank_that_uses_what_it_had_before_is_found_by_the_replay(workers, make_job):
    """The comparison above can fail: here nobody gives the other ranks what they hold alike."""
    job = make_job("ranks", "layout=tp2 server1", sync("asp", 1), *SMALL)
    servers, _ = workers_that_keep(workers, job)
    assert not apart(whole(servers), replay_run(job, [servers[0].desk.ledger])) < 1e-6


def workers_that_keep(workers, job):
    with serving_here(job) as (servers, way):
        return servers, workers.run(keep, job, way, ranks=2)


def keep(transport, job, way):
    with patch("howdah.parallel.served.PulledOnce._give"):
        return work(transport, job, way)


def test_bytes_and_memory_are_those_of_the_plan(workers, make_job):
    job = make_job("ranks", "layout=tp2 sp server2", sync("ssp", 2), *SMALL)
    plan = job.plan
    servers, found = trained(workers, job)
    for rank, (_, sent) in enumerate(found):
        planned = step_traffic(plan, rank % 2, wires_of(found))
        assert {row: n for row, n in sent.items() if row.axis == "tp"} == {
            row: STEPS * n for row, n in planned.items() if row.axis == "tp"
        }
    pushed = sum(n for rank in (0, 1) for row, n in step_traffic(plan, rank).items()
                 if row.operation == "reduce")  # fmt: skip
    counts = [server.host.counts for server in servers]
    assert sum(count["pushed bytes"] for count in counts) == 2 * STEPS * pushed
    for number, (server, count) in enumerate(zip(servers, counts, strict=True)):
        (pulled,) = step_traffic(plan, 2 + number).values()
        assert count["pulled bytes"] == 2 * STEPS * pulled
        rows = {row.component: row.bytes for row in memory(plan, 2 + number, kernels_of(plan))}
        assert rows["weights"] == sum(master.nbytes for master in server.desk.shard.masters)


def wires_of(found):
    """The links over which these ranks have sent."""
    (link,) = {row.link for _, sent in found for row in sent}
    return Wires(link, link, 4)


# -- processes


def dying(marker, pipe, store, meeting):
    """A worker whose second rank is killed (SIGKILL) in its second step, with some of it pushed."""
    push = Client.push

    def push_or_die(client, unit):
        handles = push(client, unit)
        first = (meeting.number, meeting.rank, client.clock) == (1, 1, 1)
        if first and not os.path.exists(marker):
            client.drain()
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return handles

    with patch.object(Client, "push", push_or_die), patch("howdah.plan.sums.BUCKET_BYTES", 1):
        return serving.work_here(pipe, store, meeting)


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_its_worker_a_step_and_nothing_is_applied_twice(
    make_job, tmp_path
):
    job = make_job("killed", "layout=tp2 server2", sync("asp", 2), *SMALL)
    with patch.object(serving, "work_here", partial(dying, str(tmp_path / "dead"))):
        said = served(job)
    assert any("worker 1 (process" in line and "takes its place" in line for line in said), said
    ledgers = [read_ledger(path) for path in sorted((tmp_path / "killed/ledgers").iterdir())]
    later = {e.update.clock for events in ledgers for e in events if e.update.incarnation > 1}
    assert min(later) == 1  # the step that it had not finished
    for events, chunks in zip(ledgers, chunks_for(job), strict=True):
        assert twice(events) == []
        assert sum(event.kind == "push" for event in events) == 2 * STEPS * len(chunks)
    kept = {n: t for n, t in tensors(tmp_path / "killed", STEPS).items() if n[0] == "weight"}
    assert apart(kept, replay_run(job, ledgers)) < 1e-10


def test_a_worker_of_which_one_rank_has_failed_is_ended_and_told_by_that_one():
    """The other one, which has lost it, exits in the same moment."""
    ended, killed = [], SimpleNamespace(status=-9, pid=7)
    other = SimpleNamespace(status=None, pid=6)
    one = serving.Process("worker", 0, print, lambda: ended.append(1), children=[other, killed])
    one.look()
    assert one.status is None and ended == [1]
    other.status = 1
    one.look()
    assert one.status == -9 and one.failed is killed and ended == [1]
    both = serving.Process("worker", 0, print, lambda: None, children=[other, killed])
    both.look()
    assert both.failed is killed
    late = SimpleNamespace(status=None, pid=7)
    seen = serving.Process("worker", 0, print, lambda: ended.append(2), children=[other, late])
    seen.dead = {0, 7}  # the other one has said so: it is not known yet, and waited for
    seen.look()
    assert seen.failed is None and ended == [1]
    late.status = -9
    seen.look()
    assert seen.failed is late and ended == [1, 2]
    well = serving.Process("worker", 0, print, ended.clear, children=[SimpleNamespace(status=0)])
    well.look()
    assert well.status == 0 and ended == [1, 2]


def test_a_rank_that_has_lost_another_does_not_say_why_its_worker_has_failed(make_job):
    job = make_job("told", "layout=tp2 server1", sync("asp", 1), *SMALL)
    crew = Crew(job, print, step=-1, again="it")
    one = serving.Process("worker", 0, print, print)
    for kind, told in (
        ("lost", "rank 1 is gone"),
        ("away", "server 0"),
        ("lost", "rank 0 is gone"),
    ):
        crew.hear(one, {"failed": kind, "told": told})
    assert one.told == ("away", "server 0")
