"""Events of backward passes: an example by hand, and that the window is as large as is planned."""

import re
from itertools import chain, groupby

from hypothesis import given, settings
from random_plans import plans
from round_steps import plan_of

from howdah.plan.layout import family_of
from howdah.plan.mesh_axes import axis
from howdah.plan.sums import sums_of
from howdah.plan.window import window_of
from howdah.sim import sum_events
from howdah.sim.sum_events import NOTHING, events_of


def spelled(events):
    """Such as `wait for 3; 6 starts; wait for 4 5`."""
    runs = [
        (starts, [e.number for e in some]) for starts, some in groupby(events, lambda e: e.starts)
    ]
    words = (
        [f"{number} starts" for number in numbers]
        if starts
        else [f"wait for {' '.join(map(str, numbers))}"]
        for starts, numbers in runs
    )
    return "; ".join(chain.from_iterable(words))


def test_the_events_in_the_docstring_are_the_events():
    plan = plan_of("dp2 tp2 sp x2")
    found = events_of(plan, sums_of(plan, 0), 0, last=True)
    lines = [f"behind {part} {spelled(some)}" for part, some in found.behind.items() if some]
    lines.append(f"when all are done {spelled(found.end)}")
    drawn = [" ".join(line.split()) for line in sum_events.__doc__.splitlines()]
    assert [line for line in drawn if re.match("behind |when all", line)] == lines
    assert not any(found.before.values())
    assert events_of(plan, sums_of(plan, 0), 0, last=False) is NOTHING


@settings(max_examples=60)
@given(plans())
def test_no_more_buckets_are_reduced_at_once_than_the_window_has_slots(plan):
    if plan.layout.virtual > 1 or plan.layout.world > 64 or family_of(plan.layout).split:
        return
    for stage, rank in enumerate(axis(plan.layout, "pp").group(0)):
        sums, (slots, _) = sums_of(plan, rank), window_of(plan, rank)
        found, running = events_of(plan, sums, stage, last=False), set()
        order = [some for part in found.behind for some in (found.before[part], found.behind[part])]
        for number, starts in 3 * [event for some in (*order, found.end) for event in some]:
            if sums[number].in_window:
                (running.add if starts else running.discard)(number)
            assert len(running) <= slots
