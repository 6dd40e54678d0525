"""Check a schedule before it runs: each problem is one sentence, and deadlocks are found too.

The schedules of this package are verified by their tests. A user's own schedule, read from a file,
is checked here: every stage runs each micro-batch (and token slice) forward once and backward once,
each stage is on one rank, and the order cannot deadlock. The deadlock check runs the schedule
without times: each rank runs its actions until one lacks an input. If ranks are left over, some of
them wait for each other in a circle.

    rank 0   0F0 0B0 0F1 0B1        rank 0 waits with 0B0 for 1B0, which comes after 1F1,
    rank 1   1F0 1F1 1B0 1B1        rank 1 waits with 1F1 for 0F1, which comes after 0B0
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from howdah.plan.schedule.actions import Action, Kind, Schedule, Value, makes, needs

SHOWN = 4  # actions named in a sentence; the remaining ones are only counted


def check_schedule(schedule: Schedule) -> list[str]:
    """All problems, as sentences that name the action and the rank; empty if the schedule can run.

    Deadlocks are searched for only if there is no other problem.
    """
    problems = [
        *_numbers(schedule),
        *_strangers(schedule),
        *_repeated(schedule),
        *_left_out(schedule),
        *_too_early(schedule),
    ]
    return problems or list(_deadlock(schedule))


def out_of_range(action: Action, schedule: Schedule) -> str:
    """Why the action's stage, micro-batch or slice does not exist in `schedule`; "" if all do."""
    for word, number, count in (
        ("stage", action.stage, schedule.stages),
        ("micro-batch", action.micro, schedule.micros),
        ("slice", action.slice, schedule.slices),
    ):
        if not 0 <= number < count:
            return f"there is no {word} {number}; the last is {count - 1}"
    return ""


def _placed(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action) for every action of the schedule."""
    for rank, program in enumerate(schedule.programs):
        for action in program:
            yield rank, action


def _numbers(schedule: Schedule) -> Iterator[str]:
    for rank, action in _placed(schedule):
        wrong = out_of_range(action, schedule)
        if wrong:
            yield f"rank {rank} runs {action}: {wrong}"


def _strangers(schedule: Schedule) -> Iterator[str]:
    """One sentence for each stage that is on more than one rank."""
    ranks: dict[int, dict[int, Action]] = {}  # stage → rank → the stage's first action there
    for rank, action in _placed(schedule):
        ranks.setdefault(action.stage, {}).setdefault(rank, action)
    for stage, found in ranks.items():
        if len(found) > 1:
            where = " and ".join(f"rank {rank} ({action})" for rank, action in found.items())
            yield f"stage {stage} is on {where}; a stage lives on one rank"


def _repeated(schedule: Schedule) -> Iterator[str]:
    times = Counter(_placed(schedule))
    for (rank, action), count in times.items():
        if count > 1:
            yield f"rank {rank} runs {action} {count} times; once is right"
        if action.kind is Kind.BACKWARD:
            for half in (Kind.INPUT, Kind.WEIGHT):
                if (rank, action._replace(kind=half)) in times:
                    yield (
                        f"rank {rank} runs {action} and {action._replace(kind=half)}; "
                        "a backward is either B, or I and then W"
                    )


def _left_out(schedule: Schedule) -> Iterator[str]:
    """One sentence for each stage with missing actions."""
    rank_of = {action.stage: rank for rank, action in _placed(schedule)}
    present = {action for _, action in _placed(schedule)}
    micros, slices = range(schedule.micros), range(schedule.slices)
    for stage in range(schedule.stages):
        wanted = (
            action
            for micro, part in product(micros, slices)
            for action in _wanted(present, stage, micro, part)
        )
        lacking = [str(action) for action in wanted if action not in present]
        if lacking:
            more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
            who = f"rank {rank_of[stage]} leaves" if stage in rank_of else "all ranks leave"
            yield f"{who} out {' '.join(lacking[:SHOWN])}{more}"


def _wanted(present: set[Action], stage: int, micro: int, part: int) -> list[Action]:
    """The actions that a stage must have for one micro-batch and slice.

    They are the forward and B, or the forward, I and W if I or W is in `present`.
    """
    forward, whole, *halves = (
        Action(kind, stage, micro, part)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    )
    return [forward, *(halves if any(half in present for half in halves) else [whole])]


def _too_early(schedule: Schedule) -> Iterator[str]:
    """One sentence for each action that runs before an action of its rank whose value it needs."""
    for rank, program in enumerate(schedule.programs):
        makers = {makes(action): i for i, action in reversed(list(enumerate(program)))}
        for i, action in enumerate(program):
            for value in needs(action, schedule):
                if makers.get(value, i) > i:
                    yield f"rank {rank} runs {action} before {program[makers[value]]}; swap them"


def draw_standstill(schedule: Schedule) -> str:
    """For each rank the actions that it can run and what its next one waits for; "" if all finish.

    rank 0   0F0 | 0B0 waits for 1B0
    rank 1       | 1F1 waits for 0F1
    """
    done, lacking = _run(schedule)
    if not lacking:
        return ""
    makers = {makes(action): str(action) for _, action in _placed(schedule)}
    rows = []
    for rank, program in enumerate(schedule.programs):
        after = "done"
        if rank in lacking:
            value = lacking[rank]
            named = f"{value.name} of stage {value.stage}, micro-batch {value.micro}: left out"
            after = f"{program[done[rank]]} waits for {makers.get(value, named)}"
        rows.append((" ".join(map(str, program[: done[rank]])), after))
    width = max(len(ran) for ran, _ in rows)
    return "\n".join(f"rank {r}   {ran:{width}} | {after}" for r, (ran, after) in enumerate(rows))


def _deadlock(schedule: Schedule) -> Iterator[str]:
    done, lacking = _run(schedule)
    if lacking:
        yield _circle(schedule, done, lacking)


def _run(schedule: Schedule) -> tuple[list[int], dict[int, Value]]:
    """Runs the schedule without times.

    Returns the number of actions that each rank can run, and, for each rank that is stuck, the
    value that its next action lacks.
    """
    made: set[Value] = set()
    done = [0] * len(schedule.programs)
    waiting: dict[Value, list[int]] = {}  # missing value → ranks whose next action needs it
    ready = list(range(len(done)))
    while ready:
        rank = ready.pop()
        program = schedule.programs[rank]
        while done[rank] < len(program):
            action = program[done[rank]]
            lacks = next((v for v in needs(action, schedule) if v not in made), None)
            if lacks is not None:
                waiting.setdefault(lacks, []).append(rank)
                break
            done[rank] += 1
            made.add(makes(action))
            ready += waiting.pop(makes(action), [])
    return done, {rank: value for value, ranks in waiting.items() for rank in ranks}


def _circle(schedule: Schedule, done: list[int], lacking: dict[int, Value]) -> str:
    """The sentence about a deadlock: only the stuck ranks that wait for each other in a circle."""
    makers = {makes(action): (rank, action) for rank, action in _placed(schedule)}
    rank, path = min(lacking), []
    while rank not in path:
        path.append(rank)
        rank, _ = makers[lacking[rank]]
    waits = []
    for stuck in path[path.index(rank) :]:
        other, awaited = makers[lacking[stuck]]
        action = schedule.programs[stuck][done[stuck]]
        waits.append(f"rank {stuck} waits with {action} for {awaited} of rank {other}")
    return f"deadlock: {', '.join(waits)}; reorder one of them"
