"""Seconds of messages, each on the path of its own ranks: bytes over bandwidth, and latencies."""

from collections import Counter
from dataclasses import replace

import pytest
from round_steps import SHAPE, block_bytes, plan_of, wires

from howdah.plan.exchanges import exchanges
from howdah.plan.schedule.lowering import Verb
from howdah.plan.sharding import local_buffers
from howdah.plan.sums import sums_of
from howdah.shapes.shape import Experts
from howdah.sim.message_times import MessageTimes, RankMessages
from howdah.sim.profile import Profile
from howdah.sim.step_time import step_time
from howdah.sim.traffic import step_traffic


def sums(plan, machine, unit="layers.1"):
    """(operation, ranks, seconds) of the sums of a unit."""
    times = MessageTimes(plan, machine)
    rows = [row for row in sums_of(plan, 0) if row.spans[0].unit == unit]
    return [(row.op, [*row.ranks], times.of_sum(row)) for row in rows]


def test_a_sum_is_priced_on_the_path_of_its_own_ranks():
    """A block on a wire inside a node of two takes 1 s, and between nodes 10 s."""
    plan = plan_of("dp4 zero1 shard2 x2")
    fast = block_bytes(plan)
    machine = wires(fast, fast / 10, nodes=2, per_node=2)
    assert sums(plan, machine) == [
        ("reduce_scatter", [0, 1], pytest.approx(1 / 2)),
        ("all_reduce", [0, 2], pytest.approx(10 * 2 * (1 / 2) / 2)),
    ]
    # a ring of all four leaves each node once: two cards carry one connection
    whole = plan_of("dp4 x2")
    assert sums(whole, machine) == [("all_reduce", [0, 1, 2, 3], pytest.approx(2 * 3 / 4 * 5))]


def test_each_message_of_each_half_costs_its_latencies():
    plan = plan_of("dp4 x1")
    free = wires(1e30, nodes=1, per_node=4, latency=1.0)
    assert sums(plan, free) == [("all_reduce", [0, 1, 2, 3], pytest.approx(2 * 3))]
    first = sums_of(plan, 0)[0]
    assert [span.unit for span in first.spans] == ["head", "layers.2"]
    assert MessageTimes(plan, free).of_sum(first) == pytest.approx(2 * 2 * 3)
    packed = next(row for row in sums_of(plan_of("tp2 sp x1"), 0) if len(row.spans) > 1)
    assert packed.packed
    assert MessageTimes(plan_of("tp2 sp x1"), free).of_sum(packed) == pytest.approx(2)


def test_exchanges_cost_a_latency_for_each_time_that_they_run():
    """tp2 on three blocks of two sub-layers, and both ends: an all-reduce of two messages each."""
    plan = plan_of("tp2 x3")
    times = MessageTimes(plan, wires(1e30, per_node=2, latency=1.0))
    found = Counter()
    for row in exchanges(plan, 0):
        found[row.back] += times.of_exchange(row, 0)
    # forward: blocks, the embedding, and three numbers of the loss; backward: blocks, the head
    assert found == {False: 3 * 2 * (6 + 1 + 3), True: 3 * 2 * (6 + 1)}


def test_recomputation_exchanges_again_in_the_backward_pass():
    def seconds(layout):
        plan = plan_of(layout)
        times, found = MessageTimes(plan, wires(1e30, per_node=2, latency=1.0)), Counter()
        for row in exchanges(plan, 0):
            found[row.back] += times.of_exchange(row, 0)
        return found

    plain, again = seconds("tp2 x1"), seconds("tp2 recompute=full x1")
    assert again[False] == plain[False]
    assert again[True] - plain[True] == pytest.approx(2 * 6)


def test_a_stage_sends_over_the_wire_to_its_neighbour():
    """Four stages on two nodes: only the tensors of the middle boundary leave a node."""
    plan = plan_of("pp4 x2", replace(SHAPE, layers=4))
    size = 8 * plan.shape.width * 4
    timeline = step_time(plan, wires(size, size / 10, nodes=2, per_node=2)).timeline
    seconds = {
        str(span.instruction): span.end - span.start
        for spans in timeline.spans
        for span in spans
        if span.instruction.verb is Verb.SEND
    }
    assert seconds == {
        f"send {stage}{kind}{micro} to {to}": pytest.approx(10 if {stage, to} == {1, 2} else 1)
        for micro in range(2)
        for kind, step in (("F", 1), ("B", -1))
        for stage in range(4)
        if 0 <= (to := stage + step) < 4
    }


def test_a_tied_embedding_is_summed_over_the_wire_between_its_stages():
    plan = plan_of("pp2 x2", replace(SHAPE, tie_embeddings=True, vocab=1000))
    size = 4 * 1000 * plan.shape.width
    timeline = step_time(plan, wires(size / 3, per_node=2)).timeline
    ties = [s for spans in timeline.spans for s in spans if s.instruction.verb is Verb.TIE]
    assert [tie.end - tie.start for tie in ties] == [pytest.approx(3)] * 2


def test_an_embedding_of_source_and_target_is_summed_by_all_its_stages():
    """An encoder and a decoder share it, on two ranks; with a tied head, on three."""
    shape = replace(SHAPE, family="encoder-decoder", encoder_layers=3, vocab=4000)
    once = 4 * 4000 * shape.width / 1e9
    for tied, ranks in ((False, 2), (True, 3)):
        plan = plan_of("pp6 x6", replace(shape, tie_embeddings=tied))
        timeline = step_time(plan, wires(1e9, per_node=6)).timeline
        ties = [s for spans in timeline.spans for s in spans if s.instruction.verb is Verb.TIE]
        seconds = pytest.approx(2 * (ranks - 1) / ranks * once)
        assert [tie.end - tie.start for tie in ties] == [seconds] * ranks


@pytest.mark.parametrize(
    "layout",
    ["dp4 x3", "dp4 zero1 shard2 x3", "dp2 tp2 sp zero2 accumulate=shard x3", "pp2 dp2 zero1 x2"],
)
@pytest.mark.parametrize("dtype", ["full", "bf16"])
def test_on_links_without_latency_messages_take_the_bytes_that_are_counted(layout, dtype):
    plan = plan_of(layout)
    plan = replace(plan, method=replace(plan.method, gradient_dtype=dtype))
    times, found = MessageTimes(plan, wires(1.0)), Counter()
    held, sums = local_buffers(plan, 0), sums_of(plan, 0)
    messages = RankMessages(times, plan, 0, sums=sums, held=held)
    for row, (_, seconds) in zip(sums, messages.of_sum, strict=True):
        found[row.axis] += seconds * (plan.micros if row.every_micro else 1)
    found["dp"] += sum(seconds for _, seconds in messages.of_gather.values())
    for row in exchanges(plan, 0):
        found[row.axis] += times.of_exchange(row, 0)
    counted = Counter()
    for row, count in step_traffic(plan, 0).items():
        counted[row.axis] += count * (row.operation != "scalars")
    assert +found == pytest.approx(+counted)


# -- equal totals, different lists ---------------------------------------------

ALIKE = ["dp4 x2", "dp4 zero1 x2", "dp4 zero1 shard2 x2", "dp4 zero1 shard1 x2"]


def totals(plan):
    found = Counter()
    for row, count in step_traffic(plan, 0).items():
        if row.operation != "scalars":
            found[row.axis, row.operation] += count
    return found


def test_layouts_of_equal_totals_take_different_times_on_links_that_differ():
    """In float32, plain replicas and states that are shared out by all, by pairs and by none send
    the same bytes of each operation.
    """
    found = [plan_of(layout) for layout in ALIKE]
    assert all(totals(plan) == totals(found[0]) for plan in found)
    size = block_bytes(found[0])
    apart = wires(size, size / 10, nodes=2, per_node=2)
    whole, cut, pairs, copies = (step_time(plan, apart).seconds for plan in found)
    # pairs gather inside their node, and sum only halves between nodes
    assert pairs < 0.8 * min(whole, cut)
    # with a copy of everything on each rank, the sum is that of plain replicas
    assert copies == pytest.approx(whole)


def test_copies_are_summed_as_gradients_and_not_gathered_as_weights():
    """Each rank has all states: a sum behind the last backward pass, and no weights to wait for."""
    size = block_bytes(plan_of("dp4 x2"))
    slow = wires(size, size / 10, nodes=2, per_node=2)
    for layout in ("dp4 zero1 shard1 x2", "dp4 zero2 accumulate=shard shard1 x2"):
        first, *_ = step_time(plan_of(layout), slow).timeline.spans[0]
        assert first.end - first.start < 1e-9, layout  # computation takes no time
        assert step_time(plan_of(layout), slow).seconds == pytest.approx(
            step_time(plan_of("dp4 x2"), slow).seconds
        )


def test_gathers_with_a_second_copy_are_priced_as_their_mean():
    """A block comes from all ranks, and then from the neighbours: as under plain zero3 once, and
    as with shards inside a node the other times.
    """
    plan, plain, inside = (plan_of(f"dp4 zero3 {words}x2") for words in ("hpz2 ", "", "shard2 "))
    machine = wires(1e9, 1e8, nodes=2, per_node=2, latency=1e-4)
    (block,) = [one for one in local_buffers(plan, 0) if one.unit == "layers.1"]
    far, near = (MessageTimes(one, machine).of_gather(0, block) for one in (plain, inside))
    times = MessageTimes(plan, machine)
    assert times.of_gather(0, block) == pytest.approx(far)
    assert times.of_gather(0, block, 4) == pytest.approx((far + 3 * near) / 4)
    assert times.of_gather(0, block, 4) < far
    held = local_buffers(plan, 0)
    found = RankMessages(times, plan, 0, sums=sums_of(plan, 0), held=held).of_gather
    assert found["layers.1"][1] == times.of_gather(0, block, 4)
    assert step_time(plan, machine).seconds < step_time(plain, machine).seconds


def test_gathers_in_eight_bits_take_a_quarter_of_the_time():
    plain = plan_of("dp4 zero3 x2")
    narrow = replace(plain, method=replace(plain.method, gather_dtype="int8"))
    machine = wires(1e9, 1e8, nodes=2, per_node=2)

    def seconds(plan):
        (block,) = [one for one in local_buffers(plan, 0) if one.unit == "layers.1"]
        return MessageTimes(plan, machine).of_gather(0, block) / block.length

    width = plain.compute_bytes
    assert seconds(narrow) == pytest.approx(seconds(plain) * (1 + 4 / 256) / width)


def test_a_collective_on_gpus_costs_a_start():
    plan, free = plan_of("dp4 x1"), wires(1e30, nodes=1, per_node=4)
    named = replace(free, device=replace(free.device, name="A100 SXM4 80 GB"))
    assert sums(plan, named)[0][2] - sums(plan, free)[0][2] == pytest.approx(2 * 1.7e-5)


def test_owners_send_weight_after_weight():
    """Each weight of a unit takes the latencies of a message, unless few ranks have all of them."""
    plan = plan_of("dp4 zero1 x1")
    free = wires(1e30, nodes=1, per_node=4, latency=1.0)
    held = next(one for one in local_buffers(plan, 0) if one.unit == "layers.1")
    gathered = MessageTimes(plan, free).of_gather(0, held)
    owned = MessageTimes(plan, free, Profile(owners=True)).of_gather(0, held)
    messages = max(len(held.names) * min(4 / len(plan.weights), 1), 1)
    assert (gathered, owned) == (pytest.approx(3), pytest.approx(3 * messages))


def test_a_token_crosses_to_a_node_once_where_the_framework_says_so():
    """Eight of sixteen experts on two nodes: four copies cross, or one of 255 times in 256."""
    shape = replace(SHAPE, experts=Experts(16, 8, SHAPE.ffn_size), bias=False)
    plan = plan_of("dp4 ep4 x1", shape)
    machine = wires(1e30, 1.0, nodes=2, per_node=2)
    row = next(one for one in exchanges(plan, 0) if one.axis == "ep")
    each, once = (
        MessageTimes(plan, machine, Profile(once=flag)).of_exchange(row, 0)
        for flag in (False, True)
    )
    assert once / each == pytest.approx((255 / 256) / 4)
