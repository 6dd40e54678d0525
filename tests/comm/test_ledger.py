"""Ledgers: calls are counted, compared, and tell who is behind."""

import pytest

from howdah.comm.ledger import KEPT, Ledger, behind, check_equal
from howdah.comm.signature import Disagreement


def ledger(*calls):
    made = Ledger()
    for call in calls:
        made.note(call, "net.py:7")
    return made


def test_equal_calls_in_an_equal_order_agree():
    check_equal([ledger("a()", "b()").entry for _ in range(3)])


@pytest.mark.parametrize("other", [["b()", "a()"], ["a()"], ["a()", "c()"], []])
def test_other_calls_do_not(other):
    with pytest.raises(Disagreement, match=r"rank 0 made 2 calls, the last #2 b\(\) at"):
        check_equal([ledger("a()", "b()").entry, ledger(*other).entry])


def test_messages_of_a_pair_are_kept_and_not_compared():
    one, other = ledger("a()"), ledger("a()")
    one.note("send(float32 [3])", "own.py:1", pair=2)
    check_equal([one.entry, other.entry])
    assert one.last == "send(float32 [3]) with rank 2 at own.py:1"


def test_the_last_calls_are_kept():
    made = ledger(*(f"call{n}()" for n in range(KEPT + 5)))
    assert len(made.kept) == KEPT and made.kept[-1] == made.last
    assert made.last == f"#{KEPT + 5} call{KEPT + 4}() at net.py:7"


def test_who_is_behind_is_named_with_the_call():
    entries = {4: ledger("a()", "b()").entry, 5: ledger("a()").entry}
    assert behind(entries) == "rank 5 has not made the call #2 b() at net.py:7 of rank 4"
    entries[6] = ledger().entry
    assert behind(entries).startswith("ranks 5, 6 have not made")
    assert not behind({4: entries[4]})
