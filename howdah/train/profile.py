"""`train.profile = STEP`: a trace of that step by torch's own profiler, beside the run.

    RUN/profile/step-00000012/rank-00000.json            for ui.perfetto.dev or chrome://tracing
    RUN/profile/step-00000012/rank-00000-memory.pickle   of a GPU, for pytorch.org/memory_viz

Every rank writes one, for the stages of a pipeline do different work. `howdah trace` (which costs
nothing and is always on) shows the actions of a step; this shows the operators and kernels inside.
Recording slows the step down. It is an optional output: whatever fails in it, training goes on, and
what the step computes is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from howdah.train.optional import OptionalOutput

FOLDER = "profile"
EVENTS = 100_000  # the most allocations and frees that a memory snapshot has
OTHER = (RuntimeError, AssertionError, AttributeError, TypeError)  # of torch's profilers

History = Callable[..., None]


class StepProfiler:
    """Records one step of this rank.

    step    the step to record, counted from 1; 0: none
    folder  the run folder
    say     shows a line to the user and in the log
    """

    def __init__(
        self,
        step: int,
        *,
        rank: int,
        device: torch.device,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._step, self._rank, self._device, self._say = step, rank, device, say
        self._folder = folder / FOLDER / f"step-{step:08d}"
        self._beside = OptionalOutput(say)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Records the block if it is the chosen step, and then writes what was recorded. Of a step
        that fails nothing is written.
        """
        if step != self._step:
            yield
            return
        recorder = self._start()
        try:
            yield
        except BaseException:
            self._stop(recorder)
            self._forget()
            raise
        if (recorder := self._stop(recorder)) is not None:
            with self._beside.writing(FOLDER, *OTHER):
                self._write(recorder)
                self._say(f"profile     step {step} of each rank: {self._folder}")
        self._forget()

    def _start(self) -> profile | None:
        recorder = None
        with self._beside.writing(FOLDER, *OTHER):
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what was launched before is another step
                activities += {ProfilerActivity.CUDA} & supported_activities()
                _remember_memory(max_entries=EVENTS)
            made = profile(activities=activities, record_shapes=True)
            made.start()
            recorder = made
        return recorder

    def _stop(self, recorder: profile | None) -> profile | None:
        """Ends the recording; returns it if there is one to write."""
        stopped = None
        if recorder is not None:
            with self._beside.writing(FOLDER, *OTHER):
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                recorder.stop()
                stopped = recorder
        return stopped

    def _forget(self) -> None:
        if self._device.type == "cuda":
            with self._beside.writing(FOLDER, *OTHER):
                _remember_memory(enabled=None)

    def _write(self, recorder: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank:05d}"
        write_whole(self._folder / f"{name}.json", recorder.export_chrome_trace)
        snapshot = getattr(torch.cuda.memory, "_dump_snapshot", None)
        if self._device.type == "cuda" and snapshot:
            write_whole(self._folder / f"{name}-memory.pickle", snapshot, ends=b".")


def _remember_memory(**how: Any) -> None:
    """Begins or ends torch's record of allocations, in a torch that has it."""
    record: History | None = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record:
        record(**how)


def write_whole(path: Path, write: Callable[[str], object], *, ends: bytes = b"}") -> None:
    """Has `write` make a file, which gets the name `path` when it is complete.

    ends  the last byte of a complete file

    Raises OSError. torch's profiler reports a file that it cannot open, or not fill, on its own
    log alone.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.touch()
        write(str(part))
        with part.open("rb") as file:
            file.seek(max(part.stat().st_size - 64, 0))
            if not file.read().rstrip().endswith(ends):
                raise OSError("the file is not complete; the disk may be full")
        part.replace(path)
    finally:
        for left in (part, part.with_name(part.name + ".tmp")):  # the second is the profiler's
            left.unlink(missing_ok=True)
