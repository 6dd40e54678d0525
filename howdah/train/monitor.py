"""Measures a run: turns finished steps into log lines, files and a progress bar.

One stretch of `log_every` steps gives one line. Every number in a line is about that stretch: the
time, the bytes sent, the time spent waiting for data and for other ranks, the memory of a card.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from howdah.host.measured import peak_memory, reset_peak
from howdah.plan.homes import AXIS
from howdah.shapes.products import train_flops
from howdah.text.prefetch import Prefetch
from howdah.train.console import RunConsole
from howdah.train.feed import Fed
from howdah.train.job import Job
from howdah.train.metrics import MetricsWriter, StepMetrics, busy
from howdah.train.step import StepContext, StepResult


class _Mark(NamedTuple):
    """The running totals at the start of a stretch. `clock` is perf_counter(), `sent` is in bytes,
    the others are in seconds.
    """

    clock: float
    sent: float
    exposed: float
    waited: float


class SpeedMonitor:
    """Measures stretches of steps, shows the results and writes them to the run's files.

    peak     peak flop/s per rank, and the source of the number
    records  None on ranks other than 0
    packed   how many micro-batches had rows of several documents, and how many not

    `steps`, `tokens` and `seconds` are totals of all stretches so far: of training alone, without
    saves and evaluations. `paces` are the seconds of a step in each stretch, and `most` is the
    largest memory of them, in bytes.
    """

    def __init__(
        self,
        job: Job,
        context: StepContext,
        batches: Prefetch[Fed],
        *,
        peak: tuple[float, str],
        console: RunConsole,
        records: MetricsWriter | None,
    ) -> None:
        self._job, self._mesh = job, context.mesh
        self.packed = context.placed.executor.packed
        self._homes, self._spikes = context.placed.homes, context.spikes
        self._batches, self._console, self._records = batches, console, records
        self.peak, self.peak_source = peak
        sequence = job.data.sequence_length
        marks = job.plan.marks
        self._full = train_flops(job.shape, sequence, causal=False, marks=marks)
        self._causal = train_flops(job.shape, sequence, causal=True, marks=marks)
        self._steps = self._tokens = self._done = 0
        self._began = perf_counter()
        self.steps, self.tokens, self.seconds, self.most = 0, 0, 0.0, 0
        self.paces: list[float] = []
        self.last: StepMetrics | None = None
        self._mark = self._now()
        reset_peak(self._mesh.device)

    def _now(self) -> _Mark:
        return _Mark(
            clock=perf_counter(),
            sent=self.sent,
            exposed=self._mesh.waited.seconds + (self._homes.waited.seconds if self._homes else 0),
            waited=self._batches.waited.seconds,
        )

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent so far, without those from and to homes."""
        rows = self._mesh.counters.bytes.items()
        return sum(count for row, count in rows if row.axis != AXIS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the block (a save, an evaluation) from the current stretch."""
        before = self._now()
        yield
        passed = zip(self._mark, self._now(), before, strict=True)
        self._mark = _Mark(*(mark + now - then for mark, now, then in passed))

    def read_from(self, batches: Prefetch[Fed]) -> None:
        """Goes on with other batches, behind a return to a checkpoint."""
        more = batches.waited.seconds - self._batches.waited.seconds
        self._mark = self._mark._replace(waited=self._mark.waited + more)
        self._batches = batches

    def step(
        self,
        result: StepResult,
        *,
        step: int,
        rate: float,
        epoch: float,
        sent: int,
        last: bool = False,
    ) -> None:
        """Counts the finished `step` (from 1); at the end of a stretch, reports the stretch.

        epoch  epochs of the text that the run has used so far
        sent   bytes that this rank had sent when the step was launched; a later one may be by now
        last   whether the run ends with it
        """
        self._steps += 1
        self._done += 1
        every = self._job.batch.size(step - 1) * self._job.data.sequence_length
        shape = self._job.shape
        all_labelled = shape.family == "decoder" and not shape.labels  # of others few are
        self._tokens += result.tokens if all_labelled else every
        self._console.step(step)
        if last or step % self._job.train.log_every == 0 or step == self._job.train.steps:
            left = (perf_counter() - self._began) / self._done * (self._job.train.steps - step)
            measured = self._measure(result, step, rate, sent)
            self.last = replace(measured, epoch=epoch, left=left)
            self._console.measured(self.last)
            if self.last.busy and self.last.busy.dropped > 0.5:
                self._console.say(
                    f"step {step} dropped {self.last.busy.dropped:.0%} of the choices of experts: "
                    "raise method.routing.capacity or method.routing.balance_loss"
                )
            if self._records:
                self._records.measured(self.last)
            self._mark, self._steps, self._tokens = self._now()._replace(sent=sent), 0, 0
            reset_peak(self._mesh.device)

    @property
    def mfu(self) -> tuple[float, float]:
        """Model flops utilization of all stretches so far: full attention, and causal."""
        rate = self.tokens / max(self.seconds, 1e-9) / self._mesh.layout.world / self.peak
        return rate * self._full, rate * self._causal

    def _measure(self, result: StepResult, step: int, rate: float, sent: int) -> StepMetrics:
        mark, now = self._mark, self._now()
        seconds = max(now.clock - mark.clock, 1e-9)
        tps = self._tokens / seconds / self._mesh.layout.world
        used = peak_memory(self._mesh.device)
        self.steps += self._steps
        self.tokens += self._tokens
        self.seconds += seconds
        self.paces.append(seconds / max(self._steps, 1))
        self.most = max(self.most, used.held)
        experts = result.expert_tokens
        return StepMetrics(
            step=step,
            loss=result.loss,
            norm=result.norm,
            rate=rate,
            tps=tps,
            tflops=tps * self._full / 1e12,
            mfu=tps * self._full / self.peak,
            mfu_causal=tps * self._causal / self.peak,
            memory=used.held,
            memory_share=used.held / used.total,
            reserved=used.reserved,
            sent=(sent - mark.sent) / max(self._steps, 1),
            exposed=(now.exposed - mark.exposed) / seconds,
            waited=(now.waited - mark.waited) / seconds,
            seconds=seconds,
            experts={name: tokens for name, (*tokens, _) in experts.items()} or None,
            busy=busy(experts),
            spikes=self._spikes.count if self._spikes else None,
        )
