"""What the members of a run with servers did last, for `howdah trace`: files in the run folder,
which processes of this machine write, and members that have joined send to the coordinator.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from howdah.comm.meeting import this_machine
from howdah.plan.recording import Call, RankTrace, StepTrace
from howdah.plan.trace_file import FOLDER, trace_text, write_trace, write_trace_text
from howdah.train.job import Job

Keep = Callable[[str, Sequence[StepTrace]], None]  # takes the steps of a member, by its name


def writer(job: Job) -> Keep:
    """Writes into the run folder; a disk that is full stops nobody."""

    def write(name: str, steps: Sequence[StepTrace]) -> None:
        with suppress(OSError):
            write_trace(job.folder / FOLDER, name, _traces(job, steps))

    return write


def teller(job: Job, tell: Callable[[dict[str, Any]], None]) -> Keep:
    """Tells the coordinator, which calls `land`."""

    def send(name: str, steps: Sequence[StepTrace]) -> None:
        tell({"trace": name, "text": trace_text(_traces(job, steps))})

    return send


def land(job: Job, said: Mapping[str, Any], names: Sequence[str]) -> None:
    """Writes what a member has told, under one of the names that are its own; nothing else."""
    if said["trace"] in names:
        with suppress(OSError):
            write_trace_text(job.folder / FOLDER, str(said["trace"]), str(said["text"]))


def served(calls: Sequence[Call]) -> list[StepTrace]:
    """The latest pushes and pulls of a shard's server, as one step that has no number; none if
    there were none.
    """
    if not calls:
        return []
    began = min(call.start for call in calls)
    later = [one._replace(start=one.start - began, end=one.end - began) for one in calls]
    return [StepTrace(0, began, calls=later)]


def _traces(job: Job, steps: Sequence[StepTrace]) -> RankTrace:
    return RankTrace(str(job.layout), this_machine(), [*steps])
