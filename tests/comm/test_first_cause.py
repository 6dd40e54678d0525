"""Who is named when several connections end: the rank that has ended first, for the others have
only lost it. Turns make that needed: a rank reads from one peer at a time.
"""

import socket
from contextlib import ExitStack

import pytest

from howdah.comm import frames
from howdah.comm.segments import PART, TAG, Segment
from howdah.comm.tcp_lines import Lines, Lost

FIELDS = TAG.pack(1, 0, 0)


@pytest.fixture
def peers():
    """The lines of rank 0, and the other ends of those with ranks 1 and 2."""
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(2)]
        lines = Lines({1: [pairs[0][0]], 2: [pairs[1][0]]}, seconds=30)
        lines.expect(2, [Segment(PART, FIELDS, [memoryview(bytearray(1000))])])
        yield lines, pairs[0][1], pairs[1][1]


def in_a_frame(sock):
    """Sends half of the frame that is due."""
    head, _ = frames.pack(PART, FIELDS, [memoryview(bytes(1000))], number=0)
    sock.sendall(head + bytes(500))


@pytest.mark.parametrize("noted", [True, False])
def test_a_rank_that_has_lost_another_in_the_middle_of_a_frame_is_not_the_cause(peers, noted):
    lines, one, other = peers
    in_a_frame(other)
    one.close()
    if noted:  # before the other one ends; else both are found at once
        lines.pump(lambda: lines.by_peer[1][0].left)
    other.close()
    with pytest.raises(Lost, match="rank 1 ended, or its link is down"):
        lines.pump()


def test_what_an_ended_rank_has_sent_for_later_does_not_hide_it(peers):
    lines, one, other = peers
    in_a_frame(other)
    one.sendall(bytes(5000))
    one.close()
    other.close()
    with pytest.raises(Lost, match="rank 1 ended, or its link is down"):
        lines.pump()


def test_what_another_rank_has_said_counts_most(peers):
    lines, one, other = peers
    in_a_frame(other)
    in_a_frame(one)
    one.sendall(bytes(500))
    Lines({0: [one]}, seconds=30).give_up("rank 7 ended")
    other.close()
    with pytest.raises(Lost, match="rank 1 gave up: rank 7 ended"):
        lines.pump()


def test_alone_it_is(peers):
    lines, _, other = peers
    in_a_frame(other)
    other.close()
    with pytest.raises(Lost, match="rank 2 ended, or its link is down"):
        lines.pump()


def test_a_rank_that_has_left_in_good_order_is_not_the_cause(peers):
    lines, one, other = peers
    in_a_frame(other)
    leaving = Lines({0: [one]}, seconds=30)
    leaving.close(farewell=True)
    other.close()
    with pytest.raises(Lost, match="rank 2 ended"):
        lines.pump()
