"""Who is named when several connections end: the rank that has ended first, for the others have
only lost it. Turns make that needed: a rank reads from one peer at a time.
"""

import os
import socket
from contextlib import ExitStack

import pytest

from howdah.comm import frames, tcp_lines
from howdah.comm.frames import FrameError
from howdah.comm.segments import CALL, PART, TAG, Segment
from howdah.comm.signature import RECORD
from howdah.comm.tcp_line import Lost
from howdah.comm.tcp_lines import Lines

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


@pytest.fixture
def twice():
    """The lines of rank 0 with ranks 1 and 2, two with each, and their other ends."""
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(4)]
        (one, other), ends = (pairs[:2], pairs[2:]), [end for _, end in pairs]
        lines = Lines({1: [a for a, _ in one], 2: [a for a, _ in other]}, seconds=30)
        yield lines, ends[:2], ends[2:]


def test_what_a_rank_says_on_another_line_counts_more_than_the_end_of_one(twice):
    """Rank 2 was in the middle of a frame on its first line, and could say why on its second."""
    lines, _, ends = twice
    lines.expect(2, [Segment(PART, FIELDS, [memoryview(bytearray(1000))])])
    in_a_frame(ends[0])
    ends[0].close()
    Lines({0: [ends[1]]}, seconds=30).give_up("rank 7 ended")
    with pytest.raises(Lost, match="rank 2 gave up: rank 7 ended"):
        lines.pump()


def test_what_a_rank_has_said_is_read_where_nothing_can_be_sent_to_it(twice, monkeypatch):
    monkeypatch.setattr(tcp_lines, "GRACE", 0.0)
    monkeypatch.setattr(tcp_lines, "LOOK", 0.01)
    lines, ends, _ = twice
    Lines({0: ends}, seconds=30).give_up("rank 7 ended")
    for end in ends:
        end.close()
    lines.post(1, [Segment(PART, FIELDS, [memoryview(bytes(1000))])])
    lines.expect(2, [Segment(PART, FIELDS, [memoryview(bytearray(1000))])])
    with pytest.raises(Lost, match="rank 1 gave up: rank 7 ended"):
        lines.pump()
    assert lines.by_peer[1][0].failed


def test_a_short_frame_of_another_kind_is_refused_before_more_of_it_is_waited_for(peers):
    lines, one, _ = peers
    line = lines.by_peer[1][0]
    line.due.append(Segment(CALL, bytes(RECORD)))
    head, _ = frames.pack(PART, FIELDS, [memoryview(bytes(10))], number=0)
    one.sendall(head + bytes(10))
    with pytest.raises(FrameError, match="where one of kind"):
        while True:  # until all of it has come
            line.receive()


def test_a_child_that_was_forked_does_not_keep_connections_open(peers):
    """As workers that load data, which live on when their rank is killed."""
    lines, one, _ = peers
    held, told = os.pipe()
    child = os.fork()
    if not child:  # waits until its parent has seen the end
        os.close(told)
        os.read(held, 1)
        os._exit(0)
    try:
        for line in lines.by_peer[1]:
            line.close_here()
        one.settimeout(30)
        assert one.recv(1) == b""
    finally:
        os.close(told)
        os.close(held)
        os.waitpid(child, 0)
