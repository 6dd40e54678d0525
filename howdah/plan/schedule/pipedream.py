"""Pipelines without a flush: a stage updates after each of its backwards and never waits.

Without further measures, a micro-batch would use newer weights in its backward than in its forward,
and its gradient would not be that of any function. So a stage keeps old versions of its weights.
Version n is the result of n updates. A rule determines which version a micro-batch uses:

    stash     forward: the latest version of the stage. Backward: the version of its forward
    vertical  on every stage, the version that the first stage had when the micro-batch entered
    2bw       gradients are summed over groups of g ≥ p micro-batches, one update for each group.
              Group k uses version k - 1 on every stage, so two versions are enough

Staleness is the number of updates that a stage makes between reading a version and applying the
gradient computed with it. On stage r of p, once the pipeline is full:

    rule        versions kept    staleness    gradient of the loss at
    stash       p - r            p - 1 - r    weights whose age differs from stage to stage
    vertical    p                p - 1        weights of one age
    2bw         2                1            weights of one age

These rules change the mathematics of training, so they belong to a method and not to a layout. The
actions are those of 1F1B, with each update listed as U. In practice the pipeline fills and drains
once in a run; in these schedules, once in `micros` micro-batches.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from howdah.base.errors import UserError, nearest
from howdah.plan.schedule.actions import Action, Kind, Schedule, rank_of_stage
from howdah.plan.schedule.one_f_one_b import one_f_one_b

RULES = ("stash", "vertical", "2bw")


def pipedream(ranks: int, micros: int) -> Schedule:
    """1F1B without flush: each stage updates after every backward.

    Three ranks, five micro-batches; F3₁ uses version 1 of its stage (rule stash):

        F0₀ F1₀ F2₀                 B0₀···· F3₁ B1₀···· F4₂ B2₀····     B3₁····     B4₂····
            F0₀ F1₀         B0₀···· F2₁ B1₀···· F3₂ B2₁···· F4₃ B3₂····     B4₃····
                F0₀ B0₀···· F1₁ B1₁···· F2₂ B2₂···· F3₃ B3₃···· F4₄ B4₄····

    bubble  only one fill and one drain in a whole run, (p - 1)(F + B)
    held    min(p - r, m) micro-batches on rank r, and p - r versions of its weights
    source  https://arxiv.org/abs/1806.03377
    """
    return _updated("pipedream", ranks, micros, every=1)


def pipedream_2bw(ranks: int, micros: int, *, group: int | None = None) -> Schedule:
    """PipeDream with one update for each `group` of micro-batches, and two versions at most.

    group  micro-batches whose gradients are summed before an update; at least `ranks`, which is
           also the default. The last group of a run may be shorter.

    Raises UserError for a group below `ranks`.

    Two ranks, six micro-batches in groups of two; F4₁ uses version 1 of its stage (rule 2bw):

        F0₀ F1₀         B0₀···· F2₀ B1₀···· F3₀ B2₀···· F4₁ B3₀···· F5₁ B4₁····     B5₁····
            F0₀ B0₀···· F1₀ B1₀···· F2₀ B2₀···· F3₀ B3₀···· F4₁ B4₁···· F5₁ B5₁····

    bubble  only one fill and one drain in a whole run, (p - 1)(F + B)
    held    min(p - r, m) micro-batches on rank r, and 2 versions of its weights
    source  https://arxiv.org/abs/2006.09503
    """
    group = ranks if group is None else group
    if group < ranks:
        raise UserError(
            f"pipedream-2bw sums gradients over {group} micro-batches, fewer than its {ranks} "
            f"ranks, and would need a third version of the weights; use at least {ranks}"
        )
    return _updated("pipedream-2bw", ranks, micros, every=group)


def _updated(name: str, ranks: int, micros: int, *, every: int) -> Schedule:
    """1F1B with an update after `every` backwards and after the last one."""
    schedule = one_f_one_b(ranks, micros)
    programs = []
    for program in schedule.programs:
        updated = []
        for action in program:
            updated.append(action)
            done = action.micro + 1
            if action.kind is Kind.BACKWARD and (done % every == 0 or done == micros):
                updated.append(action._replace(kind=Kind.UPDATE))
        programs.append(tuple(updated))
    return schedule._replace(name=name, programs=tuple(programs))


def versions(schedule: Schedule, rule: str) -> dict[Action, int]:
    """For each action but updates, the version of its stage's weights that the action uses.

    Raises UserError for an unknown rule, and for a rule that needs a version before it exists.
    """
    if rule not in RULES:
        raise UserError(f"rule {rule!r} of weight versions is unknown{nearest(rule, RULES)}")
    latest = _latest(schedule)
    updates = sorted({a.micro for p in schedule.programs for a in p if a.kind is Kind.UPDATE})
    used = {}
    for forward, made in latest.items():
        version = made
        if rule == "vertical":
            version = latest[forward._replace(stage=0)]
        elif rule == "2bw":
            version = max(0, bisect_left(updates, forward.micro) - 1)
        if version > made:
            raise UserError(
                f"rule {rule!r} of weight versions does not fit schedule {schedule.name}: "
                f"{forward} would use version {version} of {made}; use rule 'stash'"
            )
        used[forward[1:]] = version
    actions = (action for program in schedule.programs for action in program)
    return {action: used[action[1:]] for action in actions if action.kind is not Kind.UPDATE}


def _latest(schedule: Schedule) -> dict[Action, int]:
    """For each forward, the number of updates that its stage has made before it."""
    made: Counter[int] = Counter()
    latest = {}
    for action in (action for program in schedule.programs for action in program):
        if action.kind is Kind.UPDATE:
            made[action.stage] += 1
        elif action.kind is Kind.FORWARD:
            latest[action] = made[action.stage]
    return latest


def peak_versions(schedule: Schedule, rule: str) -> tuple[int, ...]:
    """For each stage, the largest number of versions that its rank keeps at once.

    A version is kept while it is the latest, which the next update starts from, or while a later
    action uses it. An update may overwrite a version that no later action uses.
    """
    used = versions(schedule, rule)
    home = rank_of_stage(schedule)
    return tuple(
        _peak([action for action in schedule.programs[home[stage]] if action.stage == stage], used)
        for stage in range(schedule.stages)
    )


def _peak(actions: Sequence[Action], used: dict[Action, int]) -> int:
    last_use = {used[action]: i for i, action in enumerate(actions) if action in used}
    kept, latest, peak = {0}, 0, 0
    for i, action in enumerate(actions):
        latest += action.kind is Kind.UPDATE
        kept = {v for v in (*kept, latest) if v == latest or last_use.get(v, -1) >= i}
        peak = max(peak, len(kept))
    return peak
