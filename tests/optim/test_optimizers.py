"""Optimizers on ranges of flat buffers against torch's optimizers on ordinary parameters."""

from itertools import pairwise

import pytest
import torch

from howdah.optim.optimizers import (
    Range,
    build_optimizer,
    make_states,
    set_rate,
)
from howdah.plan.method import STATES, Optimizer

SHAPES = {"a": (3, 5), "b": (7,), "c": (4, 2), "norm": (5,), "bias": (1,)}
DECAYS = ("a", "b", "c")  # first in the buffer, as in plan/flat_buffers.py
RATES = (1e-2, 3e-2, 5e-3, 1e-2)

SETTINGS = [
    Optimizer("adamw", weight_decay=0.3),
    Optimizer("adamw", betas=(0.8, 0.99), epsilon=1e-3, weight_decay=0.0),
    Optimizer("adam", weight_decay=0.3),
    Optimizer("sgd", momentum=0.9, weight_decay=0.3),
    Optimizer("sgd", momentum=0.0, weight_decay=0.3),
    Optimizer("rmsprop", momentum=0.9, weight_decay=0.3),
    Optimizer("rmsprop", momentum=0.0, betas=(0.0, 0.9), weight_decay=0.0),
]


def spell(settings):
    return f"{settings.name}-m{settings.momentum}-d{settings.weight_decay}"


def start(dtype):
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(s, generator=draw, dtype=dtype) for name, s in SHAPES.items()}


def gradient(name, step, dtype):
    draw = torch.Generator().manual_seed(100 * step + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=draw, dtype=dtype)


class Flat:
    """The parameters side by side in one buffer, cut into ranges as a rank might own them."""

    def __init__(self, settings, dtype, *, cuts=(), step=0):
        values = start(dtype)
        self.masters = torch.cat([values[name].reshape(-1) for name in SHAPES])
        self.gradients = torch.zeros_like(self.masters)
        turn = sum(values[name].numel() for name in DECAYS)
        edges = sorted({0, turn, len(self.masters), *cuts})
        self.ranges = [
            Range("unit", a, b, b <= turn, self.masters[a:b], self.gradients[a:b])
            for a, b in pairwise(edges)
        ]
        self.optimizer = build_optimizer(settings, self.ranges)
        make_states(settings, self.optimizer, self.ranges, step=step)

    def step(self, step):
        flat = [gradient(name, step, self.masters.dtype).reshape(-1) for name in SHAPES]
        self.gradients.copy_(torch.cat(flat))
        set_rate(self.optimizer, RATES[step])
        self.optimizer.step()


def torchs(settings, dtype):
    """Weights after each step, by torch's own loop over parameters."""
    parameters = {name: torch.nn.Parameter(value) for name, value in start(dtype).items()}
    groups = [
        {
            "params": [parameters[n] for n in SHAPES if n in DECAYS],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameters[n] for n in SHAPES if n not in DECAYS], "weight_decay": 0.0},
    ]
    how = {"foreach": False}
    if settings.name in ("adam", "adamw"):
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.name]
        optimizer = kind(groups, betas=settings.betas, eps=settings.epsilon, **how)
    elif settings.name == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=settings.momentum, **how)
    else:
        constants = {"alpha": settings.betas[1], "eps": settings.epsilon}
        optimizer = torch.optim.RMSprop(groups, momentum=settings.momentum, **constants, **how)
    for step, rate in enumerate(RATES):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, step, dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield torch.cat([p.detach().reshape(-1) for p in parameters.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=spell)
def test_updates_are_torchs(settings, dtype):
    """Every rank's cut of the buffer gives the same weights: elements do not know each other."""
    tight = 2e-6 if dtype == torch.float32 else 1e-14
    for cuts in ((), (1, 8, 16, 33)):
        flat = Flat(settings, dtype, cuts=cuts)
        for step, expected in enumerate(torchs(settings, dtype)):
            flat.step(step)
            torch.testing.assert_close(flat.masters, expected, rtol=tight, atol=tight)


def kept(flat, part):
    """Names of the states that are tensors over the elements: what a checkpoint must hold."""
    states = flat.optimizer.state[part.master]
    return {name for name, value in states.items() if torch.is_tensor(value) and value.ndim}


@pytest.mark.parametrize("settings", SETTINGS, ids=spell)
def test_states_exist_before_the_first_update_and_are_all(settings):
    flat, names = Flat(settings, torch.float64), set(settings.states)
    assert names <= set(STATES[settings.name])
    for part in flat.ranges:
        assert kept(flat, part) == names
        for name in names:
            state = flat.optimizer.state[part.master][name]
            assert torch.equal(state, torch.zeros_like(part.master))
    flat.step(0)
    for part in flat.ranges:
        assert kept(flat, part) == names, "torch keeps a state that a checkpoint would not"


@pytest.mark.parametrize("settings", SETTINGS, ids=spell)
def test_a_new_optimizer_goes_on_where_another_stopped(settings):
    """What a checkpoint keeps is enough: weights, the named states, and the number of steps."""
    whole = Flat(settings, torch.float64)
    for step in range(4):
        whole.step(step)
    first = Flat(settings, torch.float64)
    for step in range(2):
        first.step(step)
    second = Flat(settings, torch.float64, step=2)
    second.masters.copy_(first.masters)
    for old, new in zip(first.ranges, second.ranges, strict=True):
        for name in settings.states:
            kept = first.optimizer.state[old.master][name]
            second.optimizer.state[new.master][name].copy_(kept)
    for step in range(2, 4):
        second.step(step)
    assert torch.equal(second.masters, whole.masters)


def test_momentum_buffers_exist_only_with_momentum():
    assert Optimizer("sgd", momentum=0.0).states == ()
    assert Optimizer("sgd", momentum=0.5).states == ("momentum_buffer",)
    assert Optimizer("rmsprop", momentum=0.0).states == ("square_avg",)
    assert Optimizer("adamw").states == ("exp_avg", "exp_avg_sq")


def test_empty_ranges_are_left_out():
    """A rank may own nothing of a small unit."""
    nothing, some = torch.zeros(0), torch.ones(3)
    ranges = [
        Range("unit", 0, 0, True, nothing, torch.zeros(0)),
        Range("unit", 0, 3, False, some, torch.ones(3)),
    ]
    optimizer = build_optimizer(Optimizer(), ranges)
    make_states(Optimizer(), optimizer, ranges, step=0)
    assert [group["params"] for group in optimizer.param_groups] == [[some]]
    assert nothing not in optimizer.state


def test_states_that_exist_are_kept():
    flat = Flat(Optimizer(), torch.float64)
    flat.step(0)
    before = flat.optimizer.state[flat.ranges[0].master]["exp_avg"]
    make_states(Optimizer(), flat.optimizer, flat.ranges, step=7)
    assert flat.optimizer.state[flat.ranges[0].master]["exp_avg"] is before
