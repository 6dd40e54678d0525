"""Signatures: what a record keeps of a call, which calls look alike in it, and how they are told
apart all the same.

Ranks that disagree, through the transports: test_transport.py.
"""

import pytest
import torch

from howdah.comm.signature import (
    CALL,
    RECORD,
    SITE,
    agree,
    both_ways,
    difference,
    different_counts,
    disagreement,
    look_alike,
    number,
    pack,
    spell,
)

SITES = "/home/one/train.py:31", "/home/two/other.py:9"


def gathers(*counts):
    """A numbered call of as many ranks as there are counts."""
    return number(17, spell("all_gather", torch.float32, counts))


MANY, ONE_MORE = gathers(*[100] * 32), gathers(*[100] * 30, 101, 99)


def test_a_call_is_spelled_with_all_that_must_agree():
    assert spell("barrier", "x", []) == "barrier(x [])"
    assert spell("reduce", torch.bfloat16, [7], "max, root 2") == (
        "reduce(bfloat16 [7], max, root 2)"
    )
    assert number(3, "barrier") == "#3 barrier"


@pytest.mark.parametrize("call", ["", "#1 barrier", MANY, "#1 é" + "x" * CALL])
@pytest.mark.parametrize("site", ["", SITES[0], "/" + "é" * SITE + "/a.py:1"])
def test_every_record_has_one_size(call, site):
    assert len(pack(call, site)) == RECORD


def test_what_is_cut_of_a_call_is_its_end_and_of_a_place_its_beginning():
    text = pack(MANY, "/far" * SITE + "/away.py:31")[4:].decode()
    assert len(MANY) > CALL and text[:CALL] == MANY[:CALL]
    assert len(text[CALL:]) == SITE and text.endswith("/far/away.py:31")


@pytest.mark.parametrize(
    ("mine", "theirs", "equal", "alike"),
    [
        (gathers(1, 2), gathers(1, 2), True, False),
        (gathers(1, 2), gathers(2, 1), False, False),
        (gathers(1, 2), gathers(1, 2)[:-1], False, False),
        (MANY, MANY, True, False),
        (MANY, ONE_MORE, False, True),  # cut before their counts differ
        (MANY, gathers(*[100] * 33), False, True),
        (MANY, gathers(101, 99, *[100] * 30), False, False),  # it shows
        (MANY[:CALL], MANY, False, True),  # one is what is left of the other
    ],
)
def test_which_calls_agree_and_which_only_look_alike(mine, theirs, equal, alike):
    """Wherever they are made. The checksum is that of the whole call."""
    for one, other in ((mine, theirs), (theirs, mine)):
        records = pack(one, SITES[0]), pack(other, SITES[1])
        assert (agree(*records), look_alike(*records)) == (equal, alike)


def test_calls_that_look_alike_are_told_apart_by_the_counts_that_are_cut():
    """32 ranks, of which one has other counts for the last two."""
    records = pack(MANY, SITES[0]), pack(ONE_MORE, SITES[1])
    told = str(disagreement(5, records[0], 7, records[1], (MANY, ONE_MORE)))
    shown = MANY[:CALL].strip()
    assert told == (
        f"rank 5 called {shown} at {SITES[0]}, but rank 7 {shown} at {SITES[1]}; "
        "the counts differ first for rank 30: 100 and 101"
    )


def test_calls_that_show_their_difference_are_told_as_they_are():
    mine, theirs = gathers(1, 2), number(17, "barrier")
    records = pack(mine, SITES[0]), pack(theirs, SITES[1])
    assert str(disagreement(0, records[0], 1, records[1], (mine, theirs))) == (
        f"rank 0 called {mine} at {SITES[0]}, but rank 1 {theirs} at {SITES[1]}"
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (MANY, ONE_MORE, "; the counts differ first for rank 30: 100 and 101"),
        (f"#1 barrier; {MANY}", f"#1 barrier; {ONE_MORE}", "; the counts differ first for rank 30"),
        ("scatter(int8 [5 6], root 1)", "scatter(int8 [5 7], root 1)", "; the counts differ first"),
        # of these the numbers are no counts by rank, or something else differs too
        (
            "send(int8 [5], 0 to 1)",
            "send(int8 [6], 0 to 1)",
            "; the first that differ are send",
        ),
        ("scatter(int8 [5], root 0)", "scatter(int8 [6], root 1)", "; the first that differ are s"),
        ("gather(int8 [5 6])", "gather(int16 [5 7])", "; the first that differ are gather(int8 ["),
        ("barrier", "barrier; barrier", "; one of them goes on where the other ends"),
        (MANY, MANY, ""),
    ],
)
def test_the_first_difference_is_named(mine, theirs, said):
    found = difference(mine, theirs)
    assert found.startswith(said) and bool(found) == bool(said)


def test_counts_are_compared_as_far_as_both_go():
    assert different_counts([1, 2, 3], [1, 5, 4]) == "; the counts differ first for rank 1: 2 and 5"
    assert different_counts([1, 2], [1, 2, 3]) == ""


def test_both_ends_of_an_exchange_spell_it_alike():
    assert both_ways(2, 5, [7, 9]) == both_ways(5, 2, [9, 7]) == ([7, 9], "2 to 5 and back")
