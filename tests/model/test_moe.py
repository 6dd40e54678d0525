"""A mixture of experts against plain loops over tokens, and its losses against short formulas."""

from dataclasses import replace
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from random_model import LATENT, LLAMA, random_model, random_tokens

from howdah.model.attention import Cache
from howdah.model.grouped import grouped
from howdah.model.moe import Balancing, Router, choose
from howdah.model.places import places
from howdah.plan.method import Routing
from howdah.shapes.dims import expert_places
from howdah.shapes.shape import Experts

KINDS = {
    "softmax": Experts(6, 2, 10),
    "not normalised": Experts(6, 3, 10, normalise=False, scale=2.0),
    "shared": Experts(4, 2, 10, shared=7, shared_gate=True),
    "sigmoid in groups": Experts(
        8,
        3,
        10,
        shared=7,
        scores="sigmoid",
        scale=2.5,
        groups=4,
        top_groups=2,
        group_best=2,
        bias=True,
    ),
}
every_kind = pytest.mark.parametrize("experts", KINDS.values(), ids=KINDS)


def block_of(experts, *, dtype=torch.float64):
    return random_model(replace(LLAMA, layers=1, experts=experts), dtype=dtype).layers["0"]


def tokens_of(rows=3, length=7, *, dtype=torch.float64, seed=2):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, LLAMA.width, generator=draw, dtype=torch.float64).to(dtype)


def chosen_by_a_loop(scores, experts, bias):
    """The numbers of one token's experts, best first."""
    scores = scores if bias is None else scores + bias
    size = experts.count // experts.groups
    groups = [sorted(range(g * size, (g + 1) * size)) for g in range(experts.groups)]
    best = [sum(sorted((scores[e] for e in g), reverse=True)[: experts.group_best]) for g in groups]
    order = sorted(range(experts.groups), key=lambda g: -best[g])[: experts.top_groups]
    left = [e for g in order for e in groups[g]]
    return sorted(left, key=lambda e: -scores[e])[: experts.top_k]


def feedforward(x, gate, up, down):
    return down @ (F.silu(gate @ x) * (up @ x))


def mixture_by_a_loop(block, experts, x, capacity=0.0):
    """Token after token, expert after expert."""
    full, out = [[0] * experts.count for _ in x], torch.zeros_like(x)
    of = block.experts
    matrices = of.gate.weight, of.up.weight, of.down.weight
    most = ceil(capacity * x.shape[1] * experts.top_k / experts.count) if capacity else x.shape[1]
    for row, position in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        one = x[row, position]
        logits = block.router.weight @ one
        scores = logits.softmax(0) if experts.scores == "softmax" else logits.sigmoid()
        numbers = chosen_by_a_loop(scores, experts, block.router.bias)
        total = sum(scores[e] for e in numbers) if experts.normalise else 1
        for e in numbers:
            full[row][e] += 1
            if full[row][e] <= most:
                made = feedforward(one, *(matrix[e] for matrix in matrices))
                out[row, position] += experts.scale * scores[e] / total * made
        if experts.shared:
            shared = block.shared
            more = feedforward(one, shared.gate.weight, shared.up.weight, shared.down.weight)
            if experts.shared_gate:
                more = more * (block.shared_gate.weight @ one).sigmoid()
            out[row, position] += more
    return out


@every_kind
@pytest.mark.parametrize("capacity", [0.0, 1.0, 0.6])
def test_a_mixture_is_a_loop_over_tokens_and_their_experts(experts, capacity):
    block, x = block_of(experts), tokens_of().requires_grad_()
    rows = torch.full((3,), 7)
    balancing = Balancing(Routing(capacity=capacity), rows, 21.0)
    found = block.mixture(x, "layers.0", balancing)
    expected = mixture_by_a_loop(block, experts, x, capacity)
    torch.testing.assert_close(found, expected)
    if capacity in (0.0, 0.6):
        assert (balancing.loads["layers.0"].dropped > 0) == (capacity > 0)
    weights = [x, *block.router.parameters(), *block.experts.parameters()]
    draw = torch.randn_like(found)
    for mine, other in zip(
        torch.autograd.grad(found, weights, draw, allow_unused=True),
        torch.autograd.grad(expected, weights, draw, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


@every_kind
def test_the_losses_of_a_router_by_a_short_formula_for_each_sequence(experts):
    """Their value, and their gradient, which enters at the logits."""
    x, how = tokens_of().requires_grad_(), Routing(balance_loss=0.3, z_loss=0.2)
    router = block_of(experts).router
    labelled = torch.tensor([7, 4, 0])
    balancing = Balancing(how, labelled, 11.0)
    choice = router(x, "layers.0", balancing)
    load = balancing.loads["layers.0"]

    total = 0
    for row, count in zip(x, labelled.tolist(), strict=True):
        logits = row @ router.weight.T
        scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
        chosen = [chosen_by_a_loop(one, experts, router.bias) for one in scores]
        often = torch.tensor([sum(e in some for some in chosen) for e in range(experts.count)])
        often = often * experts.count / (experts.top_k * len(row))
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        total = total + count * 0.3 * (often * mean).sum()
        total = total + count * 0.2 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(load.loss, total)
    mine = torch.autograd.grad(choice.weights.sum() * 0, [x, router.weight])
    theirs = torch.autograd.grad(total / 11.0, [x, router.weight])
    torch.testing.assert_close(mine, theirs)


def test_choices_are_counted_once_and_padding_is_not():
    experts, x = KINDS["softmax"], tokens_of()
    router = block_of(experts).router
    balancing = Balancing(Routing(capacity=0.7), torch.tensor([7, 1, 0]), 8.0)
    numbers = router(x, "layers.0", balancing).numbers
    load = balancing.loads["layers.0"]
    counts = numbers[:2].flatten(1)
    expected = torch.stack([(counts == e).sum(1) for e in range(6)], 1)
    assert load.tokens.tolist() == expected.sum(0).tolist()
    assert load.dropped == (expected - expert_places(experts, 7, 0.7)).clamp(min=0).sum() > 0


def test_the_losses_do_not_depend_on_which_sequences_share_a_micro_batch():
    """The mean over a whole micro-batch would: this is what a mean over ranks gets wrong."""
    x, router = tokens_of(rows=4), block_of(KINDS["softmax"]).router
    rows, how = torch.tensor([7, 3, 5, 2]), Routing(balance_loss=1.0, z_loss=0.1)

    def loss(some):
        balancing = Balancing(how, rows[some], 17.0)
        router(x[some], "layers.0", balancing)
        return balancing.loads["layers.0"].loss

    together = loss(slice(None))
    for parts in ((slice(0, 2), slice(2, 4)), (slice(0, 1), slice(1, 4))):
        torch.testing.assert_close(sum(map(loss, parts)), together)


def test_tokens_beyond_the_capacity_are_dropped_by_position():
    experts = Experts(4, 1, 8, normalise=False)
    numbers = torch.tensor([[[0], [0], [1], [0], [0]], [[2], [2], [2], [0], [3]]])
    at = places(numbers, experts, 1.0)  # ceil(5 / 4) = 2 of each sequence
    assert at.sizes == (4, 4, 4, 4)
    taken = at.rows.view(4, 2, 2).tolist()  # expert, sequence, place: the number of a token
    assert taken[0] == [[0, 1], [8, 10]]  # tokens 3 and 4 of the first sequence are dropped
    assert taken[1] == [[2, 10], [10, 10]] and taken[2] == [[10, 10], [5, 6]]
    assert (at.slots == len(at.rows)).tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [
        True,
        False,
        False,
    ]


def test_a_router_computes_in_float32_at_least():
    """Scores of bfloat16 would tie; float64 must stay float64."""
    experts = KINDS["softmax"]
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        choice = block_of(experts, dtype=dtype).router(tokens_of(dtype=dtype), "", None)
        assert choice.weights.dtype == wide
        torch.testing.assert_close(choice.weights.sum(-1), torch.ones_like(choice.weights[:, 0]))


def test_a_bias_moves_the_choice_and_not_the_weights():
    experts = Experts(4, 2, 8, bias=True)
    router = Router(experts, 3)
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert choose(scores, torch.tensor([0.0, 0, 0, 1]), experts).tolist() == [3, 0]
    router.weight.data, router.bias.data = torch.eye(4, 3), torch.tensor([0.0, 0, 0, 5])
    x = torch.tensor([[[3.0, 2, 1]]])
    choice = router(x, "", None)
    scores = torch.tensor([3.0, 2, 1, 0]).softmax(0)
    assert choice.numbers.tolist() == [[[3, 0]]]
    torch.testing.assert_close(choice.weights, (scores[[3, 0]] / scores[[3, 0]].sum())[None])
    choice.weights[0, 0].backward()
    assert router.bias.grad.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_grouped_product_is_one_for_each_expert(dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(3, 5, 4, generator=draw).to(dtype).requires_grad_()
    out = grouped(x, weight, (2, 0, 7))
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    torch.testing.assert_close(out, expected)
    given = torch.randn(1, 1, generator=draw).to(dtype).expand(9, 5)  # strides of zero
    for mine, other in zip(
        torch.autograd.grad(out, [x, weight], given),
        torch.autograd.grad(expected, [x, weight], given),
        strict=True,
    ):
        torch.testing.assert_close(mine.to(dtype), other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("query_rank", [0, 12])
def test_decoding_token_by_token_is_the_whole_forward_pass(query_rank):
    """Latent attention keeps keys and values; experts take the tokens that come."""
    latent = replace(LATENT.latent, query_rank=query_rank)
    shape = replace(LATENT, latent=latent, experts=KINDS["sigmoid in groups"])
    model, (tokens, positions) = random_model(shape), random_tokens(shape, 2, 6)
    cache, parts = Cache(), []
    for at in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)):
        parts.append(model(tokens[:, at], positions[:, at], cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens, positions))
