"""The table of what was sent: calls, bytes and seconds add up row by row."""

from howdah.comm.counters import Counters, add
from howdah.plan.recording import Traffic

SUMS = Traffic("dp", "reduce_scatter", "tcp")
COPIES = Traffic("dp", "all_gather", "tcp")


def test_rows_add_up_by_name():
    counters = Counters()
    table = counters.table()
    add(table, {SUMS: 100}, 0.5)
    add(table, {SUMS: 20}, 0.25)
    add(table, {COPIES: 7}, 1.0)
    assert counters.calls == {SUMS: 2, COPIES: 1}
    assert counters.sent() == {SUMS: 120, COPIES: 7}
    assert counters.seconds == {SUMS: 0.75, COPIES: 1.0}


def test_rows_that_sent_nothing_are_left_out():
    counters = Counters()
    table = counters.table()
    add(table, {SUMS: 0}, 0.5)
    assert counters.sent() == {}
    assert counters.calls == {SUMS: 1}


def test_what_was_told_does_not_change_later():
    counters = Counters()
    table = counters.table()
    add(table, {SUMS: 1}, 0.0)
    before = counters.sent()
    add(table, {SUMS: 1}, 0.0)
    assert (before, counters.sent()) == ({SUMS: 1}, {SUMS: 2})


def test_two_processes_do_not_share_a_table():
    first, second = Counters(), Counters()
    add(first.table(), {SUMS: 1}, 0.0)
    assert second.sent() == {}


def test_a_call_of_several_rows_shares_its_seconds_by_bytes():
    counters = Counters()
    table = counters.table()
    add(table, {SUMS: 30, COPIES: 10}, 2.0)
    add(table, {SUMS: 0, COPIES: 0}, 1.0)
    assert counters.seconds == {SUMS: 2.0, COPIES: 1.0}
    assert counters.calls == {SUMS: 2, COPIES: 2}


def test_what_is_sent_aside_is_not_counted():
    counters = Counters()
    table = counters.table()
    add(table, {SUMS: 5}, 1.0)
    with counters.aside():
        add(table, {SUMS: 7, COPIES: 1}, 1.0)
        add(counters.table(), {SUMS: 2}, 1.0)  # of a group that comes meanwhile
        assert counters.sent() == {SUMS: 14, COPIES: 1}
    assert counters.sent() == {SUMS: 5} and counters.calls == {SUMS: 1}
    add(table, {SUMS: 5}, 1.0)
    assert counters.sent() == {SUMS: 10}
