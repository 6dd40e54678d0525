"""The table of what was sent: calls, bytes and seconds add up row by row."""

from howdah.comm.counters import Counters
from howdah.sim.traffic import Traffic

SUMS = Traffic("dp", "reduce_scatter", "tcp")
COPIES = Traffic("dp", "all_gather", "tcp")


def test_rows_add_up_by_name():
    counters = Counters()
    counters.add({SUMS: 100}, 0.5)
    counters.add({SUMS: 20}, 0.25)
    counters.add({COPIES: 7}, 1.0)
    assert counters.calls == {SUMS: 2, COPIES: 1}
    assert counters.sent() == {SUMS: 120, COPIES: 7}
    assert counters.seconds == {SUMS: 0.75, COPIES: 1.0}


def test_rows_that_sent_nothing_are_left_out():
    counters = Counters()
    counters.add({SUMS: 0}, 0.5)
    assert counters.sent() == {}
    assert counters.calls == {SUMS: 1}


def test_what_was_told_does_not_change_later():
    counters = Counters()
    counters.add({SUMS: 1}, 0.0)
    before = counters.sent()
    counters.add({SUMS: 1}, 0.0)
    assert (before, counters.sent()) == ({SUMS: 1}, {SUMS: 2})


def test_two_processes_do_not_share_a_table():
    first, second = Counters(), Counters()
    first.add({SUMS: 1}, 0.0)
    assert second.sent() == {}


def test_a_call_of_several_rows_shares_its_seconds_by_bytes():
    counters = Counters()
    counters.add({SUMS: 30, COPIES: 10}, 2.0)
    counters.add({SUMS: 0, COPIES: 0}, 1.0)
    assert counters.seconds == {SUMS: 2.0, COPIES: 1.0}
    assert counters.calls == {SUMS: 2, COPIES: 2}
