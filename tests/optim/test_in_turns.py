"""An optimizer that takes one unit after the other has the bits of one that takes all at once."""

import pytest
import torch

from howdah.optim.in_turns import InTurns, Turn
from howdah.optim.optimizers import Range, build_optimizer, make_states, set_rate
from howdah.plan.method import STATES, Optimizer

SIZES = (37, 64, 5)


def drawn(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=dtype) for n in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(STATES))
def test_turns_have_the_bits_of_one_call(name, dtype):
    settings = Optimizer(name)
    whole, mine = drawn(0, dtype), drawn(0, dtype)
    decays = (True, False, True)
    gradients = [torch.zeros(n, dtype=dtype) for n in SIZES]
    parts = [
        Range(str(i), 0, n, decay, master, gradient)
        for i, (n, decay, master, gradient) in enumerate(
            zip(SIZES, decays, whole, gradients, strict=True)
        )
    ]
    together = build_optimizer(settings, parts)
    make_states(settings, together, parts, step=0)
    turns = InTurns(settings, [(True, 1.0), (False, 1.0)])
    states = [{s: torch.zeros(n, dtype=dtype) for s in settings.states} for n in SIZES]
    for step in range(3):
        fresh = drawn(step + 1, dtype)
        for gradient, new in zip(gradients, fresh, strict=True):
            gradient.copy_(new)
        for optimizer in (together, turns.optimizer):
            set_rate(optimizer, 0.01 * (step + 1))
        together.step()
        for decay, master, gradient, state in zip(decays, mine, fresh, states, strict=True):
            nothing = {s: x[:0] for s, x in state.items()}
            empty = Turn((not decay, 1.0), master[:0], gradient[:0], nothing)
            turns.step([Turn((decay, 1.0), master, gradient, state), empty])
        turns.updates += 1
        assert all(torch.equal(a, b) for a, b in zip(whole, mine, strict=True))
    for part, state in zip(parts, states, strict=True):
        kept = together.state[part.master]
        assert all(torch.equal(kept[name], state[name]) for name in settings.states)
    assert not turns.optimizer.state, "it keeps nothing of what it was given"
