"""What the ranks of a layout give to NCCL, recorded rank by rank without a GPU.

    equal    all ranks of a communicator make the same calls; every send meets its receive
    legal    NCCL has each call, with equal counts and aligned addresses
    ends     nobody waits forever, though a send ends only when it is received

The plans are those for GPUs (`for_gpus`). A deadlock that depends on timing cannot hide: the lists
of all ranks and the edges between them are one graph, and it has a circle or it has none.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from in_flight import message_for_each_unit
from recorded_steps import played, record, record_rank
from recorded_wire import META, Backend, Event, Joining, Recorded, Streams
from small_cases import FORMS as SHAPES
from wire_checks import (
    UNALIGNED,
    UNEVEN,
    Illegal,
    Stuck,
    Unequal,
    broken,
    check_ends,
    check_equal,
    check_legal,
    ends_in_queues,
)

from howdah.base.errors import UserError
from howdah.comm import native
from howdah.comm.group import Group
from howdah.comm.lane import CudaStreams
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.shapes.presets import preset
from howdah.verify.matrix import FORMS, MODEL, case_of, pairs

EVEN = 32  # tokens: chunks of cp2 and cp4, and slices of tp2 of them, are equal
QUICK = [
    "dp2 x2",
    "dp3 zero1 x2",
    "dp4 zero2 shard2 x2",
    "dp2 zero3 recompute=full x2",
    "tp2 sp x1",
    "pp2 gpipe x3",
    "pp2 naive x2",
    "pp3 1f1b x4",
    "pp2 interleaved v2 x2",
    "pp2 zb-h1 x3",
    "pp2 zb-h2 x3",
    "pp2 zb-v x3",
    "dp2 pp2 tp2 zero1 1f1b x2",
]
LARGE = [
    "dp8 zero1 x2",
    "dp8 zero3 shard4 x2",
    "dp2 tp4 sp zero2 inputs=gathered x2",
    "pp8 1f1b x16",
    "pp4 tp2 zb-v x8",
    "dp2 pp2 tp2 sp zero3 1f1b recompute=full x4",
    "dp16 zero2 accumulate=whole x2",
    "dp2 pp4 tp2 zero1 interleaved v2 x8",
    "dp4 tp4 sp zero2 shard2 x2",
    "dp4 pp2 tp2 sp zero3 zb-h1 recompute=selective x4",
    "pp16 interleaved v2 x16",
    "dp4 pp4 tp2 zero2 shard2 zb-h2 x8",
    "dp4 pp8 gpipe x8",
    "dp8 pp4 zero3 release=step interleaved v3 x4",
    "dp4 pp2 tp4 sp zero3 shard2 recompute=full:1 1f1b x4",
    "dp64 zero3 x1",
    "dp8 tp8 sp zero2 x2",
    "dp4 pp4 tp4 zero1 interleaved v2 x8",
    "dp8 pp8 zero3 1f1b x8",
    "dp8 pp4 tp2 zero2 shard4 zb-v x4",
    "dp8 pp4 tp2 naive x2",
]
# forms that do not run on GPUs
CPU_ONLY = ("servers", "adding servers", "host", "disk", "activations")


def plan_of(words, *, shape=None, length=16, precision="float32"):
    layout = resolve(parse_layout(words), None)
    blocks, heads = max(2, layout.pp * layout.virtual), max(4, layout.tp)
    shape = shape or replace(SHAPES["laptop"], layers=blocks, heads=heads)
    batch, method = Batch(micro_batch=2), Method(precision)
    return for_gpus(make_plan(shape, layout, batch, sequence=length, method=method))


@cache
def recorded(words):
    """What the ranks of a layout do, with a message for each unit."""
    with message_for_each_unit():
        return record(plan_of(words))


def check(ranks, but=()):
    assert all(rank.calls for rank in ranks)
    check_equal(ranks)
    check_legal(ranks, but=but)
    check_ends(ranks)


# -- layouts


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("words", QUICK)
def test_calls_are_equal_and_legal_and_end(words):
    check(recorded(words))


def test_buckets_are_one_group():
    ranks = record(plan_of("dp2 zero2 x2"))
    check(ranks)
    assert max(len(call.ops) for _, call in ranks[0].calls) == 4, "four units go together"


@pytest.mark.slow
@pytest.mark.parametrize("words", LARGE)
def test_large_layouts(words):
    with message_for_each_unit():
        ranks = record(plan_of(words))
    check(ranks)
    assert ends_in_queues(ranks, 1) or "interleaved" in words
    assert ends_in_queues(ranks, 8), "as many as a GPU has if nobody says otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form not in CPU_ONLY])
def test_every_form_with_every_other(form):
    tried = 0
    for cell in pairs():
        if cell.forms[0] != form or cell.words.startswith(MODEL):  # experts need data
            continue
        if {*CPU_ONLY} & {*cell.forms}:
            continue
        try:
            case = case_of(cell.words)
        except UserError:  # tests/distributed/test_matrix.py has the list
            continue
        if case.layout.world > 1:
            tried += 1
            with message_for_each_unit():
                check(record(for_gpus(replace(case.plan, sequence=EVEN))))
    assert tried or FORMS[form].startswith(("recompute", "x", MODEL))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "dp8 zero1 x1",
        "dp8 zero3 recompute=full x1",
        "dp2 pp2 tp2 sp zero1 1f1b x2",
        "dp2 tp8 sp zero2 shard2 recompute=selective x1",
    ],
)
def test_eight_billion_weights(words):
    plan = plan_of(words, shape=preset("llama3-8b"), length=4096, precision="bf16")
    check(record(plan, ("step", "step")))


# -- where counts are not equal


def test_slices_of_a_length_that_does_not_divide_are_uneven():
    """The only uneven shares of a training step, besides those of a tied embedding (below)."""
    ranks = record(plan_of("tp2 sp x1", length=15))
    with pytest.raises(Illegal, match=UNEVEN):
        check_legal(ranks)
    check(ranks, but=[UNEVEN, UNALIGNED])


def test_a_tied_embedding_of_pipeline_stages_is_cut_evenly_without_zero():
    """Its gradient is summed by shares there, too."""
    check(record(plan_of("pp2 dp3 1f1b x2")))
    check(record(plan_of("pp2 dp3 1f1b x2", shape=replace(SHAPES["untied"], layers=2))))


# -- fewer queues than streams


@pytest.mark.parametrize("words", QUICK)
def test_ranks_launch_their_calls_in_one_order(words):
    """NCCL asks for it where communicators are used at once: then one queue would do."""
    assert ends_in_queues(recorded(words), 1)


def test_but_not_in_a_ring_of_pipeline_ranks():
    """Rank 0 receives from rank 3 what rank 3 makes of what rank 0 sends later: a GPU that does all
    streams in one queue would wait forever.
    """
    ranks = record(plan_of("pp4 interleaved v2 x4"))
    check(ranks)
    assert not ends_in_queues(ranks, 1)
    assert ends_in_queues(ranks, max(rank.streams for rank in ranks))


# -- mutations


class Skips(Backend):
    """Leaves out its second all-gather."""

    gathers = 0

    def _allgather_base(self, out, x, options):
        self.gathers += 1
        if self.gathers != 2:
            super()._allgather_base(out, x, options)


class Swaps(Backend):
    """Starts its first reduce-scatter after its second."""

    held = None

    def _reduce_scatter_base(self, *arguments):
        if self.held is None:
            self.held = arguments
            return
        super()._reduce_scatter_base(*arguments)
        if self.held:
            super()._reduce_scatter_base(*self.held)
        self.held = ()


def test_a_rank_that_skips_an_all_gather():
    ranks = record(plan_of("dp2 zero3 x2"), backends={1: Skips})
    with pytest.raises(Unequal, match=r"rank 0 calls all_gather.*, and rank 1 "):
        check_equal(ranks)
    with pytest.raises(Stuck, match="rank 0 waits with "):
        check_ends(ranks)


def test_two_sums_in_another_order():
    with message_for_each_unit():
        ranks = record(plan_of("dp2 zero2 x2"), backends={1: Swaps})
    with pytest.raises(Unequal, match=r"rank 0 calls reduce_scatter.*, and rank 1 reduce_scatter"):
        check_equal(ranks)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["dp3 zero1 x2", "dp3 zero2 x2", "dp3 zero3 x2"])
def test_shares_that_are_not_padded(words):
    plan = plan_of(words)
    cut = replace(plan, share_align=1)
    with pytest.raises(Illegal, match=UNEVEN):
        check_legal(record(cut))
    ranks = [record_rank(cut if rank == 1 else plan, rank) for rank in range(3)]
    with pytest.raises(Unequal):
        check_equal(ranks)


def by_hand(*programs):
    """What ranks do that call program(joining, rank, x): x() is a tensor of 16 elements."""
    ranks = []
    for rank, program in enumerate(programs):
        streams = Streams()
        joining = Joining(streams, rank, Backend)
        with played(streams):
            program(joining, rank, lambda: torch.empty(16, device=META))
        ledgers = {wire: one.ledger.entry[:2] for wire, one in joining.made.items()}
        ranks.append(Recorded(streams.entries, streams.count, ledgers))
    return ranks


def test_later_stages_ask_for_updated_weights_before_they_wait_for_their_input():
    kinds = ("receive", "reduce_scatter", "all_gather")
    for rank in recorded("dp2 pp2 zero1 1f1b x2"):
        ops = [op for _, call in rank.calls for op in call.ops if op.name in kinds]
        names = [op.name for op in ops if max(op.counts) > 16]  # no scalars
        assert "all_gather" in names
        assert ("receive", "all_gather") not in [*pairwise(names)]


def on_one_lane(joining, rank, x):
    """Sends before it receives, behind one another."""
    group = Group(joining([0, 1]))
    group.send(x(), 1 - rank, async_op=True)
    group.receive(x(), 1 - rank, async_op=True)


def on_two_lanes(joining, rank, x):
    """As pipeline stages do: a lane for each direction."""
    groups = [Group(joining([0, 1])) for _ in range(2)]
    groups[rank].send(x(), 1 - rank, async_op=True)
    groups[1 - rank].receive(x(), 1 - rank, async_op=True)


def reads_between(joining, rank, x):
    """The host reads what was received before it launches the send."""
    groups = [Group(joining([0, 1])) for _ in range(2)]
    groups[1 - rank].receive(x(), 1 - rank)
    event = Event()
    event.record(CudaStreams(META).current())
    event.synchronize()
    groups[rank].send(x(), 1 - rank)


def test_two_ranks_that_both_send_first():
    for program in (on_one_lane, reads_between):
        ranks = by_hand(program, program)
        check_equal(ranks)
        with pytest.raises(Stuck, match=r"rank 0 waits with .*rank 1 waits with "):
            check_ends(ranks)
    check(by_hand(on_two_lanes, on_two_lanes))


def test_wires_that_are_made_in_another_order():
    one, other = [0, 1], [0, 1, 2]

    def makes(*wires):
        return lambda joining, *_: [joining(ranks) for ranks in wires]

    check_ends(by_hand(makes(one, other), makes(one, other), makes(other)))
    with pytest.raises(Stuck, match="make the wire"):
        check_ends(by_hand(makes(one, other), makes(other, one), makes(other)))


def sums_many(joining, _, x):
    Group(joining([0, 1])).all_reduce([x() for _ in range(300)])


def test_a_group_of_300_operations():
    ranks = by_hand(sums_many, sums_many)
    check(ranks)
    assert [len(call.ops) for _, call in ranks[0].calls] == [256, 44]
    with patch.object(native, "MOST_TOGETHER", 300), pytest.raises(Illegal, match="more than 256"):
        check_legal(by_hand(sums_many, sums_many))


def test_what_nccl_has_not():
    def gathers_odd_parts(joining, rank, x):
        whole = x().to(torch.complex64)
        joining([0, 1]).cards.all_gather(whole[1:15], whole[1:8], [7, 7])

    problems = {problem for problem, _ in broken(by_hand(gathers_odd_parts)[0])}
    assert problems >= {"NCCL has no such dtype", UNALIGNED}
