"""Pipelines without flush: which weights each action uses, how old they are, how many are kept."""

import re
from itertools import pairwise

import pytest
from reference import SIZES, draw, shows, total

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.pipedream import peak_versions, pipedream, pipedream_2bw, versions

STASH = """\
F0₀ F1₀ F2₀                 B0₀···· F3₁ B1₀···· F4₂ B2₀····     B3₁····     B4₂····
    F0₀ F1₀         B0₀···· F2₁ B1₀···· F3₂ B2₁···· F4₃ B3₂····     B4₃····
        F0₀ B0₀···· F1₁ B1₁···· F2₂ B2₂···· F3₃ B3₃···· F4₄ B4₄····"""

TWO = """\
F0₀ F1₀         B0₀···· F2₀ B1₀···· F3₀ B2₀···· F4₁ B3₀···· F5₁ B4₁····     B5₁····
    F0₀ B0₀···· F1₀ B1₀···· F2₀ B2₀···· F3₀ B3₀···· F4₁ B4₁···· F5₁ B5₁····"""

FULL = [(ranks, micros) for ranks, micros in SIZES if micros >= 2 * ranks - 1]
DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw_versions(schedule, rule):
    used = versions(schedule, rule)
    return draw(schedule, lambda a: f"{a.kind}{a.micro}" + str(used[a]).translate(DIGITS))


def staleness(schedule, rule, stage):
    """For each micro-batch: the updates between the version its gradient is of, and its update."""
    used = versions(schedule, rule)
    updates = [a.micro for a in schedule.programs[stage] if a.kind is Kind.UPDATE]
    backwards = [a for a in schedule.programs[stage] if a.kind is Kind.BACKWARD]
    return [sum(u < a.micro for u in updates) - used[a] for a in backwards]


def test_pictures():
    assert draw_versions(pipedream(3, 5), "stash") == STASH
    assert shows(pipedream, STASH)
    assert draw_versions(pipedream_2bw(2, 6), "2bw") == TWO
    assert shows(pipedream_2bw, TWO)


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_one_update_after_each_backward_and_otherwise_1f1b(ranks, micros):
    schedule = pipedream(ranks, micros)
    for program, plain in zip(schedule.programs, one_f_one_b(ranks, micros).programs, strict=True):
        assert tuple(a for a in program if a.kind is not Kind.UPDATE) == plain
        for before, action in pairwise(program):
            backward = action._replace(kind=Kind.BACKWARD)
            assert (before == backward) == (action.kind is Kind.UPDATE)
        assert program[-1].kind is Kind.UPDATE
    assert total(schedule) == 3 * (micros + ranks - 1)


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_a_backward_uses_what_its_forward_used(ranks, micros):
    for schedule, rule in (
        (pipedream(ranks, micros), "stash"),
        (pipedream(ranks, micros), "vertical"),
        (pipedream_2bw(ranks, micros), "2bw"),
    ):
        used = versions(schedule, rule)
        assert len(used) == 2 * ranks * micros
        for action in used:
            assert used[action] == used[action._replace(kind=Kind.FORWARD)]
            if rule != "stash":
                assert used[action] == used[action._replace(stage=0)]


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_staleness(ranks, micros):
    """1806.03377, section 3.3: stage r reads weights p - 1 - r updates old, or all p - 1."""
    schedule = pipedream(ranks, micros)
    for stage in range(ranks):
        each = range(micros)
        assert staleness(schedule, "stash", stage) == [min(i, ranks - 1 - stage) for i in each]
        assert staleness(schedule, "vertical", stage) == [min(i, ranks - 1) for i in each]


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_2bw_is_one_update_behind(ranks, micros):
    """2006.09503, section 3.1: W(t + 1) = W(t) - rate × gradient at W(t - 1)."""
    for group in (ranks, ranks + 1, 3 * ranks):
        schedule = pipedream_2bw(ranks, micros, group=group)
        for stage in range(ranks):
            assert staleness(schedule, "2bw", stage) == [min(i // group, 1) for i in range(micros)]
            updates = [a.micro for a in schedule.programs[stage] if a.kind is Kind.UPDATE]
            assert updates == [*range(group - 1, micros - 1, group), micros - 1]
        groups = -(-micros // group)
        assert peak_versions(schedule, "2bw") == (min(2, groups),) * ranks


@pytest.mark.parametrize(("ranks", "micros"), FULL)
def test_versions_kept_once_the_pipeline_is_full(ranks, micros):
    schedule = pipedream(ranks, micros)
    assert peak_versions(schedule, "stash") == tuple(ranks - stage for stage in range(ranks))
    assert peak_versions(schedule, "vertical") == (ranks,) * ranks


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_kept_versions_are_those_that_brute_force_finds(ranks, micros):
    """At each action: the latest version, and all made before that it or a later one uses."""
    schedule = pipedream(ranks, micros)
    for rule in ("stash", "vertical"):
        used = versions(schedule, rule)
        for stage, program in enumerate(schedule.programs):
            most = 0
            for i in range(len(program)):
                latest = sum(a.kind is Kind.UPDATE for a in program[: i + 1])
                wanted = {used[a] for a in program[i:] if a in used}
                most = max(most, len({v for v in wanted if v <= latest} | {latest}))
            assert peak_versions(schedule, rule)[stage] == most


def test_a_flush_needs_one_version():
    assert peak_versions(one_f_one_b(4, 8), "stash") == (1, 1, 1, 1)


def test_refused():
    with pytest.raises(UserError, match=re.escape("'stach' of weight versions is unknown; did")):
        versions(pipedream(2, 2), "stach")
    with pytest.raises(UserError, match="over 3 micro-batches, fewer than its 4 ranks"):
        pipedream_2bw(4, 8, group=3)
    with pytest.raises(UserError, match="0F2 would use version 1 of 0; use rule 'stash'"):
        versions(pipedream(4, 8), "2bw")
    assert versions(pipedream(4, 8), "stash")[Action(Kind.FORWARD, 0, 4)] == 1
