"""Capacity and balance of sequences that ranks share: those of whole sequences."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howdah.model.moe import Balancing, Choice, count_hits, places_of
from howdah.model.places import Spread, places
from howdah.model.sequences import WHOLE_SEQUENCES
from howdah.parallel.context_counts import SharedSequences
from howdah.plan.layout import parse_layout
from howdah.plan.method import Routing
from howdah.plan.sharding import chunks
from howdah.shapes.shape import Experts

EXPERTS = Experts(5, 2, 8)


class Told:
    """The group of one rank of cp; what the others tell was computed before."""

    def __init__(self, rank, every):
        self.rank, self.size, self.every = rank, len(every), every

    def all_gather(self, out, x):
        assert torch.equal(x, self.every[self.rank])
        out.copy_(torch.cat(self.every))


def numbers_of(rows, length, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(rows, length, EXPERTS.count, generator=draw).topk(EXPERTS.top_k).indices


def of_rank(numbers, layout, rank):
    """What a rank has of the sequences, and its chunks."""
    cut = chunks(layout, numbers.shape[1], rank)
    return torch.cat([numbers[:, a:b] for a, b in cut], 1), cut


def sequences_on(numbers, layout, rank):
    every = []
    for other in range(layout.cp):
        cut = chunks(layout, numbers.shape[1], other)
        counted = [torch.nn.functional.one_hot(numbers[:, a:b], 5).sum((1, 2)) for a, b in cut]
        every.append(torch.stack(counted).to(torch.int32))
    plan = SimpleNamespace(layout=layout, sequence=numbers.shape[1])
    mesh = SimpleNamespace(cp=Told(rank, every), rank=rank, waited=torch.no_grad())
    return SharedSequences(plan, mesh)


@given(ways=st.integers(2, 4), rows=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_the_same_choices_are_dropped_as_of_whole_sequences(ways, rows, seed, data):
    length = data.draw(st.integers(2 * ways, 30))
    capacity = data.draw(st.sampled_from([0.5, 0.8, 1.0, 1.3, 9.0]))
    numbers, layout = numbers_of(rows, length, seed), parse_layout(f"cp{ways}")
    at = places(numbers, EXPERTS, capacity)
    kept = (at.slots < len(at.rows)).view(numbers.shape)
    dropped = 0
    for rank in range(ways):
        mine, cut = of_rank(numbers, layout, rank)
        balancing = Balancing(
            Routing(capacity=capacity),
            torch.ones(rows),
            1.0,
            sequences=sequences_on(numbers, layout, rank),
        )
        hits = count_hits(mine, EXPERTS.count, balancing)
        found = places_of(Choice(mine, torch.ones(1), hits), EXPERTS, balancing)
        wanted = torch.cat([kept[:, a:b] for a, b in cut], 1)
        assert torch.equal((found.slots < mine.numel()).view(mine.shape), wanted)
        # rows by expert, then by token; behind them as many empty ones as were dropped
        assert len(found.rows) == mine.numel() and sum(found.sizes) == int(wanted.sum())
        tokens = torch.arange(mine.shape[0] * mine.shape[1])[:, None].expand(-1, EXPERTS.top_k)
        pairs = zip(mine.flatten().tolist(), tokens.flatten().tolist(), strict=True)
        order = sorted(p for p, k in zip(pairs, wanted.flatten().tolist(), strict=True) if k)
        empty = [len(tokens)] * int((~wanted).sum())
        assert found.rows.tolist() == [token for _, token in order] + empty
        dropped += len(empty)
    assert dropped == int((~kept).sum())


def test_a_rank_that_keeps_no_token_has_empty_rows_alone():
    """Both experts of every token are full before this rank's tokens come."""
    layout, numbers = parse_layout("cp2"), torch.zeros(1, 8, 2, dtype=torch.long)
    numbers[..., 1] = 1
    (mine, _), routing = of_rank(numbers, layout, 1), Routing(capacity=0.6)
    balancing = Balancing(routing, torch.ones(1), 1.0, sequences=sequences_on(numbers, layout, 1))
    hits = count_hits(mine, EXPERTS.count, balancing)
    found = places_of(Choice(mine, torch.ones(1), hits), EXPERTS, balancing)
    assert found.sizes == (0,) * 5
    x = torch.randn(4, 3, requires_grad=True)
    taken = Spread.apply(x, found)
    assert not taken.any()
    taken.sum().backward()
    assert not x.grad.any()


def test_without_a_loss_or_a_capacity_nothing_is_told():
    numbers, layout = numbers_of(2, 9, 1), parse_layout("cp2")
    mine, _ = of_rank(numbers, layout, 0)
    sequences = sequences_on(numbers, layout, 0)
    sequences.hear = None
    balancing = Balancing(Routing(z_loss=1.0), torch.ones(2), 1.0, sequences=sequences)
    assert count_hits(mine, 5, balancing).every.sum() == mine.numel()
    with pytest.raises(TypeError):
        asked = replace(balancing, how=Routing(balance_loss=1.0))
        count_hits(mine, 5, asked)
    assert WHOLE_SEQUENCES.length(9) == 9 and WHOLE_SEQUENCES.runs(9) == (9,)
