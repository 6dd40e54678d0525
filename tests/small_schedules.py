"""Schedules to try things on: the shipped ones, small; and any that can run, from hypothesis."""

from hypothesis import strategies as st

from howdah.plan.schedule.actions import Action, Kind, Schedule, makes, needs
from howdah.plan.schedule.lowering import lower
from howdah.plan.schedule.pipedream import versions
from howdah.plan.schedule.registry import SCHEDULES, build

THIRD = {"interleaved": ("virtual", (2, 3)), "terapipe": ("slices", (2, 3))}


def shipped(name, ranks=(1, 2, 3, 4, 6), micros=(1, 2, 3, 4, 7)):
    word, numbers = THIRD.get(name, ("virtual", (1,)))
    return [
        build(name, ranks=p, micros=m, **{word: number})
        for p in ranks
        for m in micros
        for number in numbers
    ]


def ways(schedule):
    """The schedule, lowered in every way that differs."""
    if schedule.name in SCHEDULES and not SCHEDULES[schedule.name].keeps:
        rule = "2bw" if schedule.name == "pipedream-2bw" else "stash"
        return [lower(schedule), lower(schedule, versions=versions(schedule, rule))]
    tied = (0, schedule.stages - 1)
    return [
        lower(schedule),
        lower(schedule, reduce_each=True, tied=tied if tied[0] != tied[1] else None),
        lower(schedule, reduce_each=True),
    ]


@st.composite
def any_schedule(draw):
    """Some stages on some ranks, in any order in which they can run; backwards whole or halved.

    Actions are taken one by one, each time any of those that can go next: that is how every
    schedule that does not get stuck can come about.
    """
    stages, micros, slices = (draw(st.integers(1, n)) for n in (5, 4, 2))
    ranks = draw(st.integers(1, stages))
    home = [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(stages - ranks))]
    home = draw(st.permutations(home))
    half = draw(st.booleans())
    backward = (Kind.INPUT, Kind.WEIGHT) if half else (Kind.BACKWARD,)
    todo = [
        Action(kind, stage, micro, part)
        for kind in (Kind.FORWARD, *backward)
        for stage in range(stages)
        for micro in range(micros)
        for part in range(slices)
    ]
    schedule = Schedule("any", stages, micros, slices, ())
    programs, made = [[] for _ in range(ranks)], set()
    while todo:
        able = [a for a in todo if all(value in made for value in needs(a, schedule))]
        action = draw(st.sampled_from(able))
        todo.remove(action)
        made.add(makes(action))
        programs[home[action.stage]].append(action)
    return schedule._replace(programs=tuple(map(tuple, programs)))


def texts(program, *verbs):
    """A lowered program as text, or the part of it that begins with certain verbs."""
    return [str(i) for i in program if not verbs or i.verb in verbs]
