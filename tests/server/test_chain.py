"""Replicas: a server that dies loses nothing that was acknowledged, and repeats nothing."""

import json
import socket
from contextlib import contextmanager, suppress
from random import Random
from threading import Event, Thread

import pytest
import torch
from small_servers import (
    STEPS,
    UNITS,
    apart,
    chunks_for,
    gradient,
    plain,
    shards_of,
    summed_gradient,
    tokens_of,
    weights_of,
)
from test_wire import HELLO, SECRET, door_of, units, wait

from howdah.comm.frames import Frames, Gone
from howdah.comm.handshake import CALLER, greet
from howdah.plan.method import Sync
from howdah.plan.servers import chain_of
from howdah.server.chain import ENTRY, Chain, Follower
from howdah.server.client import Client
from howdah.server.clocks import Clocks, Update
from howdah.server.desk import Deed, Desk
from howdah.server.host import Host
from howdah.server.ledger import replay, twice
from howdah.server.messages import DEED, JOIN, PUSH, Fields
from howdah.server.roll import Order, Roll
from howdah.server.shard import Term
from howdah.server.way import Way


def test_replicas_are_on_the_next_servers():
    assert [chain_of(shard, 3, 1) for shard in range(3)] == [[0, 1], [1, 2], [2, 0]]
    assert chain_of(1, 2, 5) == [1, 0]
    assert Roll(3, 1).held_by(0) == [0, 2]


def test_who_follows_a_dead_server():
    roll = Roll(3, 1)
    assert roll.died(1) == [Order(0, "drop", 0), Order(2, "promote", 1)]
    assert roll.holders == {0: [0], 1: [2], 2: [2, 0]}
    assert roll.died(0) == [Order(2, "drop", 2)] and roll.lost == [0]
    roll = Roll(4, 2)
    assert roll.died(1) == [
        Order(0, "drop", 0),
        Order(2, "promote", 1),
        Order(3, "drop", 3),
        Order(0, "drop", 3),
    ]  # and 3 need not find a dead one behind 0, if 0 dies too
    assert roll.died(2) == [
        Order(0, "drop", 0),
        Order(3, "promote", 1),
        Order(3, "promote", 2),
    ]


class Node:
    """A process of a server: a host that serves, or that of a replica."""

    def __init__(self, sync, place):
        (shard,) = shards_of(sync, 1)
        self.desk = Desk(Clocks(sync, len(shard.chunks)), shard)
        self.chain = Chain(SECRET, HELLO)
        self.desk.record = self.chain.record
        self.listener, self.feed = socket.socket(), socket.create_server(("127.0.0.1", 0))
        self.listener.bind(("127.0.0.1", 0))
        self.host = Host(
            self.desk, door_of(self.listener), HELLO, dtype=torch.float64, copies=self.chain
        )
        follower = place and Follower(self.host, self.chain, self.feed, SECRET, HELLO)
        self.follower, self._over, self._thread = follower, Event(), None

    def serve(self):
        if self.follower:
            self.follower.close()
            self.follower = None
            self.host.take_over()
        self.chain.told = self.host.release
        self.listener.listen()
        self._thread = Thread(target=self._look)
        self._thread.start()

    def _look(self):
        while not self._over.is_set():
            self.host.look(0.01)

    def die(self):
        """Says nothing any more, to nobody."""
        self._over.set()
        self.chain.told = lambda number: None
        self.host._post = lambda *letter, **of: None  # what is kept back stays there
        if self._thread:
            self._thread.join()
        self.listener.close()
        if self.follower:
            self.follower.close()
        self.chain.close()
        self.host.close()
        self.feed.close()


@contextmanager
def chained(sync, replicas):
    nodes = [Node(sync, place) for place in range(replicas + 1)]
    for place, node in enumerate(nodes):
        node.chain.follow([other.feed.getsockname() for other in nodes[place + 1 :]])
    nodes[0].serve()
    try:
        yield nodes
    finally:
        for node in nodes:
            node.die()


def work(way, place, acknowledged, cut):
    """A worker's steps; `cut` is called before each push."""
    mine = units()
    client = Client(way, place, chunks_for(1), mine)
    client.join(max)
    for clock in range(client.clock, STEPS):
        client.clock, client.tokens = clock, tokens_of(place, clock)
        for one in UNITS:
            client.pull(one.unit)
        wait(client)
        for one in reversed(UNITS):
            flat = mine[one.unit]
            flat.gradients.copy_(summed_gradient(place, clock, flat.weights))
            cut()
            client.push(one.unit)
    client.drain()
    acknowledged.append(client.came_back)
    client.close()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [("asp", 0), ("bsp", 0)])
def test_a_server_that_dies_loses_and_repeats_nothing(replicas, rule):
    """Its replica has its place in the middle of a backward pass, and then the replica's one."""
    sync, random, acknowledged = Sync(*rule, workers=2, replicas=replicas), Random(7), []
    pushes = random.sample(range(4, 2 * STEPS * len(UNITS) - 4), replicas)
    due = {push: dead for dead, push in enumerate(sorted(pushes))}
    with chained(sync, replicas) as nodes:
        count = []

        def cut():
            count.append(1)
            if (dead := due.get(len(count))) is not None:
                nodes[dead].die()
                nodes[dead + 1].serve()

        first, *others = [node.listener.getsockname() for node in nodes]
        way = Way([first], SECRET, HELLO, patience=20.0, others=[others])
        threads = [Thread(target=work, args=(way, n, acknowledged, cut)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(acknowledged) == 2 and max(acknowledged) >= 1
        desk = nodes[-1].desk
        assert twice(desk.ledger) == []
        expected = 2 * STEPS if rule[0] == "asp" else STEPS
        assert set(desk.clocks.versions) == {expected}
        again = shards_of(sync, 1)
        replay([desk.ledger], again, gradient)
        assert apart(weights_of([desk.shard]), weights_of(again)) < 1e-10
        if rule[0] == "bsp":
            assert apart(weights_of([desk.shard]), plain(2)) < 1e-10


UNSOUND = {
    "no frame": lambda frames: frames.sock.sendall(b"x" * 200),
    "a deed to come": lambda frames: frames.send(DEED, ENTRY.pack(9, JOIN, 0, 0, 0, 0, 0.0)),
    "a deed of no kind": lambda frames: frames.send(DEED, ENTRY.pack(1, 99, 0, 0, 0, 0, 0.0)),
    "a key that there is not": lambda frames: frames.send(
        DEED, ENTRY.pack(1, PUSH, 0, 1, 0, 9999, 1.0), [memoryview(bytes(8))]
    ),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_what_no_sound_server_sends_to_its_replica_is_refused_and_counted(what):
    node = Node(Sync("asp", workers=1, replicas=1), 1)
    node.chain.follow([])
    try:
        with socket.create_connection(node.feed.getsockname()) as stranger:
            stranger.sendall(bytes(200))
            with suppress(ConnectionError):
                while stranger.recv(1 << 16):
                    pass
        sock = socket.create_connection(node.feed.getsockname())
        greet(sock, SECRET, json.dumps({**HELLO, "place": -1}).encode(), role=CALLER)
        frames = Frames(sock, "a replica", seconds=10.0)
        frames.receive()  # what it has
        UNSOUND[what](frames)
        with pytest.raises(Gone):
            while frames.receive():
                pass
        frames.close()
        for hello in (json.dumps({**HELLO, "run": "other"}).encode(), b"[" * 3000, b"{"):
            other = socket.create_connection(node.feed.getsockname())
            greet(other, SECRET, hello, role=CALLER)
            with pytest.raises(Gone):
                Frames(other, "a replica", seconds=10.0).receive()
            other.close()
    finally:
        node.die()
    assert node.host.counts == {"strangers": 1, "refused": 4} and node.chain.seq == 0


def test_nothing_is_acknowledged_before_the_replica_has_it_and_all_is_when_it_is_dropped():
    sync = Sync("asp", workers=1, replicas=1)
    (shard,) = shards_of(sync, 1)
    chain, sent = Chain(SECRET, HELLO), []
    with socket.socket() as deaf:  # nobody listens there
        deaf.bind(("127.0.0.1", 0))
        chain.follow([deaf.getsockname()])
        host = Host(
            Desk(Clocks(sync, 1), shard), door_of(deaf), HELLO, dtype=torch.float64, copies=chain
        )
        host.desk.record, chain.told = chain.record, host.release
        box = type("Box", (), {"post": sent_to(sent)})()
        guest = type("Guest", (), {"outbox": box, "held": 0})()
        host._post(guest, 1, Fields())
        assert sent == [1]  # nothing was done yet
        host.desk.join(0)
        host._post(guest, 2, Fields())
        assert sent == [1]
        chain.drop(deaf.getsockname())
        assert sent == [1, 2]
        chain.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reached", [True, False])
def test_a_replica_that_confirms_nothing_is_told_of(reached, monkeypatch):
    """The link may be cut for good, or what is done be refused there: the run waited for ever."""
    monkeypatch.setattr("howdah.server.chain.UNREACHED", 0.05)
    monkeypatch.setattr("howdah.server.chain.SILENCE", 0.4)
    chain, told, guests = Chain(SECRET, HELLO), Event(), []
    chain.lost = told.set

    def greet_alone():
        while not told.is_set():
            guests.extend(door.look(0.01))

    with socket.create_server(("127.0.0.1", 0)) as there:
        door, looking = door_of(there), Thread(target=greet_alone)
        if reached:  # it says nothing more
            looking.start()
        chain.follow([there.getsockname()])
        chain.record(Deed(JOIN, 0, 1), None)
        assert told.wait(20.0)
        chain.close()
        if reached:
            looking.join()
            assert guests
        for sock, _ in guests:
            sock.close()
        door.close()


def sent_to(sent):
    return lambda box, letter: sent.append(letter.kind)


def test_a_desk_that_does_the_same_deeds_is_the_same_to_the_last_bit():
    sync = Sync("asp", workers=2, rate="staleness", compensation=0.1)
    one, other = (
        Desk(Clocks(sync, len(shard.chunks)), shard)
        for shard in (*shards_of(sync, 1), *shards_of(sync, 1))
    )
    one.record = other.redo
    made = torch.Generator().manual_seed(1)
    for worker in (0, 1):
        incarnation, clock = one.join(worker)
        one.begin(worker, incarnation, clock)
    for clock in range(3):
        for worker in (1, 0):
            for key in range(len(one.shard.chunks)):
                one.pull(worker, 1, clock=clock, key=key)
            assert len(list(one.answers())) == len(one.shard.chunks)
        for worker in (0, 1):
            for key, master in enumerate(one.shard.masters):
                summed = torch.randn(master.shape, generator=made, dtype=torch.float64)
                one.push(Update(worker, 1, clock, key), Term(summed, 3.0))
    one.leave(1, 1)
    one.join(1)
    assert one.ledger == other.ledger and one.clocks == other.clocks
    for mine, theirs in zip(one.shard.masters, other.shard.masters, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_is_confirmed_before_a_server_knows_who_copies_it():
    """What came to a replica before it was told went no further, and was called safe."""
    chain, told = Chain(SECRET, HELLO), []
    chain.told = told.append
    chain.record(Deed(JOIN, 0, 1), None)
    assert chain.has == 0 and told == []
    chain.follow([])
    assert chain.has == 1 and told == [1]
    chain.record(Deed(JOIN, 1, 1), None)
    assert told == [1, 2]
    waits = Chain(SECRET, HELLO)
    waits.record(Deed(JOIN, 0, 1), None)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        waits.follow([nobody.getsockname()])
        assert [number for number, *_ in waits._kept] == [1] and waits.has == 0
        waits.close()
