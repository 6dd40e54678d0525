"""Who is not let in, and what no sound worker sends: told, and the server goes on."""

import json
import socket
from contextlib import suppress
from itertools import count
from os import sched_yield
from random import Random
from threading import Thread

import pytest
from small_servers import (
    STEPS,
    chunks_for,
)
from test_wire import HELLO, SECRET, all_work, client_of, servers, units, work

from howdah.base.errors import UserError
from howdah.comm.frames import Frames, Gone, Silent, pack
from howdah.comm.handshake import CALLER, MAGIC, NONCE, greet
from howdah.plan.method import Sync
from howdah.server.client import Client
from howdah.server.guests import read_hello
from howdah.server.ledger import twice
from howdah.server.messages import JOIN, PULL, PUSH, TRADE, Fields
from howdah.server.way import ServerGone, Way


@pytest.mark.parametrize("said", [b'{"place": Infinity}', b'{"place": 1.5}', b"[" * 200_000])
def test_a_hello_that_is_none_is_refused(said):
    assert read_hello(said, {}, 1) == (-1, 0, 0, "the hello is none of a worker")


def test_a_worker_of_another_run_is_told_why():
    with servers(Sync("asp")) as there:
        with pytest.raises(UserError, match="the worker's run is other, and the server's small"):
            client_of(there, 0, hello={**HELLO, "run": "other"}).join(max)
        with pytest.raises(UserError, match="the worker's code is 2, and the server's 1"):
            client_of(there, 0, hello={**HELLO, "code": "2"}).join(max)


def test_a_worker_with_another_secret_is_told_what_to_check():
    with servers(Sync("asp"), 1) as there:
        with pytest.raises(ServerGone, match=r"did not answer for 0\.3 s .*the same secret"):
            client_of(there, 0, secret=bytes(32), patience=0.3).join(max)
        while not there.hosts[0].strangers:  # whose door may look later
            sched_yield()
        assert not there.hosts[0].counts


def test_a_server_that_is_not_there_is_named():
    with servers(Sync("asp"), 1) as there:
        way = Way([("127.0.0.1", 1)], SECRET, HELLO, patience=0.2)
        with pytest.raises(ServerGone, match=r"server 0 at 127\.0\.0\.1:1 did not answer for 0\.2"):
            Client(way, 0, chunks_for(1), units()).join(max)
        assert there.weights


def greeted(there, place=0):
    """A connection to the first server, which has not joined."""
    sock = socket.create_connection(there.addresses[0])
    greet(sock, SECRET, json.dumps({**HELLO, "place": place}).encode(), role=CALLER)
    return Frames(sock, "server", seconds=10.0)


def raw(there, place=0):
    """A connection to the first server, greeted and joined, for sending what one likes."""
    frames = greeted(there, place)
    frames.send(JOIN, Fields().packed)
    frames.receive()
    return frames


def test_a_server_that_ends_does_not_wait_for_who_has_not_joined():
    """It did, for ten seconds, and for ever where the worker had joined a moment later."""
    with servers(Sync("asp"), 1) as there:
        frames = greeted(there)
        while not there.hosts[0]._open:
            sched_yield()
    assert ends(frames) and there.hosts[0].why == "worker 0 ended the connection"
    frames.close()


def ends(frames):
    """Whether the server ends the connection."""
    try:
        while frames.sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


MALFORMED = {
    "no frame": lambda frames, size: frames.sock.sendall(b"x" * 200),
    "a kind that there is not": lambda frames, size: frames.send(99, Fields().packed),
    "fields of another length": lambda frames, size: frames.send(PULL, b"abc"),
    "a key that there is not": lambda frames, size: frames.send(PULL, Fields(0, 9999).packed),
    "a negative key": lambda frames, size: frames.send(PUSH, Fields(0, -1, 1.0).packed),
    "a clock to come": lambda frames, size: frames.send(PULL, Fields(77, 0).packed),
    "tokens that are no number": lambda frames, size: frames.send(
        PUSH, Fields(0, 0, float("nan")).packed, [memoryview(bytes(size))]
    ),
    "less than no tokens": lambda frames, size: frames.send(
        TRADE, Fields(0, 0, -1.0).packed, [memoryview(bytes(size))]
    ),
    "too many bytes": lambda frames, size: frames.send(
        PUSH, Fields(0, 0, 1.0).packed, [memoryview(bytes(1 << 20))]
    ),
    "too few bytes": lambda frames, size: frames.send(
        PUSH, Fields(0, 0, 1.0).packed, [memoryview(bytes(size - 8))]
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_no_sound_worker_sends_ends_its_connection_alone(kind):
    with servers(Sync("asp", workers=2), 1) as there:
        frames = raw(there, place=1)
        with suppress(Gone):  # the server may end the connection before all of it is sent
            MALFORMED[kind](frames, there.desks[0].shard.chunks[0].length * 8)
        assert ends(frames)
        work(there, 0)
        assert set(there.desks[0].clocks.versions) == {STEPS} and there.hosts[0].why
        assert there.hosts[0].counts["refused"] == 1
        frames.close()


def test_a_frame_that_comes_twice_is_refused():
    with servers(Sync("asp", workers=1), 1) as there:
        frames = raw(there)
        sent = []
        kept = frames.sock
        frames.sock = _Copying(kept, sent)
        frames.send(PULL, Fields(0, 0).packed)
        kept.sendall(b"".join(sent))
        assert ends(frames)
        assert "again, or late" in there.hosts[0].why
        assert there.hosts[0].counts["refused"] == 1
        kept.close()


class _Copying:
    """A socket that keeps what it sends."""

    def __init__(self, sock, sent):
        self._sock, self._sent = sock, sent

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def sendmsg(self, parts):
        self._sent += [bytes(part) for part in parts]
        return self._sock.sendall(b"".join(self._sent)) or sum(map(len, self._sent))


def test_a_worker_that_sends_half_a_frame_and_one_that_reads_nothing_hold_nobody_up(monkeypatch):
    monkeypatch.setattr("howdah.server.host.SILENCE", 600.0)  # they are not ended meanwhile
    with servers(Sync("asp", workers=4), 1) as there:
        half = raw(there, place=2)
        half.sock.sendall(b"hwd1")
        deaf = raw(there, place=3)
        host, keys = there.hosts[0], len(there.desks[0].shard.chunks)
        deaf.sock.setblocking(False)
        with pytest.raises(Silent):  # the host reads no more of what it asks
            for number in count():
                deaf.send(PULL, Fields(0, number % keys).packed)
        most = 64 + 4 * keys
        while host.queued < most:  # what the kernel has not taken of its weights
            sched_yield()
        all_work(there, 2)
        assert host.queued == most
        assert [m.clock for p, m in sorted(there.desks[0].clocks.members.items())][:2] == [
            STEPS
        ] * 2
        half.close()
        deaf.close()


FRAMES = 100_000


def said_to_a_stranger(address, noise):
    """All that a server's door answers to bytes that prove nothing."""
    said = b""
    with socket.create_connection(address) as stranger, suppress(OSError):
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        while some := stranger.recv(1 << 16):
            said += some
    return said


def damaged_frame(random, sound):
    """A sound frame of a kind, fields and bytes of payload, that is changed, cut, or late."""
    kind, fields, size = sound
    payload = memoryview(random.randbytes(size))
    head, _ = pack(kind, fields.packed, [payload], number=random.choice([1, 1, 0, 2]))
    frame = bytearray(head + payload)
    for _ in range(random.randint(1, 3)):
        frame[random.randrange(len(frame))] ^= random.randint(1, 255)
    return frame[: random.choice([len(frame), random.randint(1, len(frame))])]


def unsound_frame(random, size):
    """A whole frame with a right checksum, that no worker sends."""
    fields = random.choice(
        [
            Fields(0, 0, random.choice([float("nan"), float("inf"), -1.0, -1e300])),
            Fields(random.choice([77, -1, 1 << 60]), 0, 1.0),
            Fields(0, random.choice([-1, 9999, -(1 << 60)]), 1.0),
        ]
    )
    payload = memoryview(random.randbytes(random.choice([size, size, size - 8, 0, 3])))
    head, _ = pack(random.choice([PUSH, TRADE]), fields.packed, [payload], number=1)
    return head + payload


@pytest.mark.slow
def test_a_live_server_outlives_fuzzed_frames():
    """Sound frames, changed, cut or repeated, and frames that no worker sends; others train
    meanwhile. They come over socket pairs, for a handshake each would take most of the time, and
    some from strangers. Each is answered, if at all, before the server ends its connection.
    """
    random = Random(3)
    with servers(Sync("asp", workers=3), 1) as there:
        host, hello = there.hosts[0], json.dumps({**HELLO, "place": 2}).encode()
        size = there.desks[0].shard.chunks[0].length * 8
        joins, _ = pack(JOIN, Fields().packed, [], number=0)
        sound = [
            (PULL, Fields(0, 0), 0),
            (JOIN, Fields(), 0),
            (PUSH, Fields(0, 0, 1.0), size),
            (TRADE, Fields(0, 0, 1.0), size),
        ]
        training = Thread(target=all_work, args=(there, 2))
        for number in range(FRAMES):
            if number == FRAMES // 2:
                training.start()
            if number % 2:
                sent = damaged_frame(random, random.choice(sound))
            else:
                sent = unsound_frame(random, size)
            ours, theirs = socket.socketpair()
            with ours, suppress(ConnectionError):
                host._let_in(theirs, hello)
                ours.sendall(joins + sent)
                ours.shutdown(socket.SHUT_WR)
                while ours.recv(1 << 16):
                    pass
            if number % 500 == 0:
                knows = random.choice([b"", MAGIC])
                noise = knows + random.randbytes(random.choice([1, 40, 4000]))
                heard = said_to_a_stranger(there.addresses[0], noise)
                assert len(heard) <= NONCE * bool(knows)  # random bytes, to be answered by a proof
        training.join()
        assert host.strangers == FRAMES / 500
        clocks = there.desks[0].clocks
        assert [clocks.members[place].clock for place in (0, 1)] == [STEPS, STEPS]
        assert twice(there.desks[0].ledger) == [] and host.counts["refused"] > FRAMES / 4
