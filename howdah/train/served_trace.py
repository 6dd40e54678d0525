"""What the members of a run with servers did last, as files for `howdah trace`."""

from collections.abc import Sequence
from contextlib import suppress

from howdah.comm.meeting import this_machine
from howdah.plan.recording import Call, RankTrace, StepTrace
from howdah.plan.trace_file import FOLDER, write_trace
from howdah.train.job import Job


def write_worker(job: Job, place: int, steps: Sequence[StepTrace]) -> None:
    """Writes the last steps of a worker; a disk that is full stops nobody."""
    _write(job, f"worker-{place}", steps)


def write_server(job: Job, shard: int, calls: Sequence[Call]) -> None:
    """Writes the latest pushes and pulls of a shard's server, as one step that has no number."""
    if calls:
        began = min(call.start for call in calls)
        later = [one._replace(start=one.start - began, end=one.end - began) for one in calls]
        _write(job, f"server-{shard}", [StepTrace(0, began, calls=later)])


def _write(job: Job, name: str, steps: Sequence[StepTrace]) -> None:
    with suppress(OSError):
        write_trace(job.folder / FOLDER, name, RankTrace(str(job.layout), this_machine(), [*steps]))
