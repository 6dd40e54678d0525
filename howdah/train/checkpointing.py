"""Held-out evaluations and checkpoints between steps.

A checkpoint of a step that is also evaluated is marked as the best if its loss is lower than that
of all earlier ones. The best checkpoint is kept when older checkpoints are removed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from howdah.base.atomic import replacing
from howdah.base.errors import Unfinished, UserError, pasted
from howdah.checkpoint.facts import Routed, facts
from howdah.checkpoint.folders import steps
from howdah.checkpoint.index import About
from howdah.checkpoint.save import Saver
from howdah.checkpoint.sites import one_site
from howdah.comm.meeting import this_machine
from howdah.parallel.averages import averaged
from howdah.parallel.expert_counts import RoutedTokens, told
from howdah.parallel.expert_moves import move_experts
from howdah.plan.recording import RankTrace
from howdah.plan.trace_file import FOLDER, write_trace
from howdah.shapes.shape import stated
from howdah.text.batches import order_of
from howdah.text.template import CHAT
from howdah.text.tokens import Corpus
from howdah.train.adapted import base_facts
from howdah.train.evaluate import HeldOut, evaluate
from howdah.train.job import Job
from howdah.train.metrics import MetricsWriter
from howdah.train.optional import OptionalOutput
from howdah.train.resume import Start, as_plain
from howdah.train.run_folder import TOKENIZER, clean_run, lock
from howdah.train.state import entries
from howdah.train.step import StepContext

RESCUE = 2.0  # seconds that a save in flight gets to finish after an error
REMOVE = 1.0  # seconds to remove its files after that, if a rank is gone


class Checkpointer:
    """Evaluates and saves when the run's settings ask for it. All ranks call together.

    A save continues in the background. Its thread must not run collectives, so the ranks agree on
    its outcome when the next save begins, and at the end of the run.
    """

    def __init__(
        self,
        job: Job,
        context: StepContext,
        corpus: Corpus,
        start: Start,
        *,
        records: MetricsWriter | None,
        say: Callable[[str], None],
    ) -> None:
        self.job, self.context, self.corpus, self.say = job, context, corpus, say
        self.folder = job.folder / "checkpoints"
        self._start, self._records = start, records
        self._beside = OptionalOutput(say)
        self._saving = self._saved = -1  # step of the last save; of the last good one
        saved = start.checkpoint.meta if start.checkpoint else {}
        self.routed = RoutedTokens(facts(start.checkpoint).routed if start.checkpoint else Routed())
        self._best: float | None = saved.get("best_loss")
        self.latest: tuple[int, float] | None = None  # evaluation: its step and loss
        self._whole: tuple[int, HeldOut] | None = None  # of all held-out text, at its step
        mesh = context.mesh
        world, keep, copies = mesh.layout.world, job.train.keep_last, context.snapshots
        self.team = start.team or one_site(mesh.rank, world)
        if self.team.board and start.checkpoint:  # no machine can see that it stands on all
            self._saving = self._saved = start.step
        if self.team.leads:
            keep_tokenizer(corpus.tokenizer_path, job.folder / TOKENIZER)
            if job.data.chats:
                keep_tokenizer(corpus.folder / CHAT, job.folder / CHAT)
        self._saver = Saver(
            self.folder,
            rank=mesh.rank,
            world=world,
            keep=keep,
            say=say,
            snapshots=copies,
            team=self.team,
            start=start.step,
        )

    @property
    def saved(self) -> int:
        """The last step that all ranks know to be on disk, or -1."""
        return self._saved

    def settled(self) -> int:
        """Waits for a save in flight. The step of the newest checkpoint that all ranks know to be
        on disk, or -1.
        """
        self._settle()
        before = self._start.checkpoint
        return max(self._saved, before.step if before else -1)

    def is_due(self, step: int) -> bool:
        """Whether `between` has something to do after `step`."""
        return any(self._due(step))

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether the settings ask for an evaluation, and for a save, after `step`."""
        every = self.job.train
        last = step == every.steps
        evaluates = every.evaluate_every > 0 and (last or step % every.evaluate_every == 0)
        return evaluates, last or (every.save_every > 0 and step % every.save_every == 0)

    def between(self, step: int, *, samples: int) -> None:
        """Evaluates and saves after `step` if the settings ask for it; always saves after the last
        step.

        samples  number of samples used so far
        """
        every, (evaluates, saves) = self.job.train, self._due(step)
        held_out = self.evaluate(step, limit=every.evaluate_samples) if evaluates else None
        if saves:
            self._save(step, samples, held_out, beside=step < every.steps)
            if step < every.steps:
                self._place()

    def _place(self) -> None:
        """Brings experts to the places that follow from what was saved."""
        placed, routed = self.context.placed, self.routed.take()
        if by := self.job.orders(routed.by_block):
            self.context.snapshots.settle()
            before = dict(placed.orders)
            sent = move_experts(placed, by)
            self.say(told(routed, self.job.layout.ep, by, before=before, sent=sent))

    def stop(self, step: int, *, samples: int) -> None:
        """Saves `step`, unless it is already saved, and waits until it is on disk.

        Raises Unfinished when it cannot be saved: the run ends without this checkpoint.
        """
        self._save(step, samples, None, beside=False)
        self._settle()
        if self._saved != step:
            there = steps(self.folder)
            stands = f"step {there[-1]} is the newest that is" if there else "no other one is"
            raise Unfinished(
                f"step {step} is not saved: {self._saver.failed or 'rank 0 says why'}; {stands}; "
                f"mend that, and go on with: howdah train {pasted(self.job.folder)}"
            )

    def _settle(self) -> None:
        """Waits until the save in flight has ended; then all ranks know whether it succeeded."""
        world, saver = self.context.mesh.world, self._saver
        with self.context.mesh.counters.aside():
            (missing,) = world.sum_scalars([float(not saver.part())])
            if missing:
                saver.cancel()
            saver.wait()
            (lost,) = world.sum_scalars([float(saver.failed is not None)])
        if not lost:
            self._saved = self._saving

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After an error, gives a save in flight some time to finish; if it does not, its files are
        removed.
        """
        if error:
            self._saver.wait(RESCUE)
            self._saver.cancel()
            self._saver.wait(REMOVE)

    def _write_trace(self) -> None:
        """Writes the trace of this rank's last steps, for `howdah trace`."""
        mesh = self.context.mesh
        if traces := [*self.context.recorder.steps]:
            chosen = str(self.job.plan.comm.algorithm)
            about = RankTrace(str(mesh.layout), this_machine(), traces, chosen)
            with self._beside.writing(FOLDER):
                write_trace(self.job.folder / FOLDER, mesh.rank, about)

    def evaluate(self, step: int, *, limit: int) -> HeldOut:
        """Computes and logs the held-out loss of `limit` samples, or of all if `limit` is 0."""
        batch, data = self.job.batch, self.job.data
        assert batch.micro_batch is not None
        length, micro = data.sequence_length, batch.micro_batch
        held_out = evaluate(
            self.context, self.corpus, sequence=length, micro=micro, limit=limit or None
        )
        self.latest = step, held_out.loss
        values, of_average = held_out.values, ""
        if self.job.method.optimizer.average:
            average = self._of_average(length, micro, limit)
            values = {**values, "average_loss": average.loss}
            of_average = f"; of the average of the weights {average.loss:.4f}"
        there = self.corpus.held_out.windows(length)
        whole = not 0 < limit < there
        if self._records:
            self._records.held_out(step=step, values=values, whole=whole)
        part = "all of it" if whole else f"{limit} of {there:,} samples"
        hidden = self.corpus.mask is not None  # whose bits are not those of a text
        bits = "" if hidden else f", {held_out.bits_per_byte:.3f} bits per byte"
        bits = f", {held_out.scores}" if held_out.scores else bits
        self.say(f"held-out at step {step}, {part}: loss {held_out.loss:.4f}{bits}{of_average}")
        self._whole = (step, held_out) if whole else None
        return held_out

    def at_end(self, step: int) -> HeldOut:
        """The held-out loss of all text after the last step: computed once. A run that went back
        to a checkpoint has steps of one number with two sets of weights, but one last step.
        """
        if self._whole and self._whole[0] == step == self.job.train.steps:
            return self._whole[1]
        return self.evaluate(step, limit=0)

    def _of_average(self, length: int, micro: int, limit: int) -> HeldOut:
        """The same evaluation, with the average of the weights in their place."""
        most = limit or None
        with averaged(self.context.placed):
            return evaluate(self.context, self.corpus, sequence=length, micro=micro, limit=most)

    def _save(self, step: int, samples: int, held_out: HeldOut | None, *, beside: bool) -> None:
        self._settle()
        if self._saved == step:
            return
        self._saving = step
        self._write_trace()
        job = self.job
        best = held_out is not None and (self._best is None or held_out.loss < self._best)
        if held_out is not None and best:
            self._best = held_out.loss
        watching = self.context.spikes
        past = asdict(watching.past()) if watching else None
        updates, best_loss = step + self.context.ahead, self._best
        about = about_run(
            job, self.corpus, samples=samples, updates=updates, best=best_loss, spikes=past
        )
        if (routed := self.routed.take()).blocks:
            about.meta["routed"] = asdict(routed)
        given = entries(self.context.placed)
        self._saver.save(step=step, entries=given, about=about, best=best, beside=beside)


def about_run(
    job: Job,
    corpus: Corpus,
    *,
    samples: int,
    updates: int,
    best: float | None,
    spikes: dict[str, Any] | None = None,
) -> About:
    """What a checkpoint says of its run.

    samples  used so far; updates: of the optimizer; best: the lowest held-out loss
    spikes   what it is to know of them
    """
    order = order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
    meta = {
        "model": as_plain(stated(job.shape)),
        "tokenizer": corpus.fingerprint,
        "end": corpus.end,
        "optimizer": job.method.optimizer.name,
        "precision": job.method.precision,
        "order": as_plain(order),
        "best_loss": best,
        "updates": updates,
        "text": list(corpus.checksums),
        **({"spikes": spikes} if spikes else {}),
        **({"base": asdict(base)} if (base := base_facts(job)) else {}),
    }
    return About(job.name, str(job.layout), samples, meta)


def remove_drafts(run: Path) -> None:
    """Removes what killed ranks have left of unfinished checkpoints in a run folder. For the
    launcher, when all ranks that it started have ended.

    A live run's rank 0 holds the folder's lock while any of its ranks writes: then nothing is
    removed. Where no launcher of howdah is left to do this (it was killed too, the run had one
    process, torchrun started it), drafts stay until the next start (`resume.find_start`): a single
    rank cannot tell whether others still write.
    """
    with suppress(UserError, OSError):
        if (run / "checkpoints").is_dir():
            with lock(run):
                clean_run(run)


def keep_tokenizer(source: Path, to: Path) -> None:
    """Copies a file of the tokenizer into the run folder, completely or not at all; an equal one is
    left alone.

    Raises UserError when that fails: without the tokenizer the trained model could not be used.
    """
    try:
        content = source.read_bytes()
        same_size = to.is_file() and to.stat().st_size == len(content)
        if same_size and to.read_bytes() == content:
            return
        with replacing(to) as file:
            file.write(content)
    except OSError as error:
        raise UserError(
            f"cannot copy the tokenizer {source} to {to} ({error.strerror or error}); make room "
            "there, or give another folder with folder=PATH"
        ) from error
