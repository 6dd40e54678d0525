"""The store of one machine's ranks: torch's interface, without a port or a file."""

import socket
from datetime import timedelta
from select import select
from threading import Thread

import pytest
import torch.distributed as dist

from howdah.comm.local_store import LARGEST, LENGTH, Line, LocalStore, Table, pack, unpack


@pytest.fixture
def stores():
    """Two stores of one table, which a thread serves as the fork server does."""
    table, pairs = Table(), [socket.socketpair() for _ in range(2)]

    def serve():
        lines = {far: Line(far) for _, far in pairs}
        while lines:
            for far in select(lines, [], [], table.soonest())[0]:
                try:
                    table.serve(lines[far])
                except (OSError, ValueError):
                    del lines[far]
            table.look()

    thread = Thread(target=serve)
    thread.start()
    yield [LocalStore(near) for near, _ in pairs]
    for near, _ in pairs:
        near.shutdown(socket.SHUT_RDWR)
    thread.join()
    for near, far in pairs:
        near.close()
        far.close()


def test_values_numbers_and_keys(stores):
    a, b = stores
    a.set("k", b"\x00one\xff")
    assert b.get("k") == b"\x00one\xff"
    assert (a.add("n", 3), b.add("n", -1)) == (3, 2)
    assert b.check(["k", "n"]) and not b.check(["k", "other"])
    assert b.compare_set("k", "wrong", "two") == b"\x00one\xff"
    assert b.compare_set("k", b"\x00one\xff", "two") == a.get("k") == b"two"
    assert b.compare_set("new", "", "first") == b"first"
    assert a.num_keys() == 3
    assert a.delete_key("k") and not a.delete_key("k")


def test_it_serves_as_any_other_store_of_torch(stores):
    a, b = (dist.PrefixStore("here", dist.PrefixStore("there", store)) for store in stores)
    a.set("k", "v")
    assert b.get("k") == b"v"
    assert stores[1].get("there/here/k") == b"v"


def test_a_thread_that_waits_keeps_no_other_from_asking(stores):
    """The watcher was blind while a later group met."""
    a, b = stores
    a.set("there", "")
    waiters = [Thread(target=a.wait, args=([f"x{n}"],)) for n in range(3)]
    for waiter in waiters:
        waiter.start()
    asked = []
    other = Thread(target=lambda: asked.extend(a.check(["there"]) for _ in range(5)), daemon=True)
    other.start()
    other.join(60)
    blind = other.is_alive()
    for n in reversed(range(3)):
        (b if blind else a).set(f"x{n}", "")
    for waiter in waiters:
        waiter.join()
    assert asked == [True] * 5 and not blind


def test_a_wait_ends_with_the_last_key_or_with_its_time(stores):
    a, b = stores
    waiter = Thread(target=lambda: a.wait(["x", "y"]))
    waiter.start()
    b.set("x", "1")
    b.set("y", "2")
    waiter.join()
    with pytest.raises(RuntimeError, match=r"wait timeout after .* keys: never"):
        a.wait(["never"], timedelta(seconds=0.01))


def test_when_the_keeper_ends_everybody_is_told():
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises((RuntimeError, OSError)):
        LocalStore(near).get("k")


def test_an_answer_to_a_question_that_was_given_up_is_passed_over():
    """A signal may break off a question after it was sent."""
    near, far = socket.socketpair()
    with near, far:
        store = LocalStore(near)
        far.sendall(pack(0, [b"late"]) + pack(1, [b"1"]))
        assert store.check(["k"])


def test_frames_are_what_they_say():
    assert unpack(pack(7, [b"a", b"", b"\x00"])[LENGTH.size :]) == (7, [b"a", b"", b"\x00"])
    with pytest.raises(ValueError, match="longer than its frame"):
        unpack(LENGTH.pack(1) + LENGTH.pack(5) + b"abc")


@pytest.mark.parametrize(
    "said",
    [LENGTH.pack(LARGEST + 1), pack(1, [b"open", b"sesame"]), pack(1, [b"add", b"k", b"x"]), b""],
    ids=["too long", "unknown", "no number", "nothing"],
)
def test_a_rank_that_talks_nonsense_is_let_go(said):
    near, far = socket.socketpair()
    near.sendall(said)
    near.close()
    with far, pytest.raises((ValueError, OSError)):
        Table().serve(Line(far))
