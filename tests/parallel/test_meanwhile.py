"""What is computed while messages are on their way: the shared expert while rows go to others and
while their gradients come back, attention to a block of keys while the next one comes.
"""

from types import SimpleNamespace

import torch

from howdah.base.stopwatch import Stopwatch
from howdah.model.places import Places
from howdah.parallel.context_ring import Ring
from howdah.parallel.expert import ExpertExchange


class LoggedGroup:
    """A rank alone, whose messages arrive when they are waited for."""

    size, rank = 1, 0

    def __init__(self, log):
        self._log = log

    def all_to_all(self, out, x, *, sent, received, async_op=False):
        self._log.append("sent" if async_op else "sent, nothing beside it")
        return SimpleNamespace(result=lambda: (out.copy_(x), self._log.append("landed")))


class Named(torch.autograd.Function):
    """Passes a tensor on, and logs both passes."""

    @staticmethod
    def forward(ctx, x, name, log):
        ctx.name, ctx.log = name, log
        log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(f"{ctx.name} back")
        return grad, None, None


def exchange_of(log, *, shared):
    exchange = ExpertExchange.__new__(ExpertExchange)
    exchange.group, exchange._waited = LoggedGroup(log), Stopwatch()
    exchange.held, exchange.sent, exchange._beside = [2], [0, 0], shared
    return exchange


def run(log, *, shared):
    x = torch.ones(3, 2, requires_grad=True)
    at = Places(torch.arange(3), torch.arange(3), (2, 1), holes=False, fixed=True)
    out, made = exchange_of(log, shared=shared)(
        lambda rows, sizes: Named.apply(rows, "experts", log),
        x,
        at,
        lambda: Named.apply(x, "shared", log) if shared else None,
    )
    (out.sum() + made.sum() if shared else out.sum()).backward()


def test_the_shared_expert_is_computed_while_rows_go_and_their_gradients_come_back():
    run(log := [], shared=True)
    alone = ["sent, nothing beside it", "landed"]
    there = ["sent", "shared", "landed", "experts", *alone]
    assert log == [*there, *alone, "experts back", "sent", "shared back", "landed"]


def test_without_one_nothing_is_beside_the_messages():
    run(log := [], shared=False)
    assert [line for line in log if line.startswith("sent")] == ["sent, nothing beside it"] * 4


class LoggedRing(Ring):
    """The first of three ranks."""

    def __init__(self, log):
        self.rank, self._group, self._log = 0, SimpleNamespace(size=3), log

    def pass_on(self, x, owner, width):
        self._log.append(f"{owner} sent on")
        return lambda: (self._log.append("the next has come"), x)[1]


def test_a_block_of_keys_is_used_while_the_next_one_comes():
    log = []
    for owner, _ in LoggedRing(log).rounds(torch.zeros(1), width=1):
        log.append(f"{owner} used")
    each = [(f"{owner} sent on", f"{owner} used", "the next has come") for owner in (0, 2)]
    assert log == [*each[0], *each[1], "1 used"]
