"""A new recipe from five answers: `howdah init`.

    model     a preset, or a folder of Hugging Face      [model], or init_from
    data      files, a folder, a dataset of the hub      [data]
    machine   this one, or a cluster by name             the layout, by the search
    length    "500 steps", "1B tokens", "2 epochs", "30 minutes"
    purpose   scratch, tune, chat, classify or try       [data], [method] and [train]

The peak rate of training from scratch is that of GPT-3's models of the same size
(https://arxiv.org/abs/2005.14165, table 2.1); of smaller ones a little less than the recipe laptop
has.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from howdah.base.errors import UserError, nearest, shown
from howdah.base.files import kind_of
from howdah.base.quantities import parse_count
from howdah.config.recipe import AUTO, Run
from howdah.config.shipped import CONFIG
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import PRESETS, preset
from howdah.shapes.shape import ModelShape
from howdah.train.job import MOST_EPOCHS, MOST_STEPS

Purpose = Literal["scratch", "tune", "chat", "classify", "try"]
PURPOSES: dict[Purpose, str] = {
    "scratch": "train from random weights",
    "tune": "go on from the weights of a folder",
    "chat": "the same, on answers of conversations",
    "classify": "the same, on texts with a label",
    "try": "a few steps, to see that all of it works",
}
TRIED = 20  # steps
RATES = (  # (from how many parameters, peak of the learning rate)
    (1e11, 0.6e-4),
    (1e10, 1e-4),
    (2e9, 1.6e-4),
    (1e9, 2e-4),
    (5e8, 2.5e-4),
    (2e8, 3e-4),
    (8e7, 6e-4),
    (0, 2e-3),
)
TUNED = ("tune", "chat", "classify")  # purposes that go on from weights
TUNED_RATE = 1e-5
MOST = 1e9  # epochs, seconds, minutes ...
UNITS = {"s": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400}


class Length(NamedTuple):
    """How long a run is: one of the three keys of [train], or seconds."""

    unit: Literal["steps", "tokens", "epochs", "seconds"]
    amount: float


@dataclass(frozen=True)
class Answers:
    """What a recipe is made of.

    on_cards   whether the devices are cards
    devices    how many there are
    precision  bf16, or float32 where they have none
    """

    model: str
    data: str
    length: Length
    purpose: Purpose
    on_cards: bool
    devices: int
    precision: str = "bf16"


# -- answers -------------------------------------------------------------------


def read_model(said: str) -> str:
    """A preset or a folder of Hugging Face, as it is said. Raises UserError."""
    if said in PRESETS or kind_of(Path(said) / CONFIG) == "file":
        return said
    if kind_of(Path(said)) == "folder":
        raise UserError(f"--model {shown(said)} is a folder without {CONFIG}; name another")
    raise UserError(
        f"--model {shown(said)} is neither a preset nor a folder here{nearest(said, PRESETS)}"
    )


def read_purpose(said: str) -> Purpose:
    """What a run is for. Raises UserError."""
    for purpose in PURPOSES:
        if said == purpose:
            return purpose
    raise UserError(f"--for is {shown(said)}; it must be {', '.join(PURPOSES)}")


def read_length(said: str) -> Length:
    """A length such as "500 steps", "1B tokens", "2 epochs" or "30 minutes". Raises UserError."""
    match = re.fullmatch(r"\s*([\d.,_]+(?:e\d+)?\s?[kKMBT]?)\s*([a-z]*)\s*", said)
    number, unit = (match[1], match[2]) if match else ("", "")
    try:
        if unit in ("", "step", "steps"):
            return Length("steps", parse_count(number, what="--length"))
        if unit in ("token", "tokens"):
            return Length("tokens", parse_count(number, what="--length"))
        amount = float(number) if float(number) < MOST else 0.0
    except (UserError, ValueError):
        amount = 0.0
    if amount > 0 and unit in ("epoch", "epochs"):
        return Length("epochs", amount)
    if amount > 0 and (seconds := UNITS.get(unit) or UNITS.get(unit.removesuffix("s"))):
        return Length("seconds", amount * seconds)
    raise UserError(
        f"--length is {shown(said)}; write it like '500 steps', '1B tokens', '2 epochs' or "
        "'30 minutes'"
    )


def usual_purpose(model: str) -> Purpose:
    """What a model is taken for if nothing else is said."""
    return "scratch" if model in PRESETS else "tune"


def check_purpose(purpose: Purpose, model: str) -> Purpose:
    """`purpose` itself. Raises UserError if the model has no weights to go on from."""
    if purpose in TUNED and model in PRESETS:
        raise UserError(
            f"--for {purpose} goes on from weights, and the preset {model} has none: name a folder "
            "of Hugging Face as the model, or take scratch"
        )
    return purpose


# -- the recipe ----------------------------------------------------------------


def recipe_table(answers: Answers) -> dict[str, Any]:
    """A recipe whose layout is still open (auto). Raises UserError."""
    shape, table = _shape(answers.model), dict[str, Any]()
    table["layout"] = AUTO
    table["seed"] = 1
    if answers.model in PRESETS:
        table["model"] = {"preset": answers.model}
    elif answers.purpose == "scratch":
        table["model"] = {key: one for key, one in asdict(shape).items() if one is not None}
    else:
        table["init_from"] = answers.model
    tuned = "init_from" in table
    labelled = answers.purpose == "classify"
    source = {"path": answers.data, "label": "label"} if labelled else answers.data
    table["data"] = {"sources": [source], "sequence_length": _sequence(answers, shape)}
    if answers.purpose == "chat":
        table["data"] |= {"chat": "answers"}
    if shape.family == "encoder" and not labelled:
        table["data"] |= {"mask_token": "<|mask|>"}
    table["batch"] = {"global_batch": _samples(answers, shape)}
    rate = {"peak": usual_rate(shape, tuned=tuned)}
    table["method"] = {"precision": answers.precision, "lr": rate}
    if tuned:
        table["method"] |= {"optimizer": {"weight_decay": 0.01}}
    table["train"] = {"steps": TRIED}
    return table


def with_length(table: dict[str, Any], answers: Answers, *, seconds: float) -> dict[str, Any]:
    """The recipe with its length, and what depends on it: warm-up, evaluations, saves.

    seconds  that a step is predicted to take
    """
    length, batch = answers.length, table["batch"]["global_batch"]
    tokens = batch * table["data"]["sequence_length"]
    unit = length.unit
    steps = {
        "steps": length.amount,
        "tokens": length.amount / tokens,
        "seconds": length.amount / seconds,
        "epochs": 1000.0,  # how many they are is known when the text is read
    }[unit]
    steps = max(round(steps), 1)
    if unit == "epochs" and length.amount > MOST_EPOCHS:
        raise UserError(
            f"--length is {length.amount:,.0f} epochs, and a run has at most {MOST_EPOCHS:,}; give "
            "less"
        )
    if steps > MOST_STEPS:
        each = f", of {seconds:.2g} s each" if unit == "seconds" else ""
        raise UserError(
            f"--length is {steps:,} steps{each}, and a run has at most {MOST_STEPS:,}; give less"
        )
    amount: dict[str, Any] = {"steps": steps}
    if unit in ("tokens", "epochs"):
        whole = float(length.amount).is_integer()
        amount = {unit: int(length.amount) if whole else length.amount}
    if answers.purpose == "try":
        return {**table, "train": {**amount, "log_every": 1}}
    rate = {**table["method"]["lr"], "warmup_steps": min(max(steps // 50, 1), 2000)}
    rate |= {"schedule": "cosine", "min_ratio": 0.1}
    train = {**amount, "log_every": 10, "evaluate_every": max(steps // 10, 1)}
    train |= {"save_every": max(steps // 5, 1), "export": True}
    return {**table, "method": {**table["method"], "lr": rate}, "train": train}


def recipe_text(table: dict[str, Any], run: Run, why: str) -> str:
    """The text of a recipe with the layout and batch of `run`.

    why  one line on the layout
    """
    batch = {"global_batch": run.batch.global_batch, "micro_batch": run.batch.micro_batch}
    known = {key: size for key, size in batch.items() if size is not None}
    there = {} if run.cluster is None else {"cluster": run.cluster}
    made = {**there, **table, "layout": run.layout, "batch": known}
    return f"# layout: {why}\n{tomli_w.dumps(made)}"


def shown_purposes() -> Iterator[str]:
    """Each purpose with what it means."""
    return (f"{name} ({means})" for name, means in PURPOSES.items())


def _shape(model: str) -> ModelShape:
    if model in PRESETS:
        return preset(model)
    from howdah.shapes.huggingface import sizes_of

    return sizes_of(Path(model))[0]


def _sequence(answers: Answers, shape: ModelShape) -> int:
    most = (1024 if answers.purpose in TUNED else 2048) if answers.on_cards else 256
    return min(shape.context, most)


def _samples(answers: Answers, shape: ModelShape) -> int:
    """Samples of a step: as published runs have them on cards, as few as that goes elsewhere."""
    from howdah.search.notes import usual_batch

    least = 1 << max(answers.devices - 1, 7).bit_length()
    if not answers.on_cards or answers.purpose == "try":
        return least
    if answers.purpose in TUNED:
        return max(16, least)
    return max(usual_batch(shape, _sequence(answers, shape)), least)


def usual_rate(shape: ModelShape, *, tuned: bool) -> float:
    """The peak learning rate that models of this size were trained with."""
    size = parameters(shape).total
    return TUNED_RATE if tuned else next(rate for least, rate in RATES if size >= least)
