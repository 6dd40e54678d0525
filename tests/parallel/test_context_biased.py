"""A T5's attention in a ring: blocks of keys, merged, are attention to all of them at once."""

import pytest
import torch

from howdah.model.partial import merge
from howdah.model.relative import RelativeTable, Seen, attend_seen
from howdah.parallel.context_biased import Biased
from howdah.plan.layout import parse_layout
from howdah.plan.sharding import chunks

ROWS, HEADS, LENGTH, SIZE = 2, 3, 13, 4
CPU = torch.device("cpu")


class Given:
    """A table's weight as a layout has it; keeps what it is given."""

    def __init__(self, table):
        self.table, self.total = table, torch.zeros_like(table)

    def value(self):
        return self.table

    def add(self, add):
        add(self.total)


def seen_of(kind, table):
    """What a decoder sees of its tokens, an encoder of texts with padding, a decoder of those."""
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 3])[:, None]  # padding fills whole blocks
    if kind == "decoder":
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return Seen(causal, table.bias(range(LENGTH), LENGTH, both_ways=False, device=CPU))
    bias = table.bias(range(LENGTH), LENGTH, both_ways=True, device=CPU)
    return Seen(real[:, None, None], bias if kind == "encoder" else None)


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "cross"])
def test_blocks_of_all_ranks_are_attention_to_all_tokens(kind, ways):
    table = RelativeTable(8, HEADS).double()
    torch.nn.init.normal_(table.weight, std=2.0)
    q, k, v, grad = torch.randn(4, ROWS, HEADS, LENGTH, SIZE, dtype=torch.float64).unbind()
    for one in (q, k, v):
        one.requires_grad_()
    expected = attend_seen(q, k, v, seen_of(kind, table))
    trained = (q, k, v, *([table.weight] if kind != "cross" else []))
    wanted = torch.autograd.grad(expected, trained, grad)

    weight = Given(table.weight.detach())
    del table.weight
    table.weight = weight
    layout = parse_layout(f"cp{ways}")
    places = [
        torch.cat([torch.arange(*chunk) for chunk in chunks(layout, LENGTH, rank)])
        for rank in range(ways)
    ]
    found = [torch.zeros_like(one) for one in (q, k, v)]
    with torch.no_grad():
        for rank, mine in enumerate(places):
            how = Biased(seen_of(kind, table), places, rank)
            heads = [(q[:, :, mine], k[:, :, theirs], v[:, :, theirs]) for theirs in places]
            out, sums = how.part(rank, heads[rank])
            for owner in range(ways):
                if owner != rank:
                    merge(out, sums, *how.part(owner, heads[owner]))
            torch.testing.assert_close(out, expected[:, :, mine], rtol=1e-10, atol=1e-12)
            for owner, theirs in enumerate(places):
                made = how.gradients(owner, grad[:, :, mine], heads[owner], (out, sums))
                for total, place, term in zip(found, (mine, theirs, theirs), made, strict=True):
                    total[:, :, place] += term
            how.done()
    found += [weight.total] if kind != "cross" else []
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
