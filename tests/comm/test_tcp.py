"""The TCP transport: who joins, what damage and loss become, what a leaving rank leaves.

Bits, bytes and disagreements: test_transport.py, with those of the other transports.
"""

import fcntl
import logging
import os
import re
import resource
import select
import socket
import struct
import termios
import threading
from contextlib import closing, suppress

import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm import tcp_lines
from howdah.comm.flow import Task
from howdah.comm.frames import HEADER, kind_of
from howdah.comm.handshake import MAGIC
from howdah.comm.interface import address_of, is_loopback, leading_to
from howdah.comm.segments import BYE, GAVE_UP, SEGMENT, segments
from howdah.comm.signature import RECORD
from howdah.comm.tcp_connect import LINES, listening, tcp_transport
from howdah.comm.transport import PeerLost
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import parse_layout

SECRET = b"s" * 32
HOST = "127.0.0.1"


def joined(size, *, secrets=None, seconds=60.0, store=None, during=lambda port: None):
    """Connects ranks on threads of this process; by rank its transport, or its error.

    during  called with the port of rank 0 before the others come
    """
    store = store or dist.HashStore()
    found, threads = {}, []

    def join(rank):
        try:
            found[rank] = tcp_transport(
                store,
                rank=rank,
                size=size,
                address=HOST,
                secret=(secrets or [SECRET] * size)[rank],
                seconds=seconds,
            )
        except (UserError, PeerLost) as error:
            found[rank] = error

    for rank in range(size):
        threads.append(threading.Thread(target=join, args=(rank,)))
        threads[-1].start()
        if rank == 0:
            port = int(store.get("tcp/0").decode().split(",")[1].rstrip("]"))
            during(port)
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def everywhere(transports, *actions):
    """Runs an action on each transport at once; results, or errors, by rank."""
    found = {}

    def run(rank):
        try:
            found[rank] = actions[rank % len(actions)](transports[rank])
        except (PeerLost, RuntimeError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(transports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(transports))]


@pytest.fixture
def ranks():
    """Makes connected transports, and closes them."""
    made = []

    def make(size, **how):
        found = joined(size, **how)
        assert not [one for one in found if isinstance(one, Exception)], found
        made.extend(found)
        return found

    yield make
    for transport in made:
        transport.close()


# -- who calls late


def gathered(transport, x):
    transport.gather(torch.empty(2 * len(x)) if transport.rank else None, x, 1, [len(x)] * 2)


LATE = {
    "all_reduce": lambda t, x: t.all_reduce(x),
    "broadcast": lambda t, x: t.broadcast(x, 0),
    "reduce": lambda t, x: t.reduce(x, 1),
    "gather": gathered,
    "send": lambda t, x: t.receive(x, 0) if t.rank else t.send(x, 1),
    "program": lambda t, x: t.run("own", [Task(0, (), 1 - t.rank, (x,), sends=not t.rank)]),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("operation", LATE)
def test_who_calls_late_takes_no_long_message_before_and_is_not_lost(operation, ranks):
    """His kernel has no room for it, and then TCP takes the link for one that is down."""
    pair, late = ranks(2), threading.Event()

    def be_patient(milliseconds):
        for line in pair[0]._lines.by_peer[1]:
            line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    be_patient(100)
    before = pair[1]._lines.by_peer[0]
    x = [torch.ones(2 << 20), torch.ones(2 << 20)]
    timer = threading.Timer(1.0, late.set)
    timer.start()

    def call(transport):
        if transport.rank:
            late.wait()
            waiting.append(sum(unread(line.sock) for line in before))
            be_patient(0)  # a loaded machine may be slow to read what comes now
        LATE[operation](transport, x[transport.rank])

    waiting = []
    assert everywhere(pair, call) == [None, None]
    assert waiting[0] < 1024  # the call alone


def unread(sock):
    """Bytes that a socket's kernel has for it."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]


# -- joining


def test_strangers_are_counted_and_nobody_waits_for_them(ranks, caplog):
    held = []

    def strangers(port):
        for number in range(6):
            held.append(socket.create_connection((HOST, port)))
            if number % 2:
                held[-1].sendall(MAGIC + bytes(200))

    with caplog.at_level(logging.WARNING):
        transports = ranks(3, during=strangers)
    for one in held:
        one.close()
    x = [torch.full((5,), 1.0 + rank) for rank in range(3)]
    everywhere(transports, lambda t: t.all_reduce(x[t.rank]))
    assert all(one.tolist() == [6.0] * 5 for one in x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "rank 0 refused " in said and "connections of strangers while it joined" in said


def test_nobody_listens_any_more_when_all_have_come(ranks):
    ports = []
    ranks(2, during=ports.append)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, ports[0]))


def test_a_rank_with_another_secret_is_told_to_all():
    zero, one = joined(2, secrets=[SECRET, b"x" * 32])
    assert "rank 1 cannot be connected with the others by TCP" in str(zero)
    assert "it did not reach rank 0 at 127.0.0.1 port" in str(one)
    assert "its secret may be another one" in str(one)
    assert isinstance(zero, UserError) and isinstance(one, UserError)


def test_all_ranks_name_the_first_cause():
    """Each that failed because of another one once wrote its own reason over the true one."""
    (said,) = {str(one) for one in joined(4, secrets=[SECRET, b"x" * 32, SECRET, SECRET])}
    assert said.startswith("rank 1 cannot be connected with the others by TCP: it did not reach ra")


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    with pytest.raises(PeerLost, match=r"^ranks 1, 3 of 4 did not come to be connected, as rank 0"):
        store.set("tcp/2", f'["{HOST}", 1]')
        tcp_transport(store, rank=0, size=4, address=HOST, secret=SECRET, seconds=0.2)


def test_a_rank_that_does_not_call_is_named():
    """It has written where it listens, and then nothing."""
    store = dist.HashStore()
    store.set("tcp/1", f'["{HOST}", 1]')
    with pytest.raises(PeerLost, match=r"^rank 1 of 2 did not come to be connected, as rank 0 saw"):
        tcp_transport(store, rank=0, size=2, address=HOST, secret=SECRET, seconds=0.2)


def test_a_rank_without_a_free_descriptor_is_told():
    """It looked at its door without a pause, and in the end named the others as missing."""
    store, found = dist.HashStore(), []

    def join():
        try:
            tcp_transport(store, rank=0, size=2, address=HOST, secret=SECRET, seconds=60)
        except UserError as error:
            found.append(str(error))

    rank, limits = threading.Thread(target=join), resource.getrlimit(resource.RLIMIT_NOFILE)
    rank.start()
    port = int(store.get("tcp/0").decode().split(",")[1].rstrip("]"))
    with socket.create_connection((HOST, port)):
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            store.set("tcp/1", f'["{HOST}", 1]')
            rank.join()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (told,) = found
    assert told.startswith("rank 0 cannot be connected with the others by TCP: ")
    assert "raise the limit of open files (ulimit -n)" in told


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": 0.5}, {"seconds": float("nan")}])
def test_what_cannot_be_connected_is_refused(wrong):
    how = {"rank": 0, "size": 2, "address": HOST, "secret": SECRET} | wrong
    with pytest.raises(UserError):
        tcp_transport(dist.HashStore(), **how)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_listen_is_told_to_those_that_wait_for_it(who):
    """They waited until the timeout, and then said that it had not come."""
    store, found, threads = dist.HashStore(), {}, []

    def join(rank):
        address = "192.0.2.1" if rank == who else HOST
        try:
            tcp_transport(store, rank=rank, size=3, address=address, secret=SECRET)
        except UserError as error:
            found[rank] = str(error)

    for rank in (*(rank for rank in range(3) if rank != who), who):
        threads.append(threading.Thread(target=join, args=(rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    said = f"rank {who} cannot be connected with the others by TCP: this process cannot listen at"
    assert len(found) == 3 and all(one.startswith(said) for one in found.values())


def test_a_port_in_use_and_an_address_of_another_machine_are_told():
    with listening(HOST) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen at port {port} of 127\.0\.0\.1: Addr"):
            listening(HOST, port)
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1: Cannot assign"):
        listening("192.0.2.1")


def test_an_interface_is_named_or_found():
    assert address_of("lo") == HOST
    assert leading_to(HOST) == HOST and is_loopback(HOST)
    with pytest.raises(UserError, match=r"^comm\.interface: .* has no interface 'lox'; did you"):
        address_of("lox")
    with pytest.raises(UserError, match=r"no way leads from .* to 'no\.such\.host\.invalid'"):
        leading_to("no.such.host.invalid")


# -- what travels


@pytest.mark.parametrize("length", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_segments_are_the_bytes_in_order(length):
    said = memoryview(bytes(range(251)) * (length // 251 + 1))[:length]
    parts = [said[:7], said[7:300], said[300:]]
    found = [*segments(3, 1, parts)]
    assert b"".join(bytes(part) for one in found for part in one.buffers) == said
    assert len(found) == -(-length // SEGMENT)
    assert len({one.fields for one in found}) == len(found)
    first = next(segments(3, 0, parts, b"record"))
    assert first.fields == b"record"


def test_long_messages_cross_and_share_the_lines(ranks):
    """Both ways at once, far more than sockets hold, over every line."""
    transports = ranks(2)
    counts = [6 * SEGMENT + 3, 5 * SEGMENT + 1]
    sent = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in counts]
    heard = [torch.zeros(n, dtype=torch.uint8) for n in reversed(counts)]

    def swap(transport):
        with transport.group():
            transport.send(sent[transport.rank], 1 - transport.rank)
            transport.receive(heard[transport.rank], 1 - transport.rank)

    assert everywhere(transports, swap) == [None, None]
    assert torch.equal(heard[0], sent[1]) and torch.equal(heard[1], sent[0])
    frames = [line._sent for line in transports[0]._lines.by_peer[1]]
    assert len(frames) == LINES and min(frames) >= 3


def test_messages_of_one_segment_keep_their_order_on_one_line(ranks):
    """Over two lines a third of them once waited for what was before them on the slower one."""
    transports, x, heard = ranks(2), torch.arange(6.0), torch.zeros(6)

    def pass_on(transport):
        pieces, other = (x if transport.rank == 0 else heard).split(1), 1 - transport.rank
        sends = transport.rank == 0
        flow = [Task(turn, (), other, (one,), sends) for turn, one in enumerate(pieces)]
        return transport.run("pieces", flow)

    assert everywhere(transports, pass_on) == [24, 0]
    assert torch.equal(heard, x)
    assert [line._sent for line in transports[0]._lines.by_peer[1]] == [6, 0]


# -- damage


class Meddler:
    """A socket of a line, of which one long write is damaged."""

    def __init__(self, sock, how):
        self._sock, self._how, self.done = sock, how, False

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def sendmsg(self, parts):
        said = bytearray(b"".join(parts))
        if self.done or len(said) < 1000:
            return self._sock.sendmsg([said])
        self.done = True
        self._sock.setblocking(True)
        if self._how == "flip":
            said[-1] ^= 0x01
        if self._how == "twice":
            self._sock.sendall(said)
        if self._how in ("cut", "reset"):
            self._sock.sendall(said[: len(said) // 2])
            if self._how == "reset":
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.close()
            raise ConnectionResetError("closed by hand")
        if self._how == "noise":
            said = bytearray(len(said))
        self._sock.sendall(said)
        self._sock.setblocking(False)
        return len(said)


# Rank 1 may have said on another line what it thinks of that.
LINK_DOWN = (
    "^rank 1 (ended, or its link is down|gave up: rank 0 ended, or its link is down, as rank 1 saw)"
    ", as rank 0 saw"
)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("flip", r"the payload of frame \d+ of rank 1 has a wrong checksum"),
        ("twice", r"rank 1 sent a frame of kind 2 with 12 bytes of fields where one of kind 1 was"),
        ("cut", LINK_DOWN),
        ("reset", LINK_DOWN),
        ("noise", r"rank 1 sent b'\\x00\\x00\\x00\\x00' where a frame begins"),
    ],
)
def test_damage_is_told_and_nothing_of_it_is_used(ranks, how, told):
    """Rank 0 names who sent it and its own call, and its tensor is what it was."""
    transports = ranks(2)
    line = transports[1]._lines.by_peer[0][0]
    line.sock = Meddler(line.sock, how)
    x = [torch.randn(10_000), torch.randn(10_000)]
    before = x[0].clone()

    def sums(transport):
        for _ in range(2):
            transport.reduce(x[transport.rank], 0)

    zero, _ = everywhere(transports, sums, lambda t: [t.reduce(x[1], 0) for _ in range(2)])
    assert isinstance(zero, PeerLost)
    assert re.search(told, str(zero)), zero
    assert "this rank called reduce(float32 [10000], sum, root 0) at " in str(zero)
    if how != "twice":
        assert torch.equal(x[0], before)
    with pytest.raises(PeerLost):  # and nothing is possible any more
        transports[0].barrier()


# -- loss


def test_a_rank_that_is_silent_is_named(ranks):
    transports = ranks(2)  # with time to join
    transports[0]._seconds = transports[0]._lines._seconds = 0.3
    with pytest.raises(
        PeerLost, match=r"rank 1 was silent for 0\.3 s, as rank 0 saw; this rank ca"
    ):
        transports[0].barrier()


def test_why_a_rank_gives_up_is_told_to_those_that_wait_for_it(ranks):
    transports = ranks(3)

    def call(transport):
        if transport.rank == 1:
            return transport.abort("no room is left on the disk")
        return transport.all_reduce(torch.ones(5))

    zero, _, two = everywhere(transports, call)
    said = r"^rank 1 gave up: no room is left on the disk, as rank {} saw; this rank called all_red"
    assert re.search(said.format(0), str(zero)), zero
    assert re.search(said.format(2), str(two)), two


def in_a_mesh(transport):
    """What each rank of a mesh says when rank 1 fails."""
    try:
        with connect_mesh(parse_layout("dp2"), transport, torch.device("cpu")) as mesh:
            if mesh.rank:
                raise MemoryError("no memory is left\non this machine")
            mesh.world.all_reduce(torch.ones(5))
    except (MemoryError, PeerLost) as error:
        return str(error)


def test_what_ends_a_mesh_is_told_to_its_other_ranks(workers):
    said = workers.run(in_a_mesh, ranks=2, transport="tcp")
    assert said[0].startswith("rank 1 gave up: no memory is left, as rank 0 saw; this rank called")


def test_a_rank_that_leaves_does_not_disturb_the_others(ranks):
    transports = ranks(3)
    transports[2].close()
    x = torch.ones(3)
    found = everywhere(transports[:2], lambda t: t.send(x, 1), lambda t: t.receive(x, 0))
    assert found == [12, None]
    with pytest.raises(PeerLost, match=r"^rank 2 left the group, as rank 0 saw"):
        transports[0].send(torch.ones(1 << 20), 2)
        transports[0].receive(x, 2)
    with pytest.raises(UserError, match="closed"):
        transports[2].barrier()


def test_a_rank_that_dies_is_told_to_who_waits_for_another(ranks):
    """Rank 0 waits for rank 1, which waits for nobody: rank 2 has nothing to do with it."""
    transports = ranks(3)
    waits = threading.Event()

    def dies(transport):
        waits.wait()
        transport.abort()

    def awaits(transport):
        waits.set()
        transport.receive(torch.ones(3), 1)

    zero, one, _ = everywhere(transports, awaits, lambda t: None, dies)
    assert str(zero).startswith(
        "rank 2 ended, or its link is down, as rank 0 saw; this rank called"
    )
    assert one is None


def test_what_a_rank_has_sent_ahead_does_not_hide_why_it_gave_up(ranks, monkeypatch):
    """Rank 0 waits for rank 1, and has not read what rank 2 had sent on all its lines."""
    monkeypatch.setattr(tcp_lines, "GRACE", 0.0)
    monkeypatch.setattr(tcp_lines, "LOOK", 0.01)
    transports = ranks(3)

    def dies(transport):
        ends = transports[2]._lines.by_peer[0], transports[0]._lines.by_peer[2]
        for mine, theirs in zip(*ends, strict=True):
            mine.sock.send(bytes(100))
            select.select([theirs.sock], [], [])
        transport.abort("its disk is full")

    zero, one, _ = everywhere(
        transports, lambda t: t.receive(torch.ones(3), 1), lambda t: None, dies
    )
    assert str(zero).startswith("rank 2 gave up: its disk is full, as rank 0 saw")
    assert one is None


def test_what_ends_a_call_of_one_rank_alone_is_told_to_the_others(ranks, monkeypatch):
    """They would wait for it until their own timeout."""
    transports = ranks(2)

    def fails(transport):
        def full(*_):
            raise MemoryError("no room")

        monkeypatch.setattr(transport._lines, "pump", full)
        with pytest.raises(MemoryError):
            transport.all_reduce(torch.ones(3))

    zero, _ = everywhere(transports, lambda t: t.all_reduce(torch.ones(3)), fails)
    assert str(zero).startswith("rank 1 gave up: MemoryError: no room, as rank 0 saw")


def test_a_full_connection_has_room_for_a_last_word(ranks):
    """Else who leaves in good order behind a long message is taken for one that died."""
    one, other = ranks(2)
    mine, theirs = one._lines.by_peer[1][0], other._lines.by_peer[0][0]
    with suppress(BlockingIOError):
        while True:
            mine.sock.send(bytes(1 << 20))
    one.close()
    came = b""
    while part := theirs.sock.recv(1 << 20):
        came = (came + part)[-(HEADER.size + RECORD) :]
        select.select([theirs.sock], [], [])
    assert kind_of(came[: HEADER.size]) == BYE


class Turn:
    """A lock that notes that somebody waits for it."""

    def __init__(self):
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_a_last_word_of_another_thread_is_in_no_frame_and_behind_none_of_its_number(ranks):
    """As of a rank that gives up while a thread of it still sends a message."""
    one, other = ranks(2)
    line, theirs = one._lines.by_peer[1][0], other._lines.by_peer[0][0]
    line.turn = turn = Turn()
    line.out.extend(segments(0, 0, [memoryview(bytes(1000))]))
    pump, real = threading.Thread(target=line.send), line.sock

    class Slow:
        """The socket, while another thread sends on it too."""

        def __getattr__(self, name):
            return getattr(real, name)

        def send(self, said):
            pump.start()
            while pump.is_alive() and not turn.awaited.wait(0.001):
                pass
            return real.send(said)

    line.sock = Slow()
    line.farewell(GAVE_UP, "no room is left")
    line.sock = real
    pump.join()
    theirs.sock.setblocking(True)
    came = b""
    while part := theirs.sock.recv(1 << 16):
        came += part
    assert kind_of(came[: HEADER.size]) == GAVE_UP
    assert len(came) == HEADER.size + RECORD


def test_the_reason_of_a_pulse_is_told(ranks):
    transports = ranks(2)
    waiting = threading.Thread(target=lambda: everywhere(transports[:1], record))
    said = []

    def record(transport):
        try:
            transport.barrier()
        except PeerLost as error:
            said.append(str(error))

    waiting.start()
    transports[0].lose("rank 1 has not been heard of for 20 s")
    waiting.join()
    assert said[0].startswith("rank 1 has not been heard of for 20 s; this rank called barrier")


def test_bytes_of_records_are_counted_apart(ranks):
    transports = ranks(2)
    with closing(transports[0]), closing(transports[1]):
        sent = everywhere(transports, lambda t: t.broadcast(torch.ones(7), 0))
        assert sent == [28, 0]
        assert [t.record_bytes for t in transports] == [256, 256]
