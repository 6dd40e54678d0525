"""A slow link is named by the ranks at its ends, once, and a run goes on."""

import socket
from itertools import count

import pytest

from howdah.comm import slow_links
from howdah.comm.slow_links import ENOUGH, SlowLinks

MB = 1e6


@pytest.fixture
def links(monkeypatch):
    """Links of rank 0 to other machines, of which the kernel tells what `told` says, by peer: bytes,
    and bytes/s. Time passes between two looks.
    """
    told, seconds = {}, count(10)
    monkeypatch.setattr(slow_links, "_leaves", lambda sock: sock >= 0)
    monkeypatch.setattr(slow_links, "_delivered", told.get)
    monkeypatch.setattr(slow_links, "monotonic", lambda: next(seconds))

    def made(*peers):
        return SlowLinks(0, {peer: [peer] for peer in peers}), told

    return made


def test_a_link_that_was_never_fast_is_named_once(links):
    slow, told = links(1, 2, 3)
    told |= {1: (ENOUGH, 118 * MB), 2: (ENOUGH, 12 * MB), 3: (ENOUGH, 110 * MB)}
    (sentence,) = slow.look()
    assert sentence.startswith(
        "the link between ranks 0 and 2 has delivered 12 MB/s at most, others of rank 0 114 MB/s: "
    )
    assert slow.look() == []


def test_what_was_fast_once_is_not_slow(links):
    slow, told = links(1, 2, 3)
    told |= {peer: (ENOUGH - 1, 100 * MB) for peer in (1, 2, 3)}
    assert slow.look() == []
    told |= {1: (ENOUGH, 118 * MB), 2: (ENOUGH, 12 * MB), 3: (ENOUGH, 110 * MB)}
    assert slow.look() == []


def test_links_are_compared_when_enough_has_passed(links):
    slow, told = links(1, 2, 3)
    told |= {1: (ENOUGH, 118 * MB), 2: (ENOUGH - 1, 12 * MB), 3: (ENOUGH, 110 * MB)}
    assert slow.look() == []
    told[2] = ENOUGH, 12 * MB
    assert len(slow.look()) == 1


def test_two_others_are_needed_and_a_machine_is_no_link(links):
    for peers in ((1, 2), (1, 2, -3)):
        slow, told = links(*peers)
        told |= {1: (ENOUGH, 118 * MB), 2: (ENOUGH, 12 * MB), -3: (ENOUGH, 4000 * MB)}
        assert slow.look() == []


def test_a_kernel_that_tells_nothing_names_nobody(links):
    slow, _ = links(1, 2, 3)
    assert slow.look() == []


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
        acked, rate = 0, 0.0
        while acked < 1 << 20:  # until the kernel has heard of all of it
            acked, rate = slow_links._delivered(one)
        assert rate > 0
    assert slow_links._delivered(one) is None
