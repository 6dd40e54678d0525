"""Workers and servers over sockets: what is sent arrives once, whatever happens to connections.

The servers are threads of the test; a host does not know who runs it. Workers are threads too, with
the gradients of `small_servers`, so the result of every run is known: that of one process.
"""

import json
import socket
from contextlib import contextmanager
from dataclasses import replace
from os import sched_yield
from threading import Event, Thread
from unittest.mock import patch

import pytest
import torch
from small_servers import (
    STEPS,
    UNITS,
    apart,
    chunks_for,
    first_weights,
    gradient,
    plain,
    shards_of,
    summed_gradient,
    tokens_of,
    weights_of,
)

from howdah.comm.frames import Frames
from howdah.comm.handshake import Door
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.method import Sync
from howdah.server import link as link_module
from howdah.server.client import Client
from howdah.server.clocks import Clocks
from howdah.server.desk import Desk
from howdah.server.host import Host
from howdah.server.ledger import replay, twice
from howdah.server.messages import JOINED, PING, PULL, PUSH, Fields, fields_of
from howdah.server.outbox import Letter, Outbox
from howdah.server.way import ServerAway, ServerGone, Way

SECRET = bytes(range(32))
HELLO = {"run": "small", "code": "1"}


class Servers:
    """Hosts in threads, each on a socket of its own."""

    def __init__(self, sync, count, *, fifo=False, unix=None, grace=0.2):
        self.sync = sync
        self.desks = [
            Desk(Clocks(sync, len(shard.chunks)), shard, fifo=fifo)
            for shard in shards_of(sync, count)
        ]
        self.listeners = [listening(unix and unix / f"{n}") for n in range(count)]
        self.hosts = [
            Host(desk, door_of(listener), HELLO, dtype=torch.float64, grace=grace)
            for desk, listener in zip(self.desks, self.listeners, strict=True)
        ]
        self.addresses = [listener.getsockname() for listener in self.listeners]
        self._over = Event()
        self._threads = [Thread(target=self._look, args=(host,)) for host in self.hosts]
        for thread in self._threads:
            thread.start()

    def _look(self, host):
        while not self._over.is_set():
            host.look(0.01)

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.join()
        for host, listener in zip(self.hosts, self.listeners, strict=True):
            host.close()
            listener.close()

    @property
    def weights(self):
        return weights_of([desk.shard for desk in self.desks])


def door_of(listener):
    return Door(listener, SECRET, json.dumps(HELLO).encode())


def listening(path):
    sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    sock.bind(str(path) if path else ("127.0.0.1", 0))
    sock.listen()
    return sock


@contextmanager
def servers(sync, count=2, **settings):
    there = Servers(sync, count, **settings)
    try:
        yield there
    finally:
        there.close()


def units():
    """What a worker holds: weights and gradients, whole."""
    none = torch.empty(0, dtype=torch.float64)
    return {
        one.unit: FlatUnit(one, 0, first, none, torch.zeros_like(first), none)
        for one, first in zip(UNITS, first_weights().values(), strict=True)
    }


def client_of(there, place, *, mine=None, **way):
    settings = {"secret": SECRET, "hello": HELLO, "patience": 10.0, **way}
    ways = Way(there.addresses, **settings)
    return Client(ways, place, chunks_for(len(there.hosts)), mine or units())


def work(there, place, *, steps=STEPS, cut=None, **way):
    """A worker's steps; `cut` is called with the client before each push."""
    mine = units()
    client = client_of(there, place, mine=mine, **way)
    client.join(there.sync.begins)
    for clock in range(client.clock, steps):
        client.clock, client.tokens = clock, tokens_of(place, clock)
        client.trades = there.sync.barrier and clock + 1 < steps
        for one in UNITS:
            client.pull(one.unit)
        wait(client)
        for one in reversed(UNITS):
            flat = mine[one.unit]
            flat.gradients.copy_(summed_gradient(place, clock, flat.weights))
            if cut:
                cut(client, clock)
            client.push(one.unit)
    client.drain()
    client.close()
    return client


def wait(client):
    for one in UNITS:
        for link in client._links:
            link.wait(one.unit)


def all_work(there, workers, **given):
    """Runs workers in threads; raises what one of them raised."""
    failed, clients = [], {}

    def run(place):
        try:
            clients[place] = work(there, place, **given)
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=run, args=(place,)) for place in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return clients


@pytest.mark.parametrize(
    ("unix", "fifo"), [(False, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_bsp_over_sockets_is_all_reduce_training(tmp_path, unix, fifo):
    with servers(Sync("bsp", workers=3), fifo=fifo, unix=tmp_path if unix else None) as there:
        all_work(there, 3, fifo=fifo)
        assert apart(there.weights, plain(3)) < 1e-10


@pytest.mark.parametrize(
    "sync",
    [Sync("ssp", 1, workers=3), pytest.param(Sync("asp", workers=3), marks=pytest.mark.slow)],
    ids=str,
)
def test_what_asynchronous_workers_made_is_what_their_ledgers_say(sync):
    with servers(sync) as there:
        all_work(there, 3)
        again = shards_of(sync, 2)
        replay([desk.ledger for desk in there.desks], again, gradient)
        assert apart(there.weights, weights_of(again)) < 1e-10
        every = sum(len(desk.shard.chunks) for desk in there.desks) * 3 * STEPS
        assert sum(sum(desk.clocks.versions) for desk in there.desks) == every


@pytest.mark.slow
def test_a_window_of_one_chunk_and_tiny_frames_change_nothing():
    with servers(Sync("bsp", workers=2)) as there:
        clients = all_work(there, 2, window=1)
        assert apart(there.weights, plain(2)) < 1e-10
        assert all(client.deepest > 1 for client in clients.values())


def test_the_next_weights_of_a_unit_come_while_others_are_not_pushed_yet():
    """Where all workers' updates are in what a pull brings, nobody has to ask for it later."""
    with servers(Sync("bsp", workers=1), 1) as there:
        mine, first = units(), UNITS[0].unit
        client = client_of(there, 0, mine=mine)
        client.join(there.sync.begins)
        client.trades, client.tokens = True, 1.0
        before = mine[first].weights.clone()
        mine[first].gradients.fill_(1.0)
        client.push(first)
        client._links[0].wait(first)
        assert there.weights[first].equal(mine[first].weights)
        assert not mine[first].weights.equal(before)
        asked = there.hosts[0].counts["pulls"]
        client.clock = 1
        client.pull(first)[0].result()
        assert there.hosts[0].counts["pulls"] == asked  # it has them already
        client.close()


@pytest.mark.parametrize("kind", ["asp", "bsp"])
def test_connections_that_are_cut_lose_and_repeat_nothing(kind):
    """Each worker's connections are cut in the middle of every second backward pass."""
    sync = Sync(kind, workers=2)
    with servers(sync, grace=30.0) as there:
        done = set()

        def cut(client, clock):
            for link in client._links:
                if clock % 2 and (id(link), clock) not in done:
                    done.add((id(link), clock))
                    link._frames.sock.shutdown(socket.SHUT_RDWR)

        clients = all_work(there, 2, cut=cut)
        assert sum(client.came_back for client in clients.values()) > 4
        for desk in there.desks:
            times = STEPS if kind == "bsp" else 2 * STEPS
            assert twice(desk.ledger) == [] and set(desk.clocks.versions) == {times}
            assert all(member.incarnation == 1 for member in desk.clocks.members.values())
        again = shards_of(sync, 2)
        replay([desk.ledger for desk in there.desks], again, gradient)
        assert apart(there.weights, weights_of(again)) < 1e-10


def test_a_connection_that_ends_before_a_resumed_run_has_begun_is_made_again():
    """The worker said clock 0 then, which is not one of a run that goes on at 2."""
    sync = Sync("asp", workers=1)
    with servers(sync, 1, grace=30.0) as there:
        desk = there.desks[0]
        desk.clocks = Clocks(sync, len(desk.shard.chunks), 2, 8)
        client = client_of(there, 0)
        (link,) = client._links

        def begins(clocks):
            link._hang_up()
            while not link.came_back:
                sched_yield()
            return max(clocks)

        client.join(begins)
        assert client.clock == 2
        client.tokens = 1.0
        for one in UNITS:
            client.push(one.unit)
        client.drain()
        client.close()
        assert set(desk.clocks.versions) == {1} and link._failed is None


def test_a_worker_that_dies_holds_nobody_up_and_its_successor_goes_on():
    sync = Sync("bsp", workers=2)
    with servers(sync) as there:
        dying = client_of(there, 1)
        dying.join(max)
        for link in dying._links:  # it ends without a word, and does not come back
            link._ends = True
            link._frames.sock.shutdown(socket.SHUT_RDWR)
        work(there, 0, steps=2)
        work(there, 1, steps=STEPS)
        for desk in there.desks:
            assert set(desk.clocks.versions) == {STEPS}
            assert desk.clocks.members[1].incarnation == 2


def test_a_step_that_came_to_one_server_and_not_to_another_is_done_again():
    """Its successor began behind that step, where the first server was: 3 of 188,997 updates were
    lost in ten minutes of kills.
    """
    with servers(Sync("asp", workers=1)) as there:
        dying = client_of(there, 0)
        dying.join(max)
        dying.tokens = 1.0
        whole, _ = dying._links
        for one in UNITS:  # all of it to the first server, and nothing to the second
            whole.push(one.unit, torch.ones(one.length, dtype=torch.float64), 0, 1.0)
        whole.drain()
        for link in dying._links:
            link._ends = True
            link._frames.sock.shutdown(socket.SHUT_RDWR)
        work(there, 0)
        for desk in there.desks:
            pushes = [event.update for event in desk.ledger if event.kind == "push"]
            keys = range(len(desk.shard.chunks))
            every = {(clock, key) for clock in range(STEPS) for key in keys}
            assert {(one.clock, one.key) for one in pushes} == every and twice(desk.ledger) == []


def test_a_worker_whose_place_was_given_to_another_is_told_and_gives_up():
    """It was frozen for so long that its successor has its place."""
    with servers(Sync("asp", workers=1), 1) as there:
        frozen = client_of(there, 0)
        frozen.join(max)
        there.hosts[0].do(lambda desk: desk.join(0))
        with pytest.raises(ServerGone, match="incarnation 1 of worker 0 is over"):
            frozen.pull(UNITS[0].unit)[0].result()


def test_a_silent_server_is_noticed_and_both_ends_say_that_they_live():
    outbox = Outbox(pulse=0.0)
    outbox.post(Letter(PULL))
    assert [one.kind for _ in range(3) for one in outbox.take()] == [PULL, PING, PING]
    listener = listening(None)
    way = Way([listener.getsockname()], SECRET, HELLO, patience=60.0, silence=0.1)
    client, joined = Client(way, 0, chunks_for(1), units()), Event()

    def serve():  # it lets the worker in, however often it comes, and never says anything again
        door = door_of(listener)
        while not joined.is_set():
            for sock, _ in door.look(0.05):
                kept.append(Frames(sock, "worker", seconds=10.0))
                kept[-1].send(JOINED, Fields(0, 1).packed)
        listener.close()

    kept, thread = [], Thread(target=serve)
    thread.start()
    client.join(max)
    client._links[0].way = replace(way, patience=0.2)
    joined.set()
    with pytest.raises(ServerAway, match=r"did not answer for 0\.2 s"):
        client.pull(UNITS[0].unit)[0].result()
    thread.join()
    for frames in kept:
        frames.close()


def test_a_worker_asks_for_a_step_when_the_one_before_the_last_is_acknowledged():
    """Otherwise one whose network is slow would be refused."""
    way = Way(["nowhere"], SECRET, HELLO)
    link = Client(way, 0, chunks_for(1), units())._links[0]
    link._failed = ServerGone("waits")  # what waits fails at once
    for clock in (0, 1):
        for one in UNITS:
            link.push(one.unit, torch.zeros(one.length, dtype=torch.float64), clock, 1.0)
    link.pull(UNITS[0].unit, 1)
    with pytest.raises(ServerGone, match="waits"):
        link.pull(UNITS[0].unit, 2)
    pushes = [letter for _, letter in sorted(link.outbox._large) if letter.kind == PUSH]
    sent = [fields_of(letter.fields)[:2] for letter in pushes]
    assert sent == sorted(sent) and len(sent) > 2  # the last key of a step before the next step


def test_a_worker_that_is_asked_to_leave_does_not_wait_for_others_for_long(monkeypatch):
    """It waited for a place that nobody had taken, whatever signal it got."""
    monkeypatch.setattr(link_module, "LEAVING", 0.0)
    with (
        servers(Sync("bsp", workers=2), 1) as there,
        pytest.raises(ServerGone, match="asked to leave while it waited for other workers"),
    ):
        work(there, 0, leave=lambda: True, patience=1.0)


def test_a_worker_that_has_finished_says_so_until_it_is_heard():
    """Its last pushes were dropped where its connection ended in that moment: they wait for others,
    and nobody does them again.
    """
    with servers(Sync("bsp", workers=2), 1) as there:
        desk, second = there.desks[0], client_of(there, 1)
        second.join(max)
        first = client_of(there, 0)
        first.join(max)
        for client in (second, first):
            client.clock, client.tokens = 0, 1.0
        for one in UNITS:
            first.push(one.unit)
        first.drain()
        first._links[0]._hang_up()
        first.close()
        there.hosts[0].do(lambda desk: None)
        member = desk.clocks.members[0]
        assert member.bye and len(desk._terms) == len(desk.shard.chunks)
        for one in UNITS:
            second.push(one.unit)
        second.drain()
        second.close()
        assert {event.update.worker for event in desk.ledger if event.kind == "push"} == {0, 1}


def test_a_worker_that_is_refused_while_it_leaves_has_left():
    """Its BYE was heard, and the answer was lost."""
    with servers(Sync("asp", workers=1), 1) as there:
        client = client_of(there, 0)
        client.join(max)
        there.hosts[0].do(lambda desk: desk.leave(0, 1, finished=True))
        link = client._links[0]
        link._leaves = True
        link._hang_up()
        client.close()
        assert link._failed is None


def test_an_error_that_no_message_explains_ends_the_server():
    """What was counted as done may not be; the thread ended, and its place was taken for ever."""
    with servers(Sync("asp"), 1) as there:
        with patch.object(there.desks[0].shard, "apply", side_effect=MemoryError("no room")):
            client = client_of(there, 0, patience=0.1)
            client.join(max)
            client.clock, client.tokens = 0, 1.0
            client.push(UNITS[0].unit)
            while there.hosts[0].broken is None:
                sched_yield()
        with pytest.raises(MemoryError, match="no room"):
            there.hosts[0].heed()
