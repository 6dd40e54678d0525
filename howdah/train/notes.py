"""What a recipe says that is allowed, and is perhaps not meant: a sentence for each, told before a
run starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from howdah.base.errors import named
from howdah.collectives.choice import DEFAULT
from howdah.host.scratch import memory_behind
from howdah.optim.learning_rate import learning_rate
from howdah.plan.homes import homes
from howdah.plan.method import LearningRate
from howdah.plan.plan import Plan
from howdah.train.job import Training
from howdah.train.length import in_steps


def notes_of(plan: Plan, train: Training) -> Iterator[str]:
    """Yields the notes on a run's settings; they keep nothing from running."""
    rate, layout, batch = plan.method.lr, plan.layout, plan.batch
    train = in_steps(train, batch, plan.sequence)
    if not train.epochs:  # the steps of an epoch depend on the text
        yield from _rate_notes(rate, train.steps)
    if layout.zero and layout.sharers == 1:
        yield f"zero{layout.zero} shards nothing: each copy of the states is on one rank"
    if "disk" in homes(layout) and (kind := memory_behind(Path(plan.storage.folder))):
        yield (
            f"the home on the disk, {named(plan.storage.folder)}, is on {kind}, which is memory of "
            "this machine; storage.folder=PATH names another"
        )
    yield from empty_places(plan)


def empty_places(plan: Plan) -> Iterator[str]:
    """Yields that a step has more places than samples, if it has."""
    layout, batch = plan.layout, plan.batch
    assert batch.global_batch is not None
    places = layout.readers * plan.micros * plan.micro_batch
    if empty := places - batch.global_batch:
        yield (
            f"{empty:,} of {places:,} places in a step stay empty: global_batch is "
            f"{batch.global_batch:,}, in micro-batches of {plan.micro_batch:,} on '{layout}'"
        )


def device_note(asked: str, device: str, *, cards: int, lack: str) -> str:
    """Why `device=auto` took the CPU though there are `cards`, or one with a `lack`; else empty."""
    if asked != "auto" or device != "cpu" or not (cards or lack):
        return ""
    why = f"there are {cards} for more ranks; device=cuda shares them" if cards else lack
    return f"the run leaves this machine's GPUs alone: {why.removesuffix(', or use device=cpu')}"


def sample_note(plan: Plan, prompt: str, *, room: int) -> str:
    """Why a run on GPUs of `room` bytes ends without a sample; empty if it need not."""
    needed = plan.compute_bytes * sum(weight.elements for weight in plan.weights)
    return (
        ""
        if not prompt or needed <= room
        else (
            f"no sample at the end: one GPU of {room / 1e9:,.1f} GB would hold all weights, "
            f"{needed / 1e9:,.1f} GB; howdah sample uses the CPU"
        )
    )


def rate_note(
    found: Mapping[str, tuple[Any, Any]], rate: LearningRate, *, steps: int, done: int
) -> str:
    """What changed settings do to the learning rate of a run's next step; empty if nothing.

    found  the settings that have changed, by dotted key: the value before, and now
    steps  of the whole run now; `done` are done
    """
    start, before_steps = "method.lr.", found.get("train.steps", (steps, 0))[0]
    before = {k.removeprefix(start): old for k, (old, _) in found.items() if k.startswith(start)}
    if not done or not (before or "train.steps" in found):
        return ""
    was = learning_rate(replace(rate, **before), step=done, steps=max(before_steps, done + 1))
    new = learning_rate(rate, step=done, steps=max(steps, done + 1))
    if abs(new - was) <= 0.01 * was:
        return ""
    both = f"{steps:,} steps now, instead of {before_steps:,}"
    spans = f"the learning rate's schedule spans {both}"
    keep = (
        f"; to keep that, add method.lr.schedule=constant method.lr.peak={was:.3g} "
        "method.lr.warmup_steps=0"
    )
    if before:  # which is what was asked for
        spans, keep = "the learning rate has changed", ""
    return f"{spans}: step {done + 1:,} has {new:.3g} where it had {was:.3g}{keep}"


def algorithm_note(found: Mapping[str, tuple[Any, Any]], *, done: int) -> str:
    """What changed algorithms of collectives do to a run; empty if none has changed.

    found  the settings that have changed, by dotted key: the value before, and now
    done   steps that are done
    """
    changed = [
        f"{key} was {before or DEFAULT} and is {now or DEFAULT}"
        for key, (before, now) in found.items()
        if key.startswith("comm.algorithm.")
    ]
    told = f": from step {done + 1:,} on, sums are rounded in another order"
    return "; ".join(changed) + told * bool(changed)


def _rate_notes(rate: LearningRate, steps: int) -> Iterator[str]:
    if rate.warmup_steps >= steps:
        yield (
            f"the learning rate does not reach its peak: method.lr.warmup_steps is "
            f"{rate.warmup_steps:,} and train.steps {steps:,}"
        )
    elif rate.schedule == "wsd" and rate.warmup_steps + rate.decay_steps > steps:
        yield (
            f"the learning rate's warm-up and decay overlap: {rate.warmup_steps:,} and "
            f"{rate.decay_steps:,} of {steps:,} steps"
        )
