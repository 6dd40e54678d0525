"""How many parameter servers pay off, and what a step with them is priced at."""

from dataclasses import replace

import pytest

from howdah.base.errors import UserError
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.comm import Comm
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Sync
from howdah.plan.plan import make_plan
from howdah.plan.sums import sums_of
from howdah.search.notes import notes_on
from howdah.shapes.presets import preset
from howdah.sim.message_times import MessageTimes
from howdah.sim.predict import predict
from howdah.sim.servers import alone, best_shares, bound, least_paying


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_the_bound_is_a_ring_without_servers_and_one_message_with_as_many(workers):
    ring = 2 * (workers - 1) / workers
    assert bound(workers, 0, size=6, bandwidth=3) == pytest.approx(2 * ring)
    assert bound(workers, workers, size=6, bandwidth=3) == pytest.approx(2)
    assert bound(workers, 9 * workers, size=6, bandwidth=3) == pytest.approx(2)
    times = [bound(workers, k, size=1, bandwidth=1) for k in range(workers + 1)]
    assert times == sorted(times, reverse=True) and (workers == 2 or times[0] > times[-1])


def test_servers_that_only_serve_are_never_below_the_bound():
    for workers in range(2, 20):
        for servers in range(1, 25):
            both = [time(workers, servers, size=1, bandwidth=1) for time in (alone, bound)]
            assert both[0] >= both[1] - 1e-12


def test_with_the_best_shares_every_machine_moves_as_much_as_the_bound_says():
    for workers in range(2, 13):
        for servers in range(workers + 1):
            sizes = best_shares(workers, servers)
            kept = [size / sum(sizes) for size in sizes]
            moved = [workers * mine for mine in kept[:servers]]
            moved += [1 - mine + (workers - 1) * mine for mine in kept[servers:]]
            least = bound(workers, servers, size=1, bandwidth=1)
            assert moved == pytest.approx([least] * len(moved))
            assert len(sizes) == (servers if servers == workers else servers + workers)


def test_a_server_that_keeps_more_holds_more_and_is_waited_for():
    cluster, method = load_cluster("h100x16"), Method(sync=Sync("asp", workers=4), grad_clip=0.0)
    found = [
        predict(plan_of("server2", method, Comm(server_shares=sizes)), cluster)
        for sizes in ((), (1, 1), (3, 1), (1, 7))
    ]
    assert found[0].memory == found[1].memory
    held = [[sum(row.bytes for row in rows) for rows in one.memory[1:]] for one in found]
    assert held[2][0] == pytest.approx(1.5 * max(held[0]), rel=1e-3)
    pushes = [MessageTimes(one.plan, cluster).of_sum(sums_of(one.plan, rank=0)[0]) for one in found]
    assert pushes[0] == pushes[1] < pushes[2]
    more = [
        seconds - pushes[0] for seconds in pushes
    ]  # the busiest moves 2, 3 and 3.5 times as much
    assert more[3] == pytest.approx(1.5 * more[2])
    assert held[3][0] == pytest.approx(1.75 * held[0][0], rel=1e-3)  # of the fullest, not the first


@pytest.mark.parametrize("replicas", [0, 1])
def test_shares_of_another_number_of_servers_are_refused(replicas):
    method = Method(sync=Sync("asp", workers=4, replicas=replicas), grad_clip=0.0)
    with pytest.raises(UserError, match="the layout has server2: write as many numbers"):
        predict(plan_of("server2", method, Comm(server_shares=(1,))), load_cluster("h100x16"))


def test_how_many_pay_off():
    assert [least_paying(workers) for workers in (1, 2, 3, 4, 8)] == [0, 0, 3, 3, 5]


def plan_of(layout, method=Method(), comm=Comm()):  # noqa: B008 (constants)
    batch = Batch(global_batch=8, micro_batch=1)
    shape, words = preset("laptop"), parse_layout(layout)
    plan = make_plan(shape, words, batch, sequence=256, method=method)
    return replace(plan, comm=comm)


def test_more_servers_make_a_step_shorter_and_hold_less():
    cluster = load_cluster("h100x16")
    found = [predict(plan_of(f"dp4 server{k}"), cluster) for k in (1, 2, 4)]
    seconds = [one.time.seconds for one in found]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    workers, servers = zip(*[one.memory for one in found], strict=True)
    assert workers[0] == workers[1] == workers[2]
    held = [sum(row.bytes for row in rows) for rows in servers]
    assert held[0] == pytest.approx(2 * held[1], rel=1e-3)
    assert held[1] == pytest.approx(2 * held[2], rel=1e-3)
    assert {row.component for row in servers[0]} == {"weights", "gradients", "moments"}
    assert {row.component for row in workers[0]} == {"weights", "gradients", "activations"}


def test_servers_that_only_add_hold_sums_and_workers_all_states():
    plain, adding = plan_of("dp4"), plan_of("dp4 server2 update=workers")
    worker, server = predict(adding).memory
    assert worker == predict(plain).memory[0]
    whole = next(row.bytes for row in worker if row.component == "gradients")
    assert [(row.component, row.home) for row in server] == [("gradients", "device")]
    assert server[0].bytes == pytest.approx(whole / 2, rel=1e-3)


def test_servers_that_only_add_move_as_much_as_those_that_update_in_float32():
    cluster = load_cluster("h100x16")
    found = [predict(plan_of(f"dp4 server2{more}"), cluster) for more in ("", " update=workers")]
    sent = [[sum(rows.values()) for rows in one.traffic] for one in found]
    assert sent[0] == sent[1]
    pushes = [MessageTimes(one.plan, cluster).of_sum(sums_of(one.plan, rank=0)[0]) for one in found]
    assert pushes[1] == pytest.approx(2 * pushes[0])  # there and back


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("dp2 server3", "more servers than the 2 workers wait for them: server2 is as fast"),
        ("dp2 server2", "on links of one speed, 2 workers are as fast without servers"),
        ("dp8 server2", "each server moves 4 times what a worker does: on links of one speed dp8 "),
        ("dp8 server5", ""),
        ("dp8", ""),
    ],
)
def test_a_plan_says_how_many_servers_pay_off(layout, note):
    notes = [one for one in notes_on(plan_of(layout), None) if "server" in one]
    assert len(notes) == bool(note) and "".join(notes).startswith(note)


def test_a_push_to_a_server_with_replicas_goes_over_the_network_as_often():
    """So that the servers, not the workers, are waited for earlier."""
    cluster, seconds = load_cluster("h100x16"), []
    for replicas in (0, 1, 3):
        method = Method(sync=Sync("asp", workers=2, replicas=replicas), grad_clip=0.0)
        plan = plan_of("server4", method)
        seconds.append(MessageTimes(plan, cluster).of_sum(sums_of(plan, rank=0)[0]))
    assert seconds[0] == seconds[1] < seconds[2], "half of a worker's, as much, and twice as much"


def test_a_plan_says_how_few_servers_pay_off_where_others_stand_with_the_workers():
    method = Method(sync=Sync("bsp", workers=4), grad_clip=0.0)
    notes = [one for one in notes_on(plan_of("server1", method), None) if "server" in one]
    assert "server5 and comm.server_shares=[6, 3, 3, 3, 3]" in notes[-1]


def test_a_plan_says_how_much_servers_on_workers_machines_should_keep():
    method = Method(sync=Sync("bsp", workers=4), grad_clip=0.0)
    notes = [one for one in notes_on(plan_of("server5", method), None) if "server" in one]
    assert "comm.server_shares=[6, 3, 3, 3, 3] is best" in notes[-1]
    comm = Comm(server_shares=(6, 3, 3, 3, 3))
    assert not [one for one in notes_on(plan_of("server5", method, comm), None) if "server" in one]
