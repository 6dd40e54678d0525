"""Long messages of the direct way go in turns (`direct.paced`): who sends to whom, and that what
comes of it is what it was, also where operations of unequal sizes start together.
"""

from random import Random

import pytest
import torch

from howdah.comm.direct import LONG, paced
from howdah.comm.rounds import Round


def exchange(size, elements):
    """The turns of every rank, where rank r sends elements[r][p] to p."""
    found = []
    for rank in range(size):
        others = [(rank + hop) % size for hop in range(1, size)]
        sends = [(torch.empty(elements[rank][peer]), peer) for peer in others]
        receives = [(torch.empty(elements[peer][rank]), peer) for peer in others]
        found.append(paced(rank, size, Round(sends, receives, lambda: "after")))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_of_a_message_have_it_in_the_same_turn(seed):
    draw = Random(seed)
    size = draw.randint(2, 7)
    sizes = [0, 5, LONG // 4 - 1, LONG // 4, LONG]
    elements = [[draw.choice(sizes) for _ in range(size)] for _ in range(size)]
    turns = exchange(size, elements)
    assert {len(one) for one in turns} == {size if size > 2 else 1}
    for number, every in enumerate(zip(*turns, strict=True)):
        sent = {(rank, to, x.numel()) for rank, one in enumerate(every) for x, to in one.sends}
        come = {(of, rank, x.numel()) for rank, one in enumerate(every) for x, of in one.receives}
        assert sent == come
        for rank, one in enumerate(every):
            for messages in (one.sends, one.receives):
                long = [x for x, _ in messages if x.nbytes >= LONG]
                if size > 2:
                    assert len(long) <= min(number, 1)
                    assert number == 0 or len(messages) == len(long)
            assert (one.after() == "after") == (number == len(turns[0]) - 1), rank
    whole = [(rank, to) for rank, one in enumerate(turns) for turn in one for _, to in turn.sends]
    assert sorted(whole) == [(r, p) for r in range(size) for p in range(size) if r != p]


def whole(transport, seed):
    """Operations of sizes around LONG, one by one and together; their results."""
    draw, size, rank = Random(seed), transport.size, transport.rank
    sent = [[draw.choice([0, 3, LONG, LONG // 8]) for _ in range(size)] for _ in range(size)]
    received = [sent[peer][rank] for peer in range(size)]
    counts = [draw.choice([0, 7, LONG // 8]) for _ in range(size)]
    torch.manual_seed(rank)
    found = []

    def start(dtype):
        x = torch.randn(sum(sent[rank])).to(dtype)
        out = torch.empty(sum(received), dtype=dtype)
        transport.all_to_all(out, x, sent[rank], received)
        both = torch.randn(LONG + 5).to(dtype)
        transport.all_reduce(both)
        mine, every = torch.randn(counts[rank]).to(dtype), torch.empty(sum(counts), dtype=dtype)
        transport.all_gather(every, mine, counts)
        part, parts = torch.empty(counts[rank], dtype=dtype), torch.randn(sum(counts)).to(dtype)
        transport.reduce_scatter(part, parts, counts)
        found.extend([out, both, every, part])

    start(torch.float32)
    start(torch.bfloat16)
    with transport.group():
        start(torch.float64)
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["tcp", "torch"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_have_the_bits_of_shared_memory(workers, kind, ranks):
    for seed in (1, 2):
        one = workers.run(whole, seed, ranks=ranks, transport=kind)
        other = workers.run(whole, seed, ranks=ranks, transport="engine")
        for mine, theirs in zip(one, other, strict=True):
            assert len(mine) == 12 and all(map(torch.equal, mine, theirs))
