"""Chosen algorithms on real ranks: bits of the in-process executor, bytes of the programs.

Every algorithm runs on every number of ranks that it takes, over gloo and over the engine, on
vectors of lengths that cannot be divided, whose order of additions shows in the last bits.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.collectives.check import problems
from howdah.collectives.choice import chunk_sizes, sent_to
from howdah.collectives.execute import run
from howdah.collectives.meaning import OPERATIONS
from howdah.collectives.places import GIVEN, KEPT, SCRATCH, way_of
from howdah.collectives.program import OUT, WORK, Message, X, chunk
from howdah.collectives.program import program as listed
from howdah.collectives.registry import ALGORITHMS, build
from howdah.comm.chosen import algorithms_of, choosing, require_usable
from howdah.comm.group import Group
from howdah.comm.meeting import CPU
from howdah.comm.programs import OnTensors
from howdah.comm.rendezvous import _Connecting
from howdah.comm.signature import Disagreement
from howdah.comm.spawn import Workers
from howdah.plan.comm import Algorithms

KINDS = ["engine", "tcp", "torch"]
LENGTHS = [0, 1, 5, 67]
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def numbers(salt, length):
    """float32 of very different size."""
    draw = np.random.default_rng(salt)
    wide = draw.normal(size=length) * 10.0 ** draw.integers(-2, 3, size=length)
    return wide.astype(np.float32)


def counts_of(op, ranks, length):
    """Elements of each block: of one vector, of each rank's, or of each pair's; uneven."""
    blocks = ranks ** OPERATIONS[op].blocks
    counts = [min(1, length // blocks)] * blocks
    counts[1 % blocks] += length - sum(counts)
    return counts


def inputs_of(program, counts):
    """The input of every rank."""
    op, ranks, total = program.op, program.ranks, sum(counts)
    if op in REDUCTIONS:
        return [numbers(rank, total) for rank in range(ranks)]
    if op in ("broadcast", "scatter"):
        return [numbers(7, total if rank == program.root else 0) for rank in range(ranks)]
    if op == "all_to_all":
        rows = [sum(counts[rank * ranks : (rank + 1) * ranks]) for rank in range(ranks)]
        return [numbers(rank, row) for rank, row in enumerate(rows)]
    return [numbers(rank, counts[rank]) for rank in range(ranks)]


def call(wire, program, counts, given):
    """Calls the operation on this rank; its result and the bytes it sent. Inputs must stay."""
    op, rank, ranks, total = program.op, wire.rank, wire.size, sum(counts)
    given = torch.from_numpy(given.copy())
    before, root = given.clone(), program.root
    whole = torch.full((total,), 55.0)
    if op == "all_reduce":
        return given, wire.all_reduce(given)
    if op == "broadcast":
        out = given if rank == root else whole
        return out, wire.broadcast(out, root)
    if op == "reduce":
        sent = wire.reduce(given, root)
        assert rank == root or torch.equal(given, before)
        return given if rank == root else given[:0], sent
    if op == "all_to_all":
        here, there = counts[rank * ranks : (rank + 1) * ranks], counts[rank::ranks]
        out = torch.full((sum(there),), 55.0)
        sent = wire.all_to_all(out, given, here, there)
    elif op == "reduce_scatter":
        out = torch.full((counts[rank],), 55.0)
        sent = wire.reduce_scatter(out, given, counts)
        within = given.clone()
        wire.reduce_scatter(within.split(counts)[rank], within, counts)
        expected = given.clone()
        expected.split(counts)[rank].copy_(out)
        assert torch.equal(within, expected), "in place, the rest is left as it was"
    elif op == "scatter":
        out = torch.full((counts[rank],), 55.0)
        sent = wire.scatter(out, given if rank == root else None, root, counts)
    elif op == "gather":
        sent = wire.gather(whole if rank == root else None, given, root, counts)
        out = whole if rank == root else whole[:0]
    else:
        out, sent = whole, wire.all_gather(whole, given, counts)
    assert torch.equal(given, before), f"{op} writes its input"
    return out, sent


def usable(ranks):
    """Every algorithm that takes so many ranks, with its program and, of rooted ones, a root."""
    for name, algorithm in ALGORITHMS.items():
        options = {"root": ranks - 1} if "root" in algorithm.options else {}
        try:
            yield name, build(name, ranks, **options)
        except UserError:
            continue


def every_algorithm(transport):
    found = []
    for name, program in usable(transport.size):
        op, _, algorithm = name.partition("/")
        wire = choosing(transport, Algorithms(**{op: algorithm}))
        if op == "barrier":
            wire.barrier()
            continue
        for length in LENGTHS:
            counts = counts_of(op, transport.size, length)
            given = inputs_of(program, counts)[transport.rank]
            out, sent = call(wire, program, counts, given)
            found.append((name, length, out.numpy().tobytes(), sent))
    return found


def check(team, kind, ranks):
    """Compares all results with those of the executor, and bytes with the program's."""
    by_rank = team.run(every_algorithm, ranks=ranks, transport=kind)
    programs = dict(usable(ranks))
    for at, (name, length, *_) in enumerate(by_rank[0]):
        program = programs[name]
        counts = counts_of(program.op, ranks, length)
        sizes = chunk_sizes(program, counts)
        told = 8 * ranks * (ranks - 1) * (name in ("all_to_all/bruck", "all_to_all/hierarchical"))
        expected = run(program, inputs_of(program, counts), sizes=sizes)
        for rank, right in enumerate(expected):
            bits, sent = by_rank[rank][at][2:]
            assert bits == right.tobytes(), (name, length, rank)
            assert sent == 4 * sent_to(program, rank, sizes).total() + told, (name, length, rank)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("ranks", "kind"), [(3, "torch"), (4, "engine"), (4, "tcp")])
def test_every_algorithm_gives_the_bits_of_the_executor(workers, kind, ranks):
    check(workers, kind, ranks)


@pytest.fixture(scope="module")
def eight():
    """Eight processes."""
    with Workers(8) as team:
        yield team


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_algorithm_on_two_to_eight_ranks(eight, kind, ranks):
    check(eight, kind, ranks)


def copied_before(ranks=2):
    """An all-reduce in which a chunk is copied in the turn in which another one arrives there."""
    every, here = range(ranks), chunk(0)
    part = [Message(0, rank, rank, here, reads=X, writes=OUT) for rank in every]
    part += [Message(1, rank, rank, here, reads=X, writes=WORK) for rank in every]
    part += [Message(1, rank, 1 - rank, here, reads=OUT, writes=X) for rank in every]
    part += [Message(2, rank, rank, here, add=True, reads=WORK, writes=X) for rank in every]
    return listed("all_reduce", "copied_before", ranks, 1, part)


def run_here(transport):
    way, x = way_of(copied_before(), transport.rank, [3]), torch.arange(3.0) + transport.rank
    memories = {GIVEN: x, KEPT: x, SCRATCH: torch.empty(way.scratch)}
    transport.carry("copied_before", OnTensors(way, memories))
    return x.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_waits_for_what_is_read_before_it(workers, kind):
    assert problems(copied_before()) == []
    assert workers.run(run_here, ranks=2, transport=kind) == [[1.0, 3.0, 5.0]] * 2


# -- what a group does with them


def in_a_group(transport, dtype):
    """Sums of every kind, alone, several together and asynchronous; and their rows of bytes."""
    chosen = Algorithms(all_reduce="ring to 100 B, two_shot", broadcast="binomial")
    group, found = Group(choosing(transport, chosen), axis="dp"), []
    terms = [torch.arange(n).add_(transport.rank).to(dtype) for n in (7, 0, 60, 3)]
    for op in ("sum", "mean", "min", "max", "product"):
        x = terms[0].clone()
        group.all_reduce(x, op=op)
        found.append(x.float().tolist())
    group.all_reduce(several := [x.clone() for x in terms], async_op=True).result()
    with group.together(async_op=True) as handle:
        group.all_reduce(alone := terms[2].clone())
        group.broadcast(cast := terms[0].clone(), 1)
        group.exchange(came := torch.zeros(2), torch.ones(2), *_neighbours(transport))
    handle.result()
    found += [x.float().tolist() for x in (*several, alone, cast, came)]
    total = group.sum_scalars([1.0])
    group.close()
    return found, total, {row[1]: count for row, count in group.counters.sent().items()}


def _neighbours(transport):
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_runs_them_in_every_way(workers, kind, dtype):
    terms = [torch.arange(60.0).add(rank) for rank in range(3)]
    stacked = torch.stack(terms)
    short = stacked[:, :7]
    ways = [short.sum(0), short.mean(0), short.amin(0), short.amax(0), short.prod(0)]
    ways += [short.sum(0), stacked[:, :0].sum(0), stacked.sum(0), stacked[:, :3].sum(0)]
    ways += [stacked.sum(0), terms[1][:7], torch.ones(2)]
    for rank, (found, total, sent) in enumerate(
        workers.run(in_a_group, dtype, ranks=3, transport=kind)
    ):
        assert found == [x.to(dtype).float().tolist() for x in ways], rank
        assert total == [3.0]
        assert set(sent) == {"all_reduce", "broadcast", "send", "scalars"} - (
            {"broadcast"} if rank != 1 else set()
        )


def a_share(transport):
    """An all-reduce of which one part goes the transport's own way: counted by its halves."""
    group = Group(choosing(transport, Algorithms(all_reduce="default to 16 B, ring")))
    group.all_reduce([torch.ones(4), torch.ones(8)])
    group.close()
    return {row[1]: count for row, count in group.counters.sent().items()}


def test_small_ones_go_the_transports_own_way(workers):
    both = {"reduce_scatter": 8, "all_gather": 8, "all_reduce": 32}
    assert workers.run(a_share, ranks=2) == [both, both]


# -- what is refused


def others(transport, kind):
    """Ranks that disagree; the error of each."""
    texts = {"algorithm": ["ring", "tree"], "none": ["ring", ""], "size": ["ring", "ring"]}[kind]
    wire = choosing(transport, Algorithms(all_reduce=texts[transport.rank]))
    try:
        wire.all_reduce(torch.ones(8 + (kind == "size") * transport.rank))
    except Disagreement as error:
        return str(error)
    return "nothing"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["algorithm", pytest.param("size", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", KINDS)
def test_ranks_that_disagree_are_told(ended_workers, wire, kind):
    for said in ended_workers.run(others, kind, ranks=2, transport=wire):
        first, second = ("ring", "tree") if kind == "algorithm" else ("[8]", "[9]")
        assert "all_reduce(float32 [8" in said and first in said and second in said


@pytest.mark.slow
@pytest.mark.parametrize("wire", KINDS)
def test_a_rank_that_has_chosen_nothing_is_told(ended_workers, wire):
    for said in ended_workers.run(others, "none", ranks=2, transport=wire):
        assert said.count("rank ") >= 2 and "all_reduce(float32 [8], sum" in said


def meeting(transport, texts):
    """Ranks that meet with these algorithms; what they are told."""
    store, rank = transport.among.store, transport.rank
    try:
        connecting = _Connecting(None, 60, CPU, store, said=texts[rank])
        connecting(dist.PrefixStore("meet again", store), rank, transport.size)
    except UserError as problem:
        return str(problem)
    return "met"


def test_ranks_that_meet_with_other_algorithms_are_told(workers):
    said = "rank 0 chooses the algorithm all_reduce ring and rank 1 none"
    assert workers.run(meeting, ["all_reduce ring", ""], ranks=2) == [said, said]


def test_what_a_caller_may_name():
    assert algorithms_of("") == Algorithms()
    assert algorithms_of("pairwise").by_operation == {
        "reduce_scatter": "pairwise",
        "all_to_all": "pairwise",
    }
    with pytest.raises(UserError, match=r"^no operation is called 'all_reduc'; did you mean"):
        algorithms_of({"all_reduc": "ring"})
    with pytest.raises(UserError, match=r"^all_reduce has no algorithm 'rign'; did you mean 'ri"):
        algorithms_of({"all_reduce": "rign"})
    with pytest.raises(UserError, match="needs a power of two of ranks, not 6; use 4 or 8, or "):
        require_usable(algorithms_of("hypercube"), 6)
    require_usable(algorithms_of("hypercube"), 8)
