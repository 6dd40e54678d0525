"""The simplest simulator: every rank goes ahead when it can, messages take no time.

It is what faster ones are compared with, and what draws the pictures of the docstrings.
"""

from inspect import getdoc

from howdah.plan.schedule.actions import Kind, makes, needs

UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.UPDATE: 0}
SIZES = [(ranks, micros) for ranks in (1, 2, 3, 4, 5, 8) for micros in (*range(1, 13), 15, 16)]


def spans(schedule, costs=UNITS):
    """{action: (start, end)}; fails if some action can never start."""
    made, found = {}, {}
    clocks = [0] * len(schedule.programs)
    todo = [list(program) for program in schedule.programs]
    moved = True
    while moved:
        moved = False
        for rank, left in enumerate(todo):
            while left and all(value in made for value in needs(left[0], schedule)):
                action = left.pop(0)
                ready = [made[value] for value in needs(action, schedule)]
                start = max([clocks[rank], *ready])
                clocks[rank] = made[makes(action)] = start + costs[action.kind]
                found[action] = start, clocks[rank]
                moved = True
    assert not any(todo), f"stuck: {[str(left[0]) for left in todo if left]}"
    return found


def total(schedule, costs=UNITS):
    """When the last action ends."""
    return max(end for _, end in spans(schedule, costs).values())


def bubbles(schedule, costs=UNITS):
    """How long each rank idles between its first action and its last."""
    found = spans(schedule, costs)
    return [
        found[program[-1]][1] - found[program[0]][0] - sum(costs[a.kind] for a in program)
        for program in schedule.programs
    ]


def draw(schedule, label=None):
    """One row for each rank; an action is its label, filled with dots as long as it takes."""
    if label is None:
        plain = schedule.stages == len(schedule.programs)  # then the row says the stage
        label = (lambda a: str(a)[len(str(a.stage)) :]) if plain else str
    found = {action: span for action, span in spans(schedule).items() if UNITS[action.kind]}
    width = 1 + max(len(label(action)) for action in found)
    rows = []
    for program in schedule.programs:
        row = ""
        for action in (action for action in program if action in found):
            start, end = found[action]
            row = row.ljust(start * width) + label(action).ljust((end - start) * width - 1, "·")
            row += " "
        rows.append(row.rstrip())
    return "\n".join(rows)


def shows(function, picture):
    """Whether the function's docstring has the picture, indented by four spaces or more."""
    lines = [line.rstrip() for line in getdoc(function).splitlines()]
    wanted = [f"    {line}".rstrip() for line in picture.splitlines()]
    return any(lines[i : i + len(wanted)] == wanted for i in range(len(lines)))
