"""Rows divided by publisher, and the one-constant baseline that every prediction stands beside."""

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from howdah.shapes.products import conventions
from howdah.validation.judging import Judged
from howdah.validation.plans import Answer

PUBLISHERS = Path(__file__).with_name("publishers.toml")
RATES = {"fp32": "float32", "fp16": "fp16", "bf16": "bf16"}  # the lower ones: fp8


@cache
def _said() -> dict[str, dict[str, Any]]:
    return tomllib.loads(PUBLISHERS.read_text(encoding="utf-8"))


def publisher_of(source: str) -> str:
    """Who publishes a source; the source itself where publishers.toml does not say."""
    for begins, publisher in _said()["publishers"].items():
        if source.lower().startswith(begins.lower()):
            return str(publisher)
    return source


def folds(judged: Sequence[Judged]) -> Iterator[tuple[str, list[Judged], list[Judged]]]:
    """For each publisher: its name, the rows of all others, its own rows.

    Of the others, rows of a configuration that the publisher has too are taken away.
    """
    own: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        own[publisher_of(one.row["source"])].append(one)
    for publisher, rows in own.items():
        seen = {configuration(one.answer) for one in rows if one.answer}
        others = [
            one
            for one in judged
            if publisher_of(one.row["source"]) != publisher
            and not (one.answer and configuration(one.answer) in seen)
        ]
        yield publisher, others, rows


def configuration(answer: Answer) -> tuple[object, ...]:
    """What makes two published runs the same run, by any publisher at any time."""
    plan, device = answer.plan, answer.cluster.device.name
    return replace(plan.shape, vocab=1), plan.layout, plan.batch, plan.sequence, device


# -- the baseline --------------------------------------------------------------


def at_peak(answer: Answer) -> float:
    """Seconds of the model FLOPs of a step (all pairs of tokens) at the dense peak of all devices;
    in 8 bits and fewer at the peak of 8 bits, where the device has none at that of 16.
    """
    plan, rates = answer.plan, answer.cluster.device.flops
    rate = getattr(rates, RATES.get(answer.precision, "fp8")) or rates.bf16 or rates.fp16
    total = plan.batch.global_batch
    assert total is not None
    assert rate is not None
    work = conventions(plan.shape, plan.sequence).model * total * plan.sequence
    return work / (plan.layout.world * float(rate))


def constant(judged: Sequence[Judged]) -> float:
    """The factor over what `predicted` holds (`at_peak`) that fits the rows best, each source as
    much as the others.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        if one.predicted:
            logs[one.row["source"]].append(log(one.published / one.predicted))
    return exp(mean(map(mean, logs.values()))) if logs else 1.0


def shipped_constant() -> float:
    """The factor that bench/planner/run.py fits on all published runs it has."""
    return float(_said()["baseline"]["factor"])


def baseline(judged: Sequence[Judged], factor: float | None = None) -> list[Judged]:
    """The same rows, predicted as `at_peak` times one constant.

    factor  the constant; None: for each publisher the one that fits the rows of the others
    """
    peaks = [_at(one, at_peak(one.answer) if one.answer else 0.0) for one in judged]
    if factor is not None:
        return [_at(one, one.predicted * factor) for one in peaks]
    found: dict[int, Judged] = {}
    for _, others, own in folds(peaks):
        fitted = constant(others)
        found |= {id(one): _at(one, one.predicted * fitted) for one in own}
    return [found[id(one)] for one in peaks]


def _at(one: Judged, seconds: float) -> Judged:
    return replace(one, predicted=seconds)
