"""A rank's actions with the messages beside them: by hand, and in all no more and no less.

A block's forward takes 1 s and its backward 2 s. Embedding and head take no time, and their
messages next to none. So the picture of each test has whole or half seconds.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from random_plans import plans
from round_steps import SHAPE, block_bytes, clock_of, plan_of, wires

from howdah.plan.gather_order import gather_counts
from howdah.sim import rank_clock


def times_of(clock, program):
    """(start, end, end of its sums) of every action, one directly behind the other."""
    now, found = 0.0, {}
    for action in program:
        end = clock.end(action, now)
        found[str(action)] = now, end, clock.summed(action)
        now = end
    return found


def near(*seconds):
    return pytest.approx(seconds, abs=0.05)


def test_sums_start_behind_their_blocks_and_the_last_two_outlast_the_backward():
    """compute  | layers.2 | layers.1 | layers.0 |           3   5   7   9
    dp                     |  sum 2      |  sum 1      |  sum 0      |    5   8   11   14
    """
    plan = plan_of("dp2 x1")
    clock, messages, program = clock_of(plan, wires(block_bytes(plan) / 3))  # sent once in all
    assert [seconds for _, seconds in messages.of_sum[:3]] == [pytest.approx(3, abs=0.02)] * 3
    found = times_of(clock, program)
    assert found["0F0"][:2] == near(0, 3)
    assert found["0B0"] == near(3, 9, 14)


def test_only_the_last_micro_batch_sums_whole_gradients():
    plan = plan_of("dp2 x3")
    clock, _, program = clock_of(plan, wires(block_bytes(plan) / 3))
    found = times_of(clock, program)
    assert [found[f"0B{micro}"][2] for micro in range(3)] == near(0, 0, 18 + 14)


def test_the_first_forward_waits_for_updated_weights_unit_by_unit():
    """gather   |  0   |  1   |  2   |          1.5   3   4.5
    compute            | 0  | | 1  | | 2  |     2.5   4   5.5, and then 3 s for each forward
    """
    plan = plan_of("dp2 zero1 x2")
    found = times_of(*clock_of(plan, wires(block_bytes(plan) / 3))[::2])
    assert found["0F0"][:2] == near(0, 5.5)
    assert found["0F1"][:2] == near(11.5, 14.5)


def test_weights_of_small_units_come_together():
    """Three blocks in one bucket: the first waits for all of them."""
    plan = plan_of("dp2 zero1 x1", replace(SHAPE, width=64, heads=2, ffn_size=128))
    clock, messages, program = clock_of(plan, wires(block_bytes(plan)))
    assert len(messages.buckets) == 1
    gathers = sum(seconds for _, seconds in messages.of_gather.values())
    assert gathers > 1.5
    assert clock.end(program[0], 0.0) == pytest.approx(gathers + 3)


def test_weights_are_asked_for_when_the_first_forward_starts():
    plan = plan_of("dp2 zero1 x2")
    clock, _, program = clock_of(plan, wires(block_bytes(plan) / 3))
    assert clock.end(program[0], 10.0) == pytest.approx(15.5, abs=0.05)


def test_zero3_gathers_the_next_unit_while_one_is_used_and_sums_wait_their_turn():
    """gather 0 1 2, head; 2 1, sum 2, gather 0, sum 1, sum 0      each takes 1.5

    wire     |g0 |g1 |g2 |  |g2 |g1 |   |s2 |g0 |s1 |   |s0 |
             0  1.5  3  4.5 5.5 7  8.5  9 10.5 12 13.5  14 15.5
    compute      0    1   2      layers.2   layers.1   layers.0
               1.5   3   4.5-5.5   7-9       9-11      12-14
    """
    plan = plan_of("dp2 zero3 x1")
    found = times_of(*clock_of(plan, wires(block_bytes(plan) / 3))[::2])
    assert found["0F0"][:2] == near(0, 5.5)
    assert found["0B0"] == near(5.5, 14, 15.5)


def test_release_at_the_end_of_a_step_gathers_once():
    plan = plan_of("dp2 zero3 release=step x2")
    found = times_of(*clock_of(plan, wires(block_bytes(plan) / 3))[::2])
    assert found["0F0"][:2] == near(0, 5.5)
    assert (found["0B0"][1], found["0F1"][1]) == near(11.5, 14.5)


def test_the_weights_of_the_next_micro_batch_come_during_the_last_block_of_this_one():
    """An embedding as long as a block; a gather takes a quarter second, and so does a sum. When the
    second forward begins, the embedding is there, and two sums are on the wire: those of layers.0
    and of the embedding. layers.0 is gathered behind them.
    """
    block = block_bytes(plan_of("dp2 zero3 x2"))
    plan = plan_of("dp2 zero3 x2", replace(SHAPE, vocab=block // SHAPE.width // 4))
    found = times_of(*clock_of(plan, wires(block * 2))[::2])
    start, end, _ = found["0F1"]
    assert end - start == pytest.approx(3.75, abs=0.05)


def test_copies_are_summed_behind_the_sum_inside_and_beside_the_next_one():
    """inside    |s2 |    |s1 |    |s0 |                 2-3.5, 4-5.5, 6-7.5
    across         | 2    | 1    | 0    |              3.5-7.5, 7.5-11.5, 11.5-15.5
    """
    plan = plan_of("dp4 zero1 shard2 x1")
    size = block_bytes(plan)
    machine = wires(size / 3, size / 8, nodes=2, per_node=2)
    start, end, summed = times_of(*clock_of(plan, machine)[::2])["0B0"]
    assert (end - start, summed - start) == near(6, 15.5)


def test_shares_are_summed_after_each_micro_batch_and_across_copies_after_the_last():
    """inside    |s2 |    |s1 |    |s0 |              2-3.5, 4-5.5, 6-7.5
    across               |  2    |  1    |  0    |    4-8, 8-12, 12-16

    A sum across copies starts when the share is in its place: when a later bucket needs the
    window, or when the backward pass is over.
    """
    plan = plan_of("dp4 zero2 shard2 accumulate=shard x4")
    size = block_bytes(plan)
    machine = wires(size / 3, size / 8, nodes=2, per_node=2)
    clock, messages, program = clock_of(plan, machine)
    rows = zip(messages.sums, messages.of_sum, strict=True)
    assert [(row.op, seconds) for row, (_, seconds) in rows if row.spans[0].unit == "layers.1"] == [
        ("reduce_scatter", pytest.approx(1.5)),
        ("all_reduce", pytest.approx(4)),
    ]
    found = times_of(clock, program)
    for micro, sums in enumerate((7.5, 7.5, 7.5, 16)):
        start, end, summed = found[f"0B{micro}"]
        assert (end - start, summed - start) == near(6, sums)


def test_a_bucket_waits_for_the_one_before_the_last():
    """Sums of 5 s: one slot of the window fills and one is reduced.

    compute  |2  |1  |  |0  |     |        2, 4, 7 - 9, and the embedding's bucket opens at 12
    dp           | 2    | 1    | 0    |    7, 12, 17

    The forward ends at 15, and the first bucket of the next micro-batch opens at 17: the pace.
    """
    plan = plan_of("dp2 zero2 accumulate=shard x4")
    found = times_of(*clock_of(plan, wires(block_bytes(plan) / 10))[::2])
    start, end, summed = found["0B0"]
    assert (end - start, summed - start) == near(12, 17)
    ends = [found[f"0B{micro}"][2] for micro in range(1, 4)]
    assert (ends[1] - ends[0], ends[2] - ends[1]) == near(17, 17)


def test_the_bucket_of_a_tied_embedding_opens_with_the_head():
    """Sums of 5 s, the tied embedding's too. Its slot is there since the head, so nothing waits.

    compute  |2  |1  |  |0  |                     2, 4, 7 - 9
    dp           | 2    | 1    | 0    | tied |    7, 12, 17, 22
    """
    block = block_bytes(plan_of("dp2 x1"))
    tied = replace(SHAPE, vocab=block // SHAPE.width // 4, tie_embeddings=True)
    plan = plan_of("dp2 zero2 accumulate=shard x2", tied)
    start, end, summed = times_of(*clock_of(plan, wires(block / 10))[::2])["0B0"]
    assert (end - start, summed - start) == near(9, 22)


LAYOUTS = [
    *("dp2 zero1 x3", "dp2 zero2 x2", "dp2 zero2 accumulate=shard x3", "dp2 x2"),
    *("dp2 zero3 x3", "dp4 zero3 recompute=full x2", "dp2 zero3 release=step x3"),
    *("pp2 dp2 zero3 x4", "pp2 dp2 zero3 interleaved v2 x4", "pp2 dp2 zero3 zb-h1 x4"),
    "pp2 dp2 zero2 accumulate=shard terapipe slices2 x3",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_computing_takes_no_time_the_wire_never_rests(layout):
    """Then a step takes all its messages, one after the other: as many gathers and sums as the
    lists say.
    """
    plan = plan_of(layout)
    for rank in range(0, plan.layout.world, plan.layout.world // plan.layout.pp):
        clock, messages, program = clock_of(plan, wires(1e6), rank, forward=0.0)
        assert messages.lanes == 1
        often = Counter([*messages.of_gather])
        if plan.layout.zero == 3:
            often = gather_counts(plan, rank)
        total = sum(often[unit] * seconds for unit, (_, seconds) in messages.of_gather.items())
        for row, (_, seconds) in zip(messages.sums, messages.of_sum, strict=True):
            total += seconds * (plan.micros if row.every_micro else 1)
        found = times_of(clock, program)
        assert max(max(times) for times in found.values()) == pytest.approx(total)


@settings(max_examples=30)
@given(plans())
def test_what_is_remembered_of_a_micro_batch_is_what_would_be_computed(plan):
    if plan.layout.world > 64:
        return
    machine = wires(1e6, 1e5, nodes=plan.layout.world, per_node=1, latency=1e-4)
    found = []
    for alike in (rank_clock.ALIKE, 1e-300):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_clock, "ALIKE", alike)
            clock, _, program = clock_of(plan, machine, forward=1e-3)
            found.append([time for times in times_of(clock, program).values() for time in times])
    assert found[0] == pytest.approx(found[1], rel=1e-8)
