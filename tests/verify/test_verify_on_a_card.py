"""The evidence of a layout that runs on another device than the CPU: the double `working_card`
refuses what a GPU refuses, and computes.
"""

from dataclasses import replace

import pytest
import torch
from small_cases import case_of
from working_card import install, there

from howdah.comm.spawn import Workers
from howdah.verify import evidence
from howdah.verify.verify import report, verify

pytestmark = pytest.mark.skipif(not there, reason="this torch has no devices written in Python")

STATES = "weights={0} gradients={0} optimizer={0}"
LAYOUTS = ["dp2 zero1 x2", f"single x2 {STATES.format('host')}"]
MORE = [
    "tp2 sp x2",
    "single x3",
    "dp2 x2",
    "dp2 zero2 x2",
    "dp2 zero3 x2",
    "pp2 1f1b x4",
    "recompute=full x2",
    "dp2 zero1 x2 optimizer=host",
    f"dp2 zero3 x2 {STATES.format('host')}",
    f"single x2 {STATES.format('disk')}",
]


def gather_on_card(transport, *arguments):
    """For workers: the evidence of this rank, on the card that they share."""
    evidence.own_device = lambda kind, rank: {"card": install}[kind]()
    return evidence.gather(transport, *arguments)


class OnTheCard:
    """Workers of their own, for a device stays with its process."""

    def __init__(self, workers):
        self._workers = workers

    def run(self, function, *arguments, **how):
        assert function is evidence.gather
        return self._workers.run(gather_on_card, *arguments, **how)


@pytest.fixture(scope="module")
def on_the_card():
    with Workers(2) as two:
        yield OnTheCard(two)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)]
)
def test_a_layout_is_proved_on_a_card(on_the_card, layout):
    case = replace(case_of(layout, steps=1), device="card")
    verdict = verify(case, on_the_card, controls=False)
    assert verdict.proved, verdict.problems
    said = list(report(verdict))
    assert said[0].startswith(f"{case.layout} against one CPU, the layout on card: float64")
    assert said[-1].startswith("equal: bytes sent and held (activations left out), bits of all")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 zero3 x2", "tp2 x2"])
def test_every_control_is_noticed_on_a_card(on_the_card, layout):
    case = replace(case_of(layout, steps=2), device="card")
    verdict = verify(case, on_the_card)
    assert verdict.proved, verdict.problems
    assert len(verdict.controls) >= 4


def held_on_card(transport, case):
    """For workers: the bytes of activations, and what the double forbids."""
    found = gather_on_card(transport, case)
    x, refused = torch.arange(6.0, device="card"), []
    forbidden = (x.numpy, lambda: x + torch.ones(6), lambda: torch.ones(6).add_(x))
    for attempt in forbidden:
        with pytest.raises(RuntimeError) as why:
            attempt()
        refused.append(str(why.value))
    return found.held, refused, float((x.cpu() + torch.ones(6)).sum())


def test_activations_of_a_card_are_others_and_no_problem(on_the_card):
    """Documents are cut by a mask there, which is kept for the backward pass."""
    case = replace(case_of("single x2", steps=1), device="card")
    ((held, refused, added),) = on_the_card._workers.run(held_on_card, case, ranks=1)
    of_cpu = replace(case, device="cpu")
    assert added == 21 and len(refused) == 3
    problems = verify(of_cpu, _Forged(held), controls=False).problems
    assert len(problems) == 1 and "bytes of activations, and held" in problems[0]
    assert verify(case, _Forged(held), controls=False).problems == []


class _Forged:
    """One worker, in this process, that holds other bytes."""

    def __init__(self, held):
        self._held = held

    def run(self, function, case, *arguments, **_):
        from howdah.comm.transport import SingleRank

        found = function(SingleRank(), replace(case, device="cpu"), *arguments)
        return [replace(found, held=self._held)]


def test_on_another_device_all_of_bf16_rounds_otherwise(monkeypatch):
    """With the order of samples as the only noise, kernels that round elsewhere would fail."""
    from howdah.verify import verify as module

    asked = []
    monkeypatch.setattr(module, "reference", lambda case, **how: asked.append(how))
    for case in (case_of("dp2 x2"), replace(case_of("dp2 x2"), device="cuda")):
        module._noise(case)
    assert asked == [{"backwards": True}, {"wide": True}]
