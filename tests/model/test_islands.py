"""Each island is what plain torch computes, in value and gradients; compiled, it stays so.

The simplest true thing is autograd through the formula, in float64.
"""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from howdah.model.attention import rotate
from howdah.model.feedforward import swiglu
from howdah.model.islands import PLAIN, Drop, Islands, compiled, kept_of
from howdah.model.loss import Terms, cross_entropy_sum
from howdah.model.norm import How, added, added_and_normed, normed

WIDTH, EPSILON = 24, 1e-5
NEAR = {"rtol": 1e-12, "atol": 1e-13}


def random(*sizes, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(seed=0):
    """x and y [2, 5, width], weight and bias [width]."""
    sizes = ((2, 5, WIDTH), (2, 5, WIDTH), (WIDTH,), (WIDTH,))
    return [random(*size, seed=seed + i) for i, size in enumerate(sizes)]


def norm_by_hand(x, weight, bias):
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    mean, deviation = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (deviation + EPSILON).sqrt() * weight + bias


def both_ways(mine, by_hand, tensors):
    """Compares outputs, and the gradients of random sums of them."""
    found = []
    for run in (mine, by_hand):
        outs = run(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        pulls = [random(*out.shape, seed=90 + i).detach() for i, out in enumerate(outs)]
        total = sum((out * pull).sum() for out, pull in zip(outs, pulls, strict=True))
        used = [x for x in tensors if x is not None]
        found.append([*outs, *torch.autograd.grad(total, used)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, **NEAR)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def islands(request):
    if request.param == "plain":
        yield PLAIN
        return
    torch.compiler.reset()
    yield compiled("aot_eager")
    torch.compiler.reset()


DROPS = {
    "all": None,
    "some": Drop(torch.arange(10).view(2, 5) + 70, torch.tensor(-(1 << 61) + 12345), 0.3),
}
slow_warns = pytest.mark.filterwarnings("ignore")  # torch's compiler looks at tensors that warn


@slow_warns
@pytest.mark.parametrize("layer", [False, True], ids=["rmsnorm", "layernorm"])
def test_norm(islands, layer):
    x, _, weight, bias = inputs()
    tensors = (x, weight, bias if layer else None)
    both_ways(lambda *of: normed(*of, How(EPSILON, islands)), norm_by_hand, tensors)


@slow_warns
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("layer", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("used", ["both", "sum", "normed"])
def test_residual_and_norm_in_one(islands, drop, layer, used):
    """Also where only one of the results has a gradient: behind the last norm, or none behind."""
    x, y, weight, bias = inputs()
    tensors = (x, y, weight, bias if layer else None)
    chosen = {"both": slice(2), "sum": slice(1), "normed": slice(1, 2)}[used]

    def mine(*of):
        total, out = added_and_normed(*of, How(EPSILON, islands, drop))
        return (total, out)[chosen]

    def by_hand(x, y, weight, bias):
        dropped = y if drop is None else y * kept_of(drop, WIDTH) / (1 - drop.share)
        total = x + dropped
        return (total, norm_by_hand(total, weight, bias))[chosen]

    if used == "sum":  # the weights have no gradient then
        tensors = (x, y, weight.detach(), None if bias is None else bias.detach())
        one = [
            torch.autograd.grad(run(*tensors)[0].square().sum(), (x, y)) for run in (mine, by_hand)
        ]
        for a, b in zip(*one, strict=True):
            torch.testing.assert_close(a, b, **NEAR)
        return
    both_ways(mine, by_hand, tensors)


@slow_warns
def test_residual_with_dropout(islands):
    x, y, _, _ = inputs()
    drop = DROPS["some"]
    kept = kept_of(drop, WIDTH)
    assert 0 < kept.double().mean() < 1
    both_ways(lambda x, y: added(x, y, drop, islands), lambda x, y: x + y * kept / 0.7, (x, y))


@slow_warns
def test_rotation(islands):
    x, angles = random(2, 3, 5, 8), random(2, 1, 5, 4, seed=3).detach()
    rotary = torch.stack([angles.cos(), angles.sin()])

    def by_hand(x):
        turned = torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1))
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    both_ways(lambda x: rotate(x, rotary, islands), by_hand, (x,))


@slow_warns
def test_the_gate(islands):
    """Another object than PLAIN takes the way of a GPU, which keeps one tensor less."""
    islands = Islands() if islands is PLAIN else islands
    gate, up = random(2, 5, 7), random(2, 5, 7, seed=1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        swiglu(gate, up, islands)
    assert len(kept) == 2
    both_ways(lambda *of: swiglu(*of, islands), lambda g, u: g / (1 + (-g).exp()) * u, (gate, up))


@slow_warns
@pytest.mark.parametrize("chunk", [4, 11, 100])
@pytest.mark.parametrize("terms", [Terms(), Terms(0.1, 0.02)], ids=["plain", "terms"])
def test_the_loss(islands, chunk, terms):
    hidden, weight = random(11, 6), random(17, 6, seed=1)
    labels = torch.arange(11) % 17
    labels[3] = -100

    def by_hand(hidden, weight):
        logits = hidden @ weight.T
        found = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=terms.smoothing, ignore_index=-100
        )
        return found + terms.z * logits.logsumexp(-1)[labels >= 0].square().sum()

    def mine(hidden, weight):
        return cross_entropy_sum(hidden, weight, labels, terms=terms, chunk=chunk, islands=islands)

    both_ways(mine, by_hand, (hidden, weight))


@pytest.mark.slow
@slow_warns
def test_noise_has_the_same_bits_when_it_is_compiled():
    torch.compiler.reset()
    drop, made = DROPS["some"], torch.compile(kept_of, fullgraph=True, backend="inductor")
    for share in (0.3, 0.5):
        one = drop._replace(share=share)
        assert torch.equal(made(one, WIDTH), kept_of(one, WIDTH))
    torch.compiler.reset()


def test_every_island_is_compiled():
    made = compiled("eager")
    for field in fields(Islands):
        assert getattr(made, field.name) is not getattr(PLAIN, field.name)
