"""How long a run is: steps, tokens and epochs, each computed from the others.

A recipe gives one of `train.steps`, `train.tokens` and `train.epochs`. The loop counts steps, and
the learning rate's schedule spans steps, so the other two become steps before a run starts: tokens
as soon as the batch is known, epochs as soon as the text is. An epoch is as many samples as the
text has. The last step is a full batch, so a run may be longer than asked by less than one batch.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from howdah.base.errors import UserError
from howdah.base.quantities import parse_count
from howdah.plan.batch import Batch
from howdah.text.order import Order
from howdah.train.job import MOST_STEPS, Training

LENGTHS = ("steps", "tokens", "epochs")  # keys of the table [train]


def is_length(override: str) -> bool:
    """Whether a KEY=VALUE of the command line gives the length of a run."""
    table, _, name = override.partition("=")[0].rpartition(".")
    return table == "train" and name in LENGTHS


def read_length(train: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table [train] of a recipe with `tokens` as a number, and the problems of its length."""
    found, problems = dict(train), []
    given = [f"train.{name}" for name in LENGTHS if train.get(name)]
    if len(given) > 1:
        problems.append(f"{' and '.join(given)} say how long the run is; give one of them")
    if isinstance(tokens := train.get("tokens"), str):
        try:
            found["tokens"] = parse_count(tokens, what="train.tokens")
        except UserError as problem:
            del found["tokens"]
            problems.append(str(problem))
    return found, problems


def steps_of(batch: Batch, samples: int) -> int:
    """The fewest steps that use at least `samples` samples."""
    used = 0
    for step in range(batch.ramp_steps):
        used += batch.size(step)
        if used >= samples:
            return step + 1
    return batch.ramp_steps + max(-(-(samples - used) // batch.size(batch.ramp_steps)), 0)


def in_steps(train: Training, batch: Batch, sequence: int, samples: int = 0) -> Training:
    """`train` with its length in steps. Epochs stay where the number of `samples` is unknown (0).

    sequence  tokens of a sample
    samples   samples of the text
    """
    wanted = -(-train.tokens // sequence)
    if train.epochs and samples:
        wanted = ceil(train.epochs * samples)
    if not wanted:
        return checked(train)
    steps = max(steps_of(batch, wanted), 1)
    if steps > MOST_STEPS:
        asked = (
            f"train.tokens {train.tokens:,}" if train.tokens else f"train.epochs {train.epochs:g}"
        )
        raise UserError(f"{asked} takes {steps:,} steps; a run has at most {MOST_STEPS:,}")
    return checked(replace(train, steps=steps, tokens=0, epochs=0.0))


def checked(train: Training) -> Training:
    """`train` itself. Raises UserError if the step to profile is past its last step."""
    if train.profile > train.steps and not train.epochs:
        raise UserError(
            f"train.profile is {train.profile:,}, past the last step, {train.steps:,}; name one of "
            "the run's steps, or 0 for none"
        )
    return train


def describe(order: Order, *, steps: int, used: int) -> str:
    """The line that tells a run's steps, tokens and epochs. The epochs of several sources differ:
    the fewest and the most are told too.

    used  samples of the whole run
    """
    epochs = [
        used * share / sum(order.shares) / count
        for share, count in zip(order.shares, order.samples, strict=True)
    ]
    samples, several = sum(order.samples), len(epochs) > 1
    return (
        f"length      {steps:,} steps, {used * order.sequence:,} tokens: "
        f"{_spell(used / samples)} epochs of {samples:,} samples"
        + f"; {_spell(min(epochs))} to {_spell(max(epochs))} epochs of single sources"
        * several
    )


def _spell(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"


def spell_time(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> spell_time(3725.2)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
