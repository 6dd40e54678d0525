"""Hierarchies on real ranks of several hosts, in blocks and dealt: bits, and bytes by card."""

from contextlib import closing, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_link_selection import apart

from howdah.collectives.choice import chunk_sizes, placement, program_of
from howdah.collectives.execute import run
from howdah.comm.chosen import algorithms_of, choosing, near_sent
from howdah.comm.frames import FrameError
from howdah.comm.near import Near
from howdah.comm.rendezvous import choose
from howdah.comm.spawn import Workers
from howdah.comm.transport import PeerLost

PLACES = ["aabb", "abab"]
OPS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
LENGTH, ROOT = 12 * 10_001, 2  # each rank's block has odd pieces


def inputs(ranks):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(LENGTH, generator=draw) for _ in range(ranks)]


def on_hosts(transport, machines):
    """By operation: the result, and the bytes that went over shared memory and over the card."""
    rank, ranks, found = transport.rank, transport.size, {}
    store = dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        closing(choose(store, rank=rank, size=ranks, secret=b"s" * 32)) as far,
    ):
        chosen = choosing(far, algorithms_of(dict.fromkeys(OPS, "hierarchical pieces=3")))
        block, counts = LENGTH // ranks, [LENGTH // ranks] * ranks
        for op in OPS:
            x, before = inputs(ranks)[rank], near_sent(chosen)
            if op == "all_reduce":
                out, sent = x, chosen.all_reduce(x)
            elif op == "broadcast":
                out, sent = x, chosen.broadcast(x, ROOT)
            elif op == "reduce_scatter":
                out = torch.empty(block)
                sent = chosen.reduce_scatter(out, x, counts)
            else:
                out = torch.empty(LENGTH)
                sent = chosen.all_gather(out, x[rank * block :][:block].clone(), counts)
            near = near_sent(chosen) - before
            found[op] = out, near, sent - near
        chosen.close()
    return found


@pytest.mark.parametrize("machines", PLACES)
def test_each_byte_crosses_a_card_once(workers, machines):
    """All-reduce n, its halves n/2, a broadcast n from the root's host: the least there is."""
    by_rank = workers.run(on_hosts, machines, ranks=4)
    each, order = placement([machines.index(name) for name in machines])
    for op, (least, cast) in {
        "all_reduce": (1.0, False),
        "reduce_scatter": (0.5, False),
        "all_gather": (0.5, False),
        "broadcast": (1.0, True),
    }.items():
        for name in "ab":
            far = sum(by_rank[rank][op][2] for rank in range(4) if machines[rank] == name)
            is_sender = not cast or machines[ROOT] == name
            assert far == pytest.approx(4 * LENGTH * least * is_sender, rel=1e-3), op
        text = algorithms_of({op: "hierarchical pieces=3"})
        root = ROOT if op == "broadcast" else 0
        one = program_of(text, op, size=1, ranks=4, root=root, per_node=each, order=order).program
        given = [x.numpy() for x in inputs(4)]
        counts = [LENGTH] if op in ("all_reduce", "broadcast") else [LENGTH // 4] * 4
        if op == "broadcast":
            given = [x[: LENGTH * (rank == ROOT)] for rank, x in enumerate(given)]
        if op == "all_gather":
            given = [x[LENGTH // 4 * rank :][: LENGTH // 4] for rank, x in enumerate(given)]
        right = run(one, given, sizes=chunk_sizes(one, counts))
        for rank, bits in enumerate(right):
            assert by_rank[rank][op][0].numpy().tobytes() == bits.tobytes(), (op, rank)


def narrow(transport):
    """Sums of bf16 by a hierarchy of one host, directly, and along a ring."""
    found = {}
    for text in ("hierarchical per_node=4", "two_shot", "ring"):
        x = inputs(4)[transport.rank].bfloat16()
        choosing(transport, algorithms_of({"all_reduce": text})).all_reduce(x)
        found[text] = x.float()
    return found


@pytest.mark.parametrize("kind", ["engine", "tcp"])
def test_bf16_is_rounded_once_where_a_stage_adds(workers, kind):
    """A stage inside of a host adds the terms of all its ranks in float32; in a ring, a partial sum
    travels in bf16 and is rounded on each rank.
    """
    terms = torch.stack([x.bfloat16().double() for x in inputs(4)])
    exact = terms.sum(0)
    once = torch.nextafter(exact.bfloat16().abs(), torch.tensor(1e9).bfloat16()).double()
    step = (once - exact.bfloat16().abs().double()).clamp_min(1e-30)  # to the next number
    for found in workers.run(narrow, ranks=4, transport=kind):
        off = {text: ((x.double() - exact).abs() / step) for text, x in found.items()}
        assert off["two_shot"].max() <= 0.5001
        assert off["hierarchical per_node=4"].max() <= 0.5001
        assert off["ring"].max() > 0.75


def gives_up(transport, machines):
    """Rank 3 finds a damaged frame while rank 2 waits for it in shared memory; what each says."""
    rank, store = transport.rank, dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        closing(choose(store, rank=rank, size=4, secret=b"s" * 32, seconds=20)) as far,
    ):
        chosen = choosing(far, algorithms_of({"all_reduce": "hierarchical"}))
        damaged = patch.object(Near, "__call__", side_effect=FrameError("a frame is damaged"))
        with damaged if rank == 3 else nullcontext(), pytest.raises(PeerLost) as told:
            chosen.all_reduce(torch.ones(100))
        transport.barrier()  # until now, nobody has left
        chosen.close()
    return str(told.value)


def test_who_waits_in_shared_memory_is_told_of_what_came_over_the_wire(workers):
    """It waited until its deadline, and then named a rank that had done nothing."""
    said = workers.run(gives_up, "aabb", ranks=4)
    assert said[3].startswith("a frame is damaged, as rank 3 saw")
    assert all("this rank called all_reduce(float32 [100], sum, " in one for one in said)
    assert all("a frame is damaged, as rank 3 saw" in one for one in said)


@pytest.fixture(scope="module")
def six():
    """Six processes."""
    with Workers(6) as team:
        yield team


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["abcabc", "aabbcc", "abbcca"])
def test_three_hosts(six, machines):
    by_rank = six.run(on_hosts, machines, ranks=6)
    total = sum(x.double() for x in inputs(6))
    whole = torch.cat([inputs(6)[rank][rank * LENGTH // 6 :][: LENGTH // 6] for rank in range(6)])
    for rank, found in enumerate(by_rank):
        block = slice(rank * LENGTH // 6, (rank + 1) * LENGTH // 6)
        torch.testing.assert_close(found["all_reduce"][0].double(), total, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found["reduce_scatter"][0].double(), total[block], rtol=0, atol=1e-5
        )
        assert torch.equal(found["all_gather"][0], whole)
        assert torch.equal(found["broadcast"][0], inputs(6)[ROOT])


def narrow_between(transport, machines, cache, dtype):
    """A sum and a mean in a narrow type, by stages inside of hosts and between them."""
    found = []
    with apart(transport, machines, cache) as wire:
        chosen = choosing(wire, algorithms_of({"all_reduce": "hierarchical"}))
        for op in ("sum", "mean"):
            x = inputs(4)[wire.rank].to(dtype)
            chosen.all_reduce(x, op)
            found.append(x.double())
        if chosen.near:
            chosen.near.close()
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("machines", ["aabb", "abab"])
@pytest.mark.parametrize(("dtype", "half"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_types_are_rounded_once_a_stage_between_hosts(
    workers, tmp_path, machines, dtype, half
):
    """Once inside of a host, and once between; a mean is one more division."""
    terms = torch.stack([x.to(dtype).double() for x in inputs(4)])
    most = terms.abs().sum(0) * half * 1.02
    for total, mean in workers.run(narrow_between, machines, tmp_path, dtype, ranks=4):
        assert ((total - terms.sum(0)).abs() <= 2 * most).all()
        assert ((mean - terms.mean(0)).abs() <= 3 * most / 4).all()
