"""Rendezvous: all ranks choose the same transport, and who does not come is named."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from socket import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.base.signals import Stopped, listen
from howdah.comm import connect, meeting, rendezvous
from howdah.comm.agreement import agree, wires_of
from howdah.comm.engine import RANKS
from howdah.comm.meeting import Hello, meet, own_hello
from howdah.comm.rendezvous import choose
from howdah.comm.tcp import TcpTransport
from howdah.plan.recording import Wires

HERE, THERE = Hello("a", 1, secret=True), Hello("b", 1, host="b", secret=True)
BARE = replace(HERE, why_not="there is no C compiler")
OPEN = replace(HERE, secret=False)
GLOO = [replace(one, wire="gloo", trust="network") for one in (HERE, THERE)]
TRUSTING = [replace(one, secret=False, trust="network") for one in (HERE, THERE)]


def free_port():
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def wishing(wanted, hello=HERE):
    return replace(hello, wanted=wanted)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ([HERE, HERE], "engine", ""),
        ([HERE, THERE], "tcp", ""),
        (GLOO, "torch", ""),
        (TRUSTING, "tcp", ""),
        ([wishing("tcp")] * 2, "tcp", ""),
        ([BARE, THERE], "tcp", "no C compiler; until then TCP carries all messages"),
        ([HERE, BARE], "tcp", "no C compiler; until then TCP carries all messages"),
        (
            [OPEN, replace(BARE, secret=False)],
            "torch",
            "no C compiler; until then messages go through gloo, which is slower, and on one",
        ),
        ([replace(one, wire="gloo") for one in (HERE, BARE)], "torch", "messages go through gloo"),
        ([wishing("torch")] * 2, "torch", ""),
        ([wishing("engine")] * 2, "engine", ""),
        ([HERE] * RANKS, "engine", ""),
        (
            [OPEN] * (RANKS + 1),
            "torch",
            "64 ranks of a machine, not 65: start fewer; until then messages go",
        ),
        ([wishing("torch")] * (RANKS + 1), "torch", ""),
        ([HERE] * RANKS + [THERE], "tcp", ""),
    ],
)
def test_what_the_ranks_agree_on(words, kind, said):
    found, why = agree(words)
    assert found == kind
    assert said in why and bool(said) == bool(why)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([wishing("torch"), HERE], "rank 0 asks for torch and rank 1 for the best transport"),
        ([wishing("engine"), wishing("engine", THERE)], "rank 1 shares no memory with rank 0"),
        ([wishing("engine"), wishing("engine", BARE)], "no C compiler; or take transport=torch"),
        (
            [wishing("engine")] * (RANKS + 1),
            "64 ranks of a machine, not 65: start fewer; or take",
        ),
        ([HERE, GLOO[1]], "rank 0 has comm.wire=tcp and comm.trust=secret, and rank 1 gloo and"),
        (
            [HERE, replace(THERE, secret=False)],
            "rank 0 on  has a secret .*, and rank 1 on b has none",
        ),
        (
            [replace(HERE, secret=False), THERE],
            "rank 1 on b has a secret .*, and rank 0 on  has none",
        ),
        (
            [replace(one, secret=False) for one in (HERE, THERE)],
            "several machines join by a secret",
        ),
        ([replace(wishing("tcp"), secret=False)] * 2, "join by a secret"),
        ([replace(one, wire="gloo") for one in (HERE, THERE)], "gloo lets anybody join"),
        ([wishing("torch"), wishing("torch", THERE)], "gloo lets anybody join"),
        (
            [HERE, replace(BARE, secret=False)],
            "rank 0 on  has a secret .*, and rank 1 on  has none",
        ),
        ([HERE, replace(THERE, problem="it has no eth9")], "rank 1 on b: it has no eth9"),
    ],
)
def test_what_the_ranks_cannot_agree_on(words, sentence):
    with pytest.raises(UserError, match=sentence):
        agree(words)


@pytest.mark.parametrize(
    ("words", "wires"),
    [
        ([HERE, HERE], Wires("shared", "tcp", nodes=(0, 0))),
        ([THERE, HERE, THERE], Wires("shared", "tcp", nodes=(0, 1, 0))),
        ([BARE, HERE], Wires("tcp", "tcp", nodes=(0, 0))),
        ([wishing("torch")] * 2, Wires("tcp", "tcp", nodes=(0, 0))),
        ([wishing("tcp")] * 2, Wires("tcp", "tcp", nodes=(0, 0))),
    ],
)
def test_what_carries_the_messages_of_some_ranks(words, wires):
    assert wires_of(words) == wires


@pytest.fixture
def store():
    return dist.HashStore()


def test_who_does_not_come_is_named(store):
    """What has been said is there already, so however short it waits, only others are named."""
    store.set("hello/2", "a\n7\n\n")
    with pytest.raises(UserError, match=r"^ranks 1, 3 of 4 did not come within 0\.2 s: "):
        meet(store, HERE, rank=0, size=4, seconds=0.2)
    store.set("hello/3", "a\n7\n\n")
    with pytest.raises(UserError, match=r"^rank 1 of 4 did not come"):
        meet(store, HERE, rank=0, size=4, seconds=0.2)


def test_what_a_stranger_writes_in_place_of_a_rank_is_refused(store):
    """He reaches torchrun's store, which asks for no proof, and would have all take gloo."""

    def forge():
        for rank, hello in enumerate(GLOO):
            store.set(f"hello/{rank}", json.dumps(asdict(replace(hello, secret=False))))

    with pytest.raises(UserError, match="another process speaks as rank 0 in the store"):
        meet(store, HERE, rank=0, size=2, seconds=600, heed=forge)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_hello_of_others_takes_the_proof_from_a_rank(rank):
    """Whatever they say, of machines and of compilers, it is refused, or the proof is asked."""
    own = replace(HERE, host="mine")
    for forged in (replace(one, host="", **lie) for one in (HERE, BARE, THERE) for lie in LIES):
        words = [own, forged] if rank == 0 else [forged, own]
        with suppress(UserError):
            assert agree(words, rank)[0] in ("engine", "tcp"), forged


LIES = ({}, {"secret": False}, {"wire": "gloo"}, {"trust": "network"}, {"wanted": "torch"})
LIES += ({"wire": "gloo", "trust": "network", "secret": False},)


def test_ranks_without_the_engine_ask_for_the_proof_in_all_their_groups(store, monkeypatch):
    """Those of one machine, as all say: gloo would dial what a stranger has written."""
    bare = replace(own_hello("torch"), wanted="", why_not="there is no C compiler")
    monkeypatch.setattr(
        rendezvous, "own_hello", lambda wanted, *_: replace(bare, wanted=wanted or "")
    )
    found = {}

    def join(rank):
        with (
            closing(choose(store, rank=rank, size=2, secret=b"s" * 32)) as whole,
            closing(whole.among([0, 1])) as part,
        ):
            found[rank] = type(whole), type(part)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: (TcpTransport,) * 2, 1: (TcpTransport,) * 2}


def test_who_does_not_come_is_named_alike_by_all_that_wait(store, monkeypatch):
    """Whoever waits longer would be left without the store, and with a sentence about that."""
    monkeypatch.setattr(meeting, "LAST", 600)
    told = []

    def wait():
        with pytest.raises(UserError) as error:
            choose(store, rank=1, size=3, seconds=600)
        told.append(str(error.value))

    other = threading.Thread(target=wait)
    other.start()
    store.get("hello/1")
    with pytest.raises(UserError, match=r"^rank 2 of 3 did not come within 0\.2 s: "):
        choose(store, rank=0, size=3, seconds=0.2)
    assert store.check(["parted/1"]), "rank 0 stays until it has read"
    other.join()
    assert told[0].startswith("rank 2 of 3 did not come")


def test_who_does_not_come_is_named_without_a_launcher_of_torch(monkeypatch):
    """Torch's own wait told of 1 client of 3, and the others that rank 0 had gone."""
    words = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, word in words.items():
        monkeypatch.setenv(name, word)
    with pytest.raises(UserError, match=r"^ranks 1, 2 of 3 did not come within 1 s: start as many"):
        connect("torch", seconds=1)


@contextmanager
def stopped_while(waits, release=lambda: None):
    """Sends a stop signal when `waits` returns, and expects that it ends the block before `release`
    does.
    """
    ended, late = threading.Event(), []

    def stop():
        waits()
        os.kill(os.getpid(), signal.SIGTERM)
        late.append(not ended.wait(10))
        release()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped), listen():
        yield
    ended.set()
    thread.join()
    assert late == [False]


def test_a_stop_signal_ends_the_wait_for_the_other_ranks():
    """Torch waits in C++: ranks that a launcher had told to stop stayed until it killed them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with stopped_while(partial(store.clone().get, "hello/0")):
        meet(store, HERE, rank=0, size=2, seconds=15)


def test_a_stop_signal_ends_the_wait_for_the_launchers_store(monkeypatch):
    """As of a rank that another launcher than torchrun has started, and whose store is not there
    yet.
    """
    words = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()

        def called():
            mute.accept()[0].close()

        for name, word in {**words, "MASTER_PORT": str(mute.getsockname()[1])}.items():
            monkeypatch.setenv(name, word)
        with stopped_while(called, mute.close):
            connect(seconds=15)


def test_an_unknown_transport_is_refused(store):
    with pytest.raises(UserError, match="no transport 'gloo'; known are: engine, mpi, nccl"):
        choose(store, rank=0, size=2, transport="gloo")


def test_without_a_launcher_it_is_said_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="start with torchrun"):
        connect()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("word", [None, "", "0x"])
def test_a_variable_that_is_missing_or_nonsense_is_told(monkeypatch, name, word):
    words = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for each, value in (words | {name: word}).items():
        monkeypatch.delenv(each, raising=False)
        if value is not None:
            monkeypatch.setenv(each, value)
    if (name, word) == ("MASTER_ADDR", "0x"):  # it may be a name
        return
    with pytest.raises(UserError, match="start with torchrun"):
        connect(seconds=1)


def test_a_port_in_use_is_told(monkeypatch):
    """It was torch's own sentence, with the number of the error."""
    with socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = str(other.getsockname()[1])
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"^port {port}, .* is in use on the first machine"):
            connect(seconds=60)


def alone(kinds):
    """As in a program of one's own: every call of the group, on each kind in turn."""
    found = []
    for kind in kinds:
        group = connect(transport=kind, seconds=600)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        x = torch.full((3, 2), rank + 1.0)
        group.all_reduce(x)
        part, whole = torch.empty(2, 2), torch.empty(4, 2)
        group.reduce_scatter(part, torch.arange(8.0).view(4, 2))
        group.all_gather(whole, part, async_op=True).result()
        turned = torch.empty(4)
        group.all_to_all(turned, 10.0 * rank + torch.arange(4.0))
        group.broadcast(part, 1)
        group.barrier()
        group.close()
        found.append([t.numpy() for t in (x, whole, turned, part)])
    return rank, size, found


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_meeting import alone, np
rank, size, found = alone(["engine", "torch", "tcp", None])
np.savez({folder!r} + f"/{{rank}} of {{size}}.npz", *[array for each in found for array in each])
"""


@pytest.mark.slow
def test_a_launched_program_connects_by_itself(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(b"s" * 32)
    env = os.environ | {"HOWDAH_SECRET_FILE": str(secret)}
    subprocess.run([sys.executable, *torchrun, program], check=True, capture_output=True, env=env)
    for rank in range(2):
        with np.load(tmp_path / f"{rank} of 2.npz") as found:
            arrays = [found[f"arr_{number}"] for number in range(16)]
        for summed, gathered, turned, cast in zip(*[iter(arrays)] * 4, strict=True):
            np.testing.assert_array_equal(summed, np.full((3, 2), 3.0))
            np.testing.assert_array_equal(gathered, 2 * np.arange(8.0).reshape(4, 2))
            np.testing.assert_array_equal(turned, [2 * rank + n for n in (0, 1, 10, 11)])
            np.testing.assert_array_equal(cast, [[8, 10], [12, 14]])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["interface", "secret"])
def test_a_mistake_of_one_rank_is_told_to_all(tmp_path, mistake):
    """The others waited for it until their timeout."""
    program = (
        "import sys; from howdah.comm import connect; from howdah.plan.comm import Hosts\n"
        "try: connect(hosts=Hosts(interface=sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    open_to_all = tmp_path / "secret"
    open_to_all.write_bytes(b"s" * 32)
    open_to_all.chmod(0o644)
    ranks, port = [], free_port()
    for rank in range(2):
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        env |= {"HOWDAH_SECRET_FILE": str(open_to_all)} if rank and mistake == "secret" else {}
        name = "eth99" if rank and mistake == "interface" else ""
        command = [sys.executable, "-c", program, name]
        ranks.append(
            subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)
        )
    told = [one.communicate(timeout=120)[0] for one in ranks]
    assert told[0] == told[1]
    assert told[0].startswith("rank 1 on ")
    assert ("'eth99'" if mistake == "interface" else "has mode 0644") in told[0]


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            {"machine": "b", "host": "far", "version": "0.0"},
            "rank 1 on far runs howdah 0.0 and",
        ),
        ({"machine": "b"}, "rank 1 on another machine runs howdah of another age and rank 0 on "),
        ({"machine": "b", "host": "far", "version": "0.0", "new": 1}, "install one version on all"),
    ],
)
def test_a_machine_with_another_howdah_is_named(theirs, told):
    """Before its other fields are read, of which a later version may have more."""
    store = dist.HashStore()
    store.set("hello/1", json.dumps(theirs))
    with pytest.raises(UserError, match=told):
        meet(store, own_hello("torch"), rank=0, size=2, seconds=600)


def test_ranks_of_one_machine_are_of_one_howdah():
    """Whose source may be edited between the starts of two ranks."""
    store, mine = dist.HashStore(), own_hello("torch")
    store.set("hello/1", json.dumps(asdict(replace(mine, version="0.0"))))
    assert [one.version for one in meet(store, mine, rank=0, size=2, seconds=600)][1] == "0.0"
