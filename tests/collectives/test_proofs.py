"""Every algorithm is proved on all numbers of ranks; every broken one is noticed."""

from dataclasses import replace

import broken
import pytest

from howdah.base.errors import UserError
from howdah.collectives.check import problems
from howdah.collectives.program import OUT, WORK, Message, Program, Step, X, chunk, program, then
from howdah.collectives.registry import ALGORITHMS, build
from howdah.collectives.walk import walk

POWERS = {"recursive_doubling", "recursive_halving", "hypercube"}


def accepts(name, ranks):
    op, short = name.split("/")
    if (short in POWERS and op != "all_reduce") or short == "hypercube":
        return ranks & (ranks - 1) == 0
    return ranks == 1 or ranks % 2 == 0 if short == "neighbour_exchange" else True


def prove(name, numbers):
    for ranks in numbers:
        if accepts(name, ranks):
            assert problems(build(name, ranks)) == [], f"{name} on {ranks} ranks"
        else:
            with pytest.raises(UserError, match=f"of ranks, not {ranks}; use "):
                build(name, ranks)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_right_on_few_ranks(name):
    prove(name, range(1, 14))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_right_on_many_ranks(name):
    prove(name, range(14, 65))


def variants(ranks):
    """Options that algorithms take, other than those they have by themselves."""
    nodes = [{"per_node": size} for size in range(1, ranks + 1) if ranks % size == 0]
    dims = [(ranks,), (1, ranks), (ranks, 1), (2, 3, 2), (3, 4), (2, 6), (2, 1, 6), (4, 3, 1)]
    return [
        *({"root": root} for root in range(ranks)),
        *({"pieces": pieces} for pieces in (1, 2, 3, 7)),
        *({"dims": sizes} for sizes in dims),
        {"near_first": True},
        {"root": 3, "near_first": True},
        {"root": 3, "pieces": 5},
        *nodes,
        *({**some, "pieces": 3} for some in nodes),
    ]


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.options])
def test_every_option_is_right(name):
    tried = 0
    for options in variants(12):
        if set(options) <= set(ALGORITHMS[name].options):
            assert problems(build(name, 12, **options)) == [], options
            tried += 1
    assert tried >= 4


# -- broken programs -------------------------------------------------------------------

BREAKS = [
    broken.dropped_messages,
    broken.dropped_steps,
    broken.other_chunks,
    broken.other_kinds,
    broken.sent_twice,
]


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_break_is_noticed(name, breaks):
    sound = ALGORITHMS[name].drawn()
    for number, wrong in enumerate(breaks(sound)):
        assert problems(wrong), f"break {number} of {name}"


def test_there_are_breaks():
    ring = build("ring", 4)
    assert [len(list(breaks(ring))) for breaks in BREAKS] == [24, 48, 24, 24, 24]


def test_a_write_to_what_is_being_sent():
    """A butterfly that adds straight to the vector that its partner is still reading."""
    swap = [Message(0, rank, 1 - rank, chunk(0), add=True) for rank in range(2)]
    assert problems(program("all_reduce", "made up", 2, 1, swap)) == [
        "rank 0, turn 0: writes chunk 0 of x while it is sent",
        "rank 1, turn 0: writes chunk 0 of x while it is sent",
    ]
    assert problems(build("butterfly", 2)) == []


def test_an_overwrite_of_what_was_not_read():
    """Rank 2 gets both vectors in one place of its work buffer, and adds only the second."""
    part = then(
        [Message(0, 0, 2, chunk(0), writes=WORK)],
        [Message(0, 1, 2, chunk(0), writes=WORK)],
        [Message(0, 2, 2, chunk(0), add=True, reads=WORK)],
    )
    assert problems(program("reduce", "made up", 3, 1, part, root=2)) == [
        "rank 2, turn 1: overwrites chunk 0 of work, which was not read yet",
        "rank 2 ends with the input of 1 + 2 in chunk 0; it must have the input of 0 + 1 + 2",
    ]


def test_a_receive_that_comes_too_early():
    """In the ring, the finished shares replace sums that were not passed on yet."""
    ring = build("ring", 3)
    for rank, steps in enumerate(ring.steps):
        moved = [step._replace(turn=0) if step.kind == "receive" else step for step in steps]
        ring = broken.with_steps(ring, rank, sorted(moved, key=lambda step: step.turn))
    assert problems(ring)


def receive_first(steps):
    """In every turn a rank sends only after it has received."""
    return [
        step._replace(turn=2 * step.turn + (step.kind == "send"))
        for step in sorted(steps, key=lambda step: (step.turn, step.kind == "send"))
    ]


def test_ranks_that_wait_for_each_other():
    ring = build("ring", 3)
    stuck = ring
    for rank, steps in enumerate(ring.steps):
        stuck = broken.with_steps(stuck, rank, receive_first(steps))
    assert problems(stuck) == [
        "these wait for each other for ever: rank 0 in its turn 0, rank 2 in its turn 0, rank 1 in "
        "its turn 0"
    ]
    first = [step._replace(turn=2 * step.turn + (step.kind != "send")) for step in ring.steps[0]]
    freed = broken.with_steps(stuck, 0, sorted(first, key=lambda step: step.turn))
    assert problems(freed) == []  # rank 0 sends first: slower, but it ends
    assert walk(freed).rounds > walk(ring).rounds


def test_a_wait_for_a_rank_that_has_ended():
    lonely = Program("barrier", "made up", 2, 2, ((Step("send", 0, 1, chunk(0)),), ()))
    assert problems(lonely) == ["rank 0 sends 1 messages to rank 1, which receives 0 from it"]


def test_another_order_of_additions():
    """Every rank begins with its own vector: the sums are right, and their bits differ."""
    part = [
        Message(0, source, target, chunk(0), add=source != target, writes=OUT)
        for target in range(3)
        for source in sorted(range(3), key=lambda source: source != target)
    ]
    found = problems(program("all_reduce", "made up", 3, 1, part, output=OUT))
    assert found == ["rank 2 adds chunk 0 in another order than rank 0"]
    assert problems(build("one_shot", 3)) == []


def test_a_message_for_nothing():
    part = [Message(0, 0, 1, chunk(0)), Message(1, 1, 0, chunk(0), writes=WORK)]
    assert problems(program("broadcast", "made up", 2, 1, part)) == [
        "rank 0 never reads what was written to chunk 0 of work"
    ]


def test_a_message_of_what_is_there_already():
    """The ring of a scatter and all-gather once sent the root its own vector again."""
    part = [Message(0, 0, 1, chunk(0)), Message(1, 1, 2, chunk(0)), Message(2, 0, 1, chunk(0))]
    assert problems(program("broadcast", "made up", 3, 1, part)) == [
        "rank 1, turn 2: gets chunk 0 of x, which it has already"
    ]


def test_chunks_that_nobody_has_written():
    part = [Message(0, 1, 0, chunk(0)), Message(1, 0, 1, chunk(0))]
    found = problems(program("broadcast", "made up", 2, 1, part))
    assert found[0] == "rank 1, turn 0: sends chunks of ((0, 1),) that nothing was written to"


def test_other_chunks_at_the_two_ends():
    ring = build("all_gather/ring", 2)
    assert problems(broken.changed(ring, 0, 0, spans=chunk(1)))[0] == (
        "message 0 from rank 0 to rank 1 has chunks ((1, 2),), and chunks ((0, 1),) are expected"
    )
    assert ring.output == X


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"op": "shuffle"}, "is no operation"),
        ({"chunks": 0}, "0 chunks are not cut"),
        ({"chunks": 2}, "2 chunks are not cut into the 4 blocks of all_gather"),
        ({"ranks": 5, "chunks": 5}, "4 lists of steps are for 5 ranks"),
        ({"steps": ((Step("send", 0, 4, ((0, 1),)),), (), (), ())}, "that does not exist"),
    ],
)
def test_a_program_that_means_nothing_is_found(fields, sentence):
    """A barrier, scatter or all-gather without messages would pass if it had no blocks."""
    sound = build("all_gather/ring", 4)
    assert problems(sound) == []
    assert any(sentence in one for one in problems(replace(sound, **fields)))
