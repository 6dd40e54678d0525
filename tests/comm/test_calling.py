"""Who calls the other ranks, and waits for them, hears why they cannot come."""

import itertools
import json
import select
import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm import pulse, rendezvous, watch
from howdah.comm.joining import ALL_CAME, FAILED
from howdah.comm.meeting import own_hello
from howdah.comm.rendezvous import join_through
from howdah.comm.tcp_connect import tcp_transport
from howdah.comm.transport import PeerLost
from howdah.plan.comm import DIRECT, Hosts

SECRET = b"s" * 32
HOST = "127.0.0.1"
TRUST = Hosts(trust="network", interface="lo")


@pytest.fixture(params=["full", "silent"])
def door(request):
    """The address of one who answers nobody: his kernel takes no more calls, or he says nothing."""
    with ExitStack() as held, socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0 if request.param == "full" else 100)
        while request.param == "full":
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            if not select.select([], [one], [], 0.2)[1]:
                break
        yield [*listener.getsockname()]


def calls(door, **how):
    """Rank 1, which calls that door."""
    store = how.pop("store", None) or dist.HashStore()
    for key, word in (("tcp/0", json.dumps(door)), ("tcp/group", "a")):
        store.set(key, word)
    tcp_transport(store, rank=1, size=2, address=HOST, secret=SECRET, **how)


def test_who_calls_in_vain_hears_why_another_rank_cannot_come(door):
    store = dist.HashStore()
    heed = partial(store.set, ALL_CAME, FAILED + "rank 0 has no room")
    with pytest.raises(UserError, match=r"^rank 0 has no room$"):
        calls(door, store=store, heed=heed, seconds=60)


def test_who_calls_in_vain_hears_that_a_rank_is_lost(door):
    looks = iter(range(3))

    def heed():
        if next(looks, None) is None:
            raise PeerLost("rank 0 is stopped")

    with pytest.raises(PeerLost, match="rank 0 is stopped"):
        calls(door, heed=heed, seconds=60)


@pytest.mark.parametrize("door", ["full"], indirect=True)
def test_who_calls_in_vain_waits_as_long_as_he_was_told(door, monkeypatch):
    """By a clock that goes on with each look alone."""
    ticks, looks = itertools.count(), []
    monkeypatch.setattr(watch, "monotonic", lambda: next(ticks) * 0.1)
    with pytest.raises(UserError, match=r"it did not reach rank 0 .*: it did not answer in time"):
        calls(door, heed=lambda: looks.append(1), seconds=1.05)
    assert len(looks) == 11


def test_who_has_chosen_an_interface_calls_from_its_address():
    store, found = dist.HashStore(), {}

    def join(rank):
        how = {"address": HOST, "secret": SECRET, "source": "127.0.0.7" if rank else ""}
        found[rank] = tcp_transport(store, rank=rank, size=2, **how)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(found[0]), closing(found[1]):
        lines = found[0]._lines.by_peer[1]
        assert {line.sock.getpeername()[0] for line in lines} == {"127.0.0.7"}


@pytest.fixture
def met():
    """A store into which rank 1 of two has said who it is, and then nothing."""
    store = dist.HashStore()
    other = replace(own_hello("tcp", algorithms=str(DIRECT)), trust="network")
    store.set("1/hello/1", json.dumps(asdict(other)))
    return store


def test_a_rank_that_is_lost_after_the_meeting_is_named(met, monkeypatch):
    """It was waited for until the timeout, for its pulse was looked for when all were connected."""
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    monkeypatch.setattr(pulse, "SILENT", 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # it answers, however late
    with pytest.raises(PeerLost, match=r"^rank 1 has not been heard of for"):
        join_through(met, 0, 2, "tcp", hosts=TRUST, seconds=60)


def test_a_rank_that_is_not_connected_leaves_no_pulse(met, monkeypatch):
    """And it calls from the address of the interface that was chosen."""
    given = {}

    def refuse(*_, **how):
        given.update(how)
        assert "pulse" in [one.name for one in threading.enumerate()]
        raise UserError("it listens nowhere")

    monkeypatch.setattr(rendezvous, "tcp_transport", refuse)
    with pytest.raises(UserError, match="it listens nowhere"):
        join_through(met, 0, 2, "tcp", hosts=TRUST)
    assert "pulse" not in [one.name for one in threading.enumerate()]
    assert given["source"] == given["address"] == "127.0.0.1"
