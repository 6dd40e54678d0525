"""The update of 20 million elements on the host: howdah's, DeepSpeed's; and one array alone."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from howdah.optim.in_turns import InTurns, Turn
from howdah.plan.method import Optimizer

ELEMENTS, TINY, TIMES = 20_000_000, 200_000, 12
ARRAYS = 7  # that an update touches: it reads four and writes three

Update = Callable[[], object]


def howdah_update(n: int) -> Update:
    master, gradient, first, second = (torch.rand(n) for _ in range(4))
    turns = InTurns(Optimizer(), [(True, 1.0)])
    turn = Turn((True, 1.0), master, gradient, {"exp_avg": first, "exp_avg_sq": second})
    return lambda: turns.step([turn])


def deepspeed_update(n: int) -> Update:
    """Needs DeepSpeed, which builds its CPUAdam at the first start."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    of, parameter = Optimizer(), torch.nn.Parameter(torch.rand(n))
    parameter.grad = torch.rand(n)
    how = {"betas": of.betas, "eps": of.epsilon, "weight_decay": of.weight_decay}
    return DeepSpeedCPUAdam([parameter], **how).step  # type: ignore[no-any-return]


def in_place(n: int) -> Update:
    """Reads an array and writes it. A copy would read what it writes, too, before it does."""
    one = torch.rand(n)
    return lambda: one.add_(1.0)


def seconds_of(*updates: Update, times: int) -> list[float]:
    """The median of each, which take turns."""
    took: list[list[float]] = [[] for _ in updates]
    for _ in range(times):
        for found, update in zip(took, updates, strict=True):
            began = perf_counter()
            update()
            found.append(perf_counter() - began)
    return [median(one) for one in took]
