"""Links of the torch transport: who may connect, and how long a broken one goes unnoticed."""

import os
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from shutil import which
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.heartbeat import connections_at, ease, hang_up, keep_alive, open_sockets
from howdah.comm.torch_connect import torch_transport
from howdah.comm.transport import PeerLost

HOST = "127.0.0.1"
OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 4,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 4,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 2,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 12_000,
}


# -- sockets of this process


def options(one):
    return {key: one.getsockopt(*key) for key in OPTIONS}


@pytest.fixture
def pair():
    """Both ends of a TCP connection."""
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def name(one):
    return os.readlink(f"/proc/self/fd/{one.fileno()}")


def test_heartbeats_are_set_on_the_sockets_that_are_named(pair):
    one, other = pair
    before = options(other)
    assert keep_alive({name(one)}) == 1
    assert options(one) == OPTIONS
    assert options(other) == before


def test_connections_of_a_port_are_both_ends_and_no_others(pair):
    """Not those of the program, to a database or a tracker, and none that listen or are local."""
    with (
        socket.create_server((HOST, 0)) as listener,
        socket.create_connection(listener.getsockname()) as strange,
        socket.socket(socket.AF_UNIX) as local,
    ):
        port = pair[0].getpeername()[1]
        assert connections_at(port) == {name(one) for one in pair}
        assert {name(listener), name(strange), name(local)} <= open_sockets().keys()


def test_hanging_up_ends_both_sides_and_leaves_the_sockets_open(pair):
    one, other = pair
    before = open_sockets()
    hang_up({name(one)})
    assert one.recv(1) == other.recv(1) == b""
    assert open_sockets() == before


def limit(one):
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_peer_that_takes_nothing_has_no_limit_until_it_takes_more(pair):
    """It computes, or waits for a third one; its kernel answers."""
    one, other = pair
    keep_alive({name(one), name(other)})
    one.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += one.send(bytes(1 << 20))
    eased = set()
    while not eased:  # until what was sent has been acknowledged
        eased = ease(eased)
    assert eased == {name(one)} and limit(one) == 0 and limit(other) == 12_000
    assert ease(eased) == eased and limit(one) == 0, "it takes nothing still"
    while sent:
        sent -= len(other.recv(min(sent, 1 << 20)))
    assert ease(eased) == set() and limit(one) == 12_000


def test_a_default_timeout_of_the_program_changes_no_socket(pair):
    """As libraries set it: the store's connections would no longer block."""
    before = [os.get_blocking(end.fileno()) for end in pair]
    socket.setdefaulttimeout(5)
    try:
        keep_alive({name(end) for end in pair})
        ease(set())
    finally:
        socket.setdefaulttimeout(None)
    assert [os.get_blocking(end.fileno()) for end in pair] == before == [True, True]


def test_who_looks_no_more_gives_all_limits_back_and_leaves_others_alone(pair):
    one, other = pair
    keep_alive({name(one)})
    for end in pair:
        end.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                end.send(bytes(1 << 20))
    eased = set()
    while not eased:
        eased = ease(eased)
    assert eased == {name(one)}, "the other one never had this limit"
    assert ease(eased, over=True) == set()
    assert limit(one) == 12_000 and limit(other) == 0


# -- the transport


def listening(transport, loopback):
    """Where this process listens, after a transport is made and used; and its heartbeats."""
    store = dist.PrefixStore(str(loopback), transport.among.store)
    known = open_sockets()
    rank, size = transport.rank, transport.size
    made = torch_transport(store, rank=rank, size=size, loopback=loopback)
    x = torch.ones(5)
    made.all_reduce(x)
    own = {one.removeprefix("socket:[").removesuffix("]") for one in open_sockets()}
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(path) as lines:
            rows = [line.split() for line in list(lines)[1:]]
            found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own]
    beating = 0
    for link, number in open_sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            beating += link not in known and options(one) == OPTIONS
    made.barrier()  # whoever leaves earlier takes its links along
    return found, beating, x.tolist()


def test_on_one_machine_nobody_else_can_connect(workers):
    """127.0.0.1 is 0100007F there. Such a link is never down, and has no heartbeats."""
    results = workers.run(listening, True, ranks=3, transport="torch")
    for found, beating, x in results:
        assert found
        assert set(found) == {"0100007F"}
        assert beating == 0
        assert x == [3.0] * 5


def test_links_between_machines_have_heartbeats(workers):
    results = workers.run(listening, False, ranks=3, transport="torch")
    for _, beating, x in results:
        assert beating >= 2  # links; and where it listens
        assert x == [3.0] * 5


def abort(transport):
    """Everybody waits for the next one: 0 for 1, 1 for 2, 2 for 0; rank 0 in a thread. It gives up,
    and so does who is told.
    """
    said = []

    def wait():
        try:
            transport.receive(torch.zeros(1), (transport.rank + 1) % 3)
        except PeerLost as error:
            said.append(str(error))
        transport.abort()

    thread = Thread(target=wait)
    thread.start()
    if transport.rank == 0:
        transport.abort()
    thread.join()
    return said


def test_who_gives_up_ends_the_waits_of_all_threads_and_ranks(workers):
    (zero,), (one,), (two,) = workers.run(abort, ranks=3, transport="torch")
    assert zero.startswith("rank 0 gave up; what it says tells why; this rank called receive(")
    assert one.startswith("rank 2 ended, or its link is down, as rank 1 saw; this rank called rec")
    assert two.startswith("rank 0 ended, or its link is down, as rank 2 saw; this rank called rec")
    assert f"receive(float32 [1], 2 to 1) at {__file__}:" in one


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(
        PeerLost, match=r"^rank 1 of 2 did not come to be connected, as rank 0 saw$"
    ):
        torch_transport(store, rank=0, size=2, seconds=0.1)


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": 0.5}, {"seconds": float("nan")}])
def test_what_cannot_be_connected_is_refused(wrong):
    with pytest.raises(UserError):
        torch_transport(dist.HashStore(), **({"rank": 0, "size": 2} | wrong))


# -- real links

RANK = """
import sys
import torch
import torch.distributed as dist
from howdah.comm.torch_connect import torch_transport
from howdah.comm.transport import PeerLost

rank, case = int(sys.argv[1]), sys.argv[2]
transport = torch_transport(dist.FileStore(sys.argv[3], 2), rank=rank, size=2, seconds=600)
x = torch.ones(300_000)
for _ in range(3):
    transport.all_reduce(x, "mean")
print("going", flush=True)
try:
    while case == "busy":
        transport.all_reduce(x, "mean")
    if rank == 0:
        transport.receive(x, 1)
    sys.stdin.readline()
    transport.barrier()
except PeerLost as error:
    print(error, flush=True)
"""


STOPPED = """
import os
import sys
import torch
from howdah.comm.rendezvous import join
from howdah.comm.transport import PeerLost
from howdah.plan.comm import Hosts

hosts = Hosts(os.environ.get("WIRE", "tcp"), "network")
transport = join(os.environ.get("CARRIER"), hosts=hosts)
try:
    transport.barrier()
    print("going", flush=True)
    if transport.rank == int(os.environ.get("STOPS", "1")):
        sys.stdin.readline()
    transport.barrier()
except PeerLost as error:
    print(error, flush=True)
transport.close()
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def network():
    """Two namespaces, and a switch between them in a third; the names of all."""
    names = [f"howdah{os.getpid()}-{which}" for which in ("0", "1", "switch")]
    try:
        for space in names:
            ip("netns", "add", space)
        switch = names[2]
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for rank, space in enumerate(names[:2]):
            ip("-n", space, "link", "set", "lo", "up")
            peer = ("peer", "name", "wire", "netns", space)
            ip("-n", switch, "link", "add", f"port{rank}", "type", "veth", *peer)
            ip("-n", switch, "link", "set", f"port{rank}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "wire")
            ip("-n", space, "link", "set", "wire", "up")
        yield names
    finally:
        for space in names:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def start(space, script, *words, **environment):
    command = ["ip", "netns", "exec", space, sys.executable, "-c", script, *words]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "wire"} | environment,
    )


def next_line(process, seconds):
    """What a rank says next, if it does."""
    with selectors.DefaultSelector() as looker:
        looker.register(process.stdout, selectors.EVENT_READ)
        assert looker.select(seconds), f"nothing is said within {seconds} s"
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not which("ip"), reason="needs root and ip")
@pytest.mark.parametrize("case", ["busy", "idle"])
def test_a_link_that_goes_down_is_told_to_both_sides(network, tmp_path, case):
    """The switch between them stops; both interfaces stay up, and no kernel says a word.

    Without heartbeats, 600 s are waited for. With them it takes some 12.
    """
    store = str(tmp_path / "store")
    ranks = [start(network[rank], RANK, str(rank), case, store) for rank in range(2)]
    try:
        assert [next_line(process, 100) for process in ranks] == ["going\n"] * 2
        ip("-n", network[2], "link", "set", "bridge", "down")
        for rank, process in enumerate(ranks):
            if case == "idle" and rank == 1:  # what it does next, it does after rank 0 was told
                process.stdin.write("\n")
                process.stdin.flush()
            said = next_line(process, 100)
            assert said.startswith(
                f"rank {1 - rank} ended, or its link is down, as rank {rank} saw"
            )
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


SAID = {  # by who is stopped, what the other rank says
    0: "rank 0, which keeps the store of the run, has not answered for 20 s, as rank 1 saw: it is",
    1: "rank 1 has not been heard of for 20 s, as rank 0 saw: it is stopped",
}


def stop_one(ranks, stopped=1):
    """Stops one of two ranks, which the other must be told, and ends both."""
    try:
        assert [next_line(process, 100) for process in ranks] == ["going\n"] * 2
        ranks[stopped].send_signal(signal.SIGSTOP)
        other = ranks[1 - stopped]
        said = next_line(other, 100)
        assert said.startswith(SAID[stopped])
        assert other.wait(100) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not which("ip"), reason="needs root and ip")
@pytest.mark.parametrize("wire", ["tcp", "gloo"])
def test_a_rank_that_is_stopped_is_told_to_the_other_machine(network, wire):
    """Its kernel goes on answering: only its pulse is missing, for some 20 s."""
    where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "WIRE": wire}
    ranks = [start(network[rank], STOPPED, RANK=str(rank), **where) for rank in range(2)]
    stop_one(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("carrier", ["tcp", "torch"])
def test_a_rank_that_is_stopped_is_told_on_one_machine_too(carrier, stopped):
    """Without the engine, and without a launcher of ours, nothing else looks at it. Rank 0 keeps
    the store, in which the others would be told: each finds out for itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"} | {
        "CARRIER": carrier,
        "STOPS": str(stopped),
    }
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", STOPPED]
    ranks = [
        subprocess.Popen(command, env=os.environ | where | {"RANK": str(rank)}, **streams)
        for rank in range(2)
    ]
    stop_one(ranks, stopped)
