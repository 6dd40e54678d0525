"""A slow link is named by the ranks at its ends, once, and a run goes on."""

import socket
from itertools import count

import pytest

from howdah.comm import slow_links
from howdah.comm.slow_links import ENOUGH, SlowLinks

MB = 1e6


@pytest.fixture
def links(monkeypatch):
    """Links of rank 0 to other machines, of which the kernel tells what `told` says, by peer:
    bytes, and seconds. Time passes between two looks.
    """
    told, seconds = {}, count(10)
    monkeypatch.setattr(slow_links, "_leaves", lambda sock: sock >= 0)
    monkeypatch.setattr(slow_links, "_delivered", lambda sock: told.get(sock, (0, 0.0)))
    monkeypatch.setattr(slow_links, "monotonic", lambda: next(seconds))

    def made(*peers):
        return SlowLinks(0, {peer: [peer] for peer in peers}), told

    return made


def at(rate, size=ENOUGH):
    """What the kernel tells of a link that has delivered so many bytes at a rate."""
    return size, size / rate


LONG = {1: ENOUGH, 2: ENOUGH, 3: ENOUGH, -3: ENOUGH}


def test_a_slow_link_is_named_once(links):
    slow, told = links(1, 2, 3)
    told |= {1: at(118 * MB), 2: at(12 * MB), 3: at(110 * MB)}
    (sentence,) = slow.look(LONG)
    assert sentence.startswith(
        "the link from rank 0 to rank 2 delivers 12 MB/s, others of rank 0 114 MB/s: "
    )
    assert slow.look(LONG) == []


def test_links_are_compared_when_enough_has_passed_in_long_messages(links):
    slow, told = links(1, 2, 3)
    told |= {1: at(118 * MB), 2: at(12 * MB), 3: at(110 * MB)}
    assert slow.look(LONG | {2: ENOUGH - 1}) == []
    told[2] = at(12 * MB, 2 * ENOUGH)  # half of it in short ones, which wait
    assert slow.look(LONG) == []
    assert len(slow.look(LONG | {2: 2 * ENOUGH})) == 1


def test_two_others_are_needed_and_a_machine_is_no_link(links):
    for peers in ((1, 2), (1, 2, -3)):
        slow, told = links(*peers)
        told |= {1: at(118 * MB), 2: at(12 * MB), -3: at(4000 * MB)}
        assert slow.look(LONG) == []


def test_a_kernel_that_tells_nothing_names_nobody(links):
    slow, _ = links(1, 2, 3)
    assert slow.look(LONG) == []


def test_the_kernel_tells_what_was_delivered():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        assert not slow_links._leaves(one), "both ends are of this machine"
        one.sendall(bytes(1 << 20))
        left = 1 << 20
        while left:
            left -= len(other.recv(left))
        acked, seconds = 0, 0.0
        while acked < 1 << 20:  # until the kernel has heard of all of it
            acked, seconds = slow_links._delivered(one)
        assert 0 <= seconds < 60
    assert slow_links._delivered(one) == (0, 0.0)
