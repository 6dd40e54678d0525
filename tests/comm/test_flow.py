"""Flows: whatever arrives first, results are those of the executor; and nothing waits in vain.

All ranks of a program are in this process. A made-up wire delivers one started message after the
other, in an order that is drawn, or keeps some back.
"""

from collections import defaultdict, deque
from random import Random

import numpy as np
import pytest
import torch

from howdah.base.errors import UserError
from howdah.collectives.choice import placement
from howdah.collectives.dealt import dealt
from howdah.collectives.execute import run, sizes_of
from howdah.collectives.meaning import begins, ends
from howdah.collectives.places import GIVEN, KEPT, SCRATCH, Transfer, way_of
from howdah.collectives.registry import ALGORITHMS, build
from howdah.comm.flow import Flows, Task, in_turns
from howdah.comm.programs import OnTensors
from howdah.comm.rounds import Round


class Wire:
    """Delivers the messages of all ranks: `started` are sends and receives by (from, to)."""

    def __init__(self, flows):
        self.flows = flows
        self.started = [defaultdict(deque), defaultdict(deque)]

    def start_of(self, rank):
        def start(numbers):
            for number in numbers:
                task = self.flows[rank].tasks[number]
                pair = (rank, task.peer) if task.sends else (task.peer, rank)
                self.started[not task.sends][pair].append(number)

        return start

    def begin(self):
        for rank, one in enumerate(self.flows):
            for peer in range(len(self.flows)):
                both = [one.first(peer, sends=sends) for sends in (True, False)]
                self.start_of(rank)([number for number in both if number is not None])

    def deliverable(self):
        return [pair for pair, some in self.started[0].items() if some and self.started[1][pair]]

    def deliver(self, pair):
        source, target = (self.flows[rank] for rank in pair)
        sent, heard = (queues[pair].popleft() for queues in self.started)
        pieces = zip(source.tasks[sent].tensors, target.tasks[heard].tensors, strict=True)
        for one, other in pieces:
            other.copy_(one)
        source.done(sent)
        target.done(heard)


def on_all(program, inputs, dtype):
    """The flow of each rank, and its result."""
    sizes, flows, results = sizes_of(program, inputs), [], []
    for rank, given in enumerate(inputs):
        way = way_of(program, rank, sizes)
        kept = torch.full((sum(sizes[c] for c in ends(program, rank)),), 55.0).to(dtype)
        x = torch.from_numpy(given.copy())
        if [*begins(program, rank)] == [*ends(program, rank)]:
            kept = x  # in place
        scratch = torch.full((way.scratch,), 77.0).to(dtype)
        flows.append(OnTensors(way, {GIVEN: x, KEPT: kept, SCRATCH: scratch}).flow())
        results.append(kept)
    return flows, results


def inputs_of(program, dtype, length=13):
    draw = np.random.default_rng(0)
    found = []
    for rank in range(program.ranks):
        own = len(begins(program, rank))
        wide = draw.normal(size=own * length) * 10.0 ** draw.integers(-1, 2, own * length)
        found.append(wide.astype(dtype))
    return found


def played(program, dtype, seed):
    """Results of all ranks when messages arrive in the order of a seed."""
    inputs, choose = inputs_of(program, dtype), Random(seed)
    flows, results = on_all(program, inputs, torch.from_numpy(inputs[0]).dtype)
    ranks = [Flows([flow]) for flow in flows]
    for one in ranks:
        one.ahead = choose.choice([0, 1, 100])
    wire = Wire(ranks)
    wire.begin()
    ended = [one.advance(wire.start_of(rank)) for rank, one in enumerate(ranks)]
    while not all(ended):
        pairs = wire.deliverable()
        assert pairs, f"{program.name} stands still"
        pair = choose.choice(pairs)
        wire.deliver(pair)
        for rank in pair:
            ended[rank] = ranks[rank].advance(wire.start_of(rank))
    return results, run(program, inputs)


def test_few_messages_to_one_peer_are_on_the_way_at_a_time():
    """Six of 8 bytes, of which 20 may be: a third is begun, for the two before it are less."""
    x = torch.zeros(2)
    sends = [Task(turn, (), peer, (x,), sends=True) for peer in (1, 2) for turn in range(6)]
    flows, began = Flows([sends]), []
    flows.ahead = 20
    flows.advance(began.extend)
    assert began == [0, 1, 2, 6, 7, 8]
    flows.done(1)
    flows.advance(began.extend)
    assert began[6:] == [3]
    flows.ahead = 0
    flows.advance(began.extend)
    assert began[7:] == [4, 5, 9, 10, 11]


def test_a_long_message_leaves_before_those_of_later_turns_to_others():
    """Two at once would share the card, and what waits for the first would wait longer."""
    long, short = torch.zeros(8), torch.zeros(1)
    for first, at_once in ((long, [0]), (short, [0, 1, 2])):
        sends = [Task(turn, (), 1 + turn, (first,), sends=True) for turn in range(3)]
        flows, began = Flows([sends]), []
        flows.ahead = 20
        flows.advance(began.extend)
        assert began == at_once
        for number in range(3):
            flows.done(number)
            flows.advance(began.extend)
        assert began == [0, 1, 2]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "barrier/dissemination"])
def test_results_do_not_depend_on_what_arrives_first(name):
    options = {"pieces": 3} if "pieces" in ALGORITHMS[name].options else {}
    for ranks in (2, 4, 6):
        try:
            program = build(name, ranks, **options)
        except UserError:
            continue
        for seed, dtype in ((0, np.float32), (1, np.float32), (2, np.float16)):
            for found, right in zip(*played(program, dtype, seed), strict=True):
                assert found.numpy().tobytes() == right.tobytes(), (ranks, seed)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_ranks_that_are_dealt_have_the_same_hierarchy(op):
    each, order = placement([0, 1, 2, 0, 1, 2])
    program = dealt(build(f"{op}/hierarchical", 6, per_node=each, pieces=2), order)
    results, right = played(program, np.float32, seed=3)
    inputs = inputs_of(program, np.float64)
    for rank, (found, bits) in enumerate(zip(results, right, strict=True)):
        assert found.numpy().tobytes() == bits.tobytes()
        if op == "reduce_scatter":
            total, own = sum(inputs), len(found)
            np.testing.assert_allclose(found, total[rank * own : (rank + 1) * own], atol=1e-4)


def test_every_task_comes_after_what_it_reads_and_writes():
    """By hand, on the second of two ranks with two pieces of a share."""
    program = build("reduce_scatter/segmented_ring", 2, pieces=2)
    told = []
    for turn, does, after in way_of(program, 1, [3, 3, 3, 3]).tasks:
        what = ("send" if does.sends else "receive") if isinstance(does, Transfer) else "add"
        told.append((turn, what, after))
    assert told == [
        (0, "send", ()),
        (0, "receive", ()),
        (0, "add", (1,)),
        (1, "send", ()),
        (1, "receive", ()),
        (1, "add", (4,)),
    ]


# -- what is under way together -------------------------------------------------------


def test_a_link_is_not_idle_while_pieces_are_added():
    """All first messages of the pieces start before any has arrived; of a ring in one piece, one.

    And a sum is sent on while the next piece has not come.
    """
    for pieces, first in ((1, {0}), (3, {0, 1, 2})):
        program = build("all_reduce/segmented_ring", 3, pieces=pieces)
        flows, _ = on_all(program, inputs_of(program, np.float32), torch.float32)
        one, started = Flows([flows[0]]), []
        both = [one.first(peer, sends=sends) for peer, sends in ((1, True), (2, False))]
        started += both
        assert not one.advance(started.extend)
        assert {one.tasks[n].turn for n in started if one.tasks[n].sends} == first
        heard = next(n for n in both if not one.tasks[n].sends)
        one.done(heard)
        assert not one.advance(started.extend)
        sent = {one.tasks[n].turn for n in started if one.tasks[n].sends}
        assert sent == first | {pieces}


def test_shared_memory_works_beside_the_wire():
    """Rank 0 of two hosts of two, in four pieces; nothing comes from the other host. The first
    piece is on the wire, the second one was summed inside meanwhile and follows it; the third
    waits, for in a call of shared memory nobody would move the wire.
    """
    program = build("all_reduce/hierarchical", 4, per_node=2, pieces=4)
    inputs = inputs_of(program, np.float32)
    flows, _ = on_all(program, inputs, torch.float32)
    passed, started = [], []

    def beside(sends, receives):
        passed.append((len(sends), len(receives)))
        for x, _ in receives:
            x.zero_()

    near = [task._replace(beside=beside) if task.peer == 1 else task for task in flows[0]]
    one = Flows([near])
    assert not one.advance(started.extend)
    assert passed == [(1, 1), (1, 1)]
    far = [one.tasks[number] for number in started]
    assert {task.peer for task in far} == {2}
    assert [task.turn for task in far if task.sends] == [1, 2]
    for number in [number for number in started if one.tasks[number].turn == 1]:
        one.done(number)
    assert not one.advance(started.extend)
    assert len(passed) == 3, "now the third"


def test_rounds_wait_for_each_other():
    """Those of direct exchanges, whose numbers are made by what comes between."""
    done, x = [], [torch.zeros(2) for _ in range(4)]
    rounds = [
        Round([(x[0], 1)], [(x[1], 1)], lambda: done.append("first")),
        Round([(x[2], 1)], [(x[3], 1)], lambda: done.append("second")),
    ]
    one, started = Flows([in_turns(rounds)]), []
    assert not one.advance(started.extend) and len(started) == 2
    one.done(started[0])
    assert not one.advance(started.extend) and len(started) == 2 and not done
    one.done(started[1])
    assert not one.advance(started.extend) and len(started) == 4 and done == ["first"]
    one.done(started[2])
    one.done(started[3])
    assert one.advance(started.extend) and done == ["first", "second"]


def test_messages_of_a_pair_keep_their_order():
    """The second could start, but its peer expects the first one before it."""
    wait = Task(0, ())
    late = Task(1, (0,), 1, (torch.zeros(1),), sends=True)
    free = Task(2, (), 1, (torch.zeros(1),), sends=True)
    one, started = Flows([[wait._replace(peer=2, tensors=(torch.zeros(1),)), late, free]]), []
    assert not one.advance(started.extend)
    assert started == [0]
    one.done(0)
    assert not one.advance(started.extend)
    assert started == [0, 1, 2]


def test_what_is_done_as_it_starts_lets_others_start():
    """A short send is in the kernel at once; a message that had waited for it alone was forgotten,
    and ranks waited for each other until their timeout.
    """
    x = (torch.zeros(1),)
    chain = [Task(turn, range(turn), 1 + turn % 2, x, sends=True) for turn in range(5)]
    one = Flows([[*chain, Task(5, range(5))]])
    assert one.advance(lambda numbers: [one.done(number) for number in numbers])
