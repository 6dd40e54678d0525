"""Ranks that call the engine differently, or in a way that cannot work: both calls are named."""

import pytest
import torch
from test_engine import join, together, with_engine  # noqa: F401

from howdah.base.errors import UserError
from howdah.comm.signature import Disagreement

# -- ranks that disagree


def caught(engine, calls):
    """The sentence of the error that this rank's call ends in."""
    try:
        calls[engine.rank](engine)
    except Disagreement as error:
        return str(error)
    return "no error"


def reduce_four(engine):
    engine.all_reduce(torch.zeros(4))


def reduce_five(engine):
    engine.all_reduce(torch.zeros(5))


def reduce_double(engine):
    engine.all_reduce(torch.zeros(4, dtype=torch.float64))


def reduce_mean(engine):
    engine.all_reduce(torch.zeros(4), "mean")


def broadcast_0(engine):
    engine.broadcast(torch.zeros(4), 0)


def broadcast_1(engine):
    engine.broadcast(torch.zeros(4), 1)


def gather_1_3(engine):
    engine.all_gather(torch.zeros(4), torch.zeros([1, 3][engine.rank]), [1, 3])


def gather_2_2(engine):
    engine.all_gather(torch.zeros(4), torch.zeros(2), [2, 2])


def send_four(engine):
    engine.send(torch.zeros(4), 1)
    engine.barrier()


def receive_five(engine):
    engine.receive(torch.zeros(5), 0)


def give_two(engine):
    engine.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [2, 2])


def take_three(engine):
    engine.all_to_all(torch.zeros(5), torch.zeros(4), [2, 2], [3, 2])


FOUR = "#1 all_reduce(float32 [4], sum)"
DISAGREEMENTS = [
    (reduce_four, reduce_five, FOUR, "#1 all_reduce(float32 [5], sum)"),
    (reduce_four, reduce_double, FOUR, "#1 all_reduce(float64 [4], sum)"),
    (reduce_four, reduce_mean, FOUR, "#1 all_reduce(float32 [4], mean)"),
    (reduce_four, broadcast_0, FOUR, "#1 broadcast(float32 [4], root 0)"),
    (broadcast_0, broadcast_1, "broadcast(float32 [4], root 0)", "[4], root 1)"),
    (gather_1_3, gather_2_2, "all_gather(float32 [1 3])", "all_gather(float32 [2 2])"),
    (gather_1_3, gather_2_2, "all_gather(", "; the counts differ first for rank 0: "),
    (give_two, take_three, "all_to_all(float32 [3 2], 0 to 1 and back)", "[2 2], 0 to 1 and back)"),
]


@pytest.mark.parametrize(("one", "other", "first", "second"), DISAGREEMENTS)
def test_both_calls_and_both_places_are_named(together, one, other, first, second):  # noqa: F811
    places = [f"at {__file__}:{f.__code__.co_firstlineno + 1}" for f in (one, other)]
    for sentence in together(caught, (one, other), ranks=2):
        for part in ("rank 0", "rank 1", first, second, *places):
            assert part in sentence


def test_ranks_that_agree_are_told_too(together):  # noqa: F811
    sentences = together(caught, (reduce_four, reduce_four, reduce_five), ranks=3)
    assert all("rank 2" in sentence and "[5]" in sentence for sentence in sentences)


def test_a_message_that_does_not_fit_is_told_to_both_sides(together):  # noqa: F811
    for sentence in together(caught, (send_four, receive_five), ranks=2):
        assert "rank 1 waits for another message" in sentence
        assert "rank 0's send(float32 [4])" in sentence


def test_a_failed_engine_stays_failed(together):  # noqa: F811
    def_error = together(caught_again, ranks=2)
    assert all("disagree" in words or "called" in words for words in def_error)


def caught_again(engine):
    """After a disagreement, a call on which all agree."""
    caught(engine, (reduce_four, reduce_five))
    return caught(engine, (reduce_four, reduce_four))


# -- calls that cannot work


def refusals(engine):
    x, said = torch.zeros(6), []
    cases = [
        lambda: engine.all_reduce(torch.zeros(4, 4)[:, ::2]),
        lambda: engine.all_reduce(x, "median"),
        lambda: engine.all_reduce(torch.zeros(3, dtype=torch.bool)),
        lambda: engine.all_reduce(torch.zeros(3, dtype=torch.int64), "mean"),
        lambda: engine.broadcast(x, 2),
        lambda: engine.send(x, engine.rank),
        lambda: engine.reduce_scatter(x[:3], x, [3, 4]),
        lambda: engine.reduce_scatter(x[1:4], x, [3, 3]),
        lambda: engine.all_gather(x, torch.zeros(3, dtype=torch.float64), [3, 3]),
        lambda: engine.all_to_all(x, x, [3, 3], [3, 3]),
        lambda: engine.broadcast(torch.zeros(2, dtype=torch.complex32), 0),
        lambda: engine.allocate(1 << 24, torch.float64),
        lambda: engine.there(x, 0),
    ]
    for case in cases:
        try:
            case()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    engine.all_reduce(x.fill_(1))  # and nothing is broken
    return said, x.sum().item()


def test_what_cannot_work_is_refused_with_a_sentence(together):  # noqa: F811
    said, total = together(refusals, ranks=2)[0]
    expected = [
        "contiguous", "no reduction 'median'", "torch.bool", "mean of torch.int64", "names rank 2",
        "names rank 0", "have that sum", "lie apart", "dtype of the whole", "lie apart from x",
        "cannot move torch.complex32", "connect with arena_bytes=134217728 or more", "allocate()",
    ]  # fmt: skip
    for sentence, part in zip(said, expected, strict=True):
        assert part in sentence
    assert total == 12


def after_close(engine):
    engine.close()
    with pytest.raises(UserError, match="this engine is closed"):
        engine.barrier()


def test_a_closed_engine_says_so(together):  # noqa: F811
    together(after_close, ranks=1)
