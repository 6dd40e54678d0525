"""The end of a run: the last evaluation, a sample, an export, and a page that says it all.

Bytes that were predicted before the run stand beside the bytes that were counted in it. They
must be equal; where they are not, it is said.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from howdah.base.errors import Unfinished, UserError
from howdah.parallel.mesh import Mesh
from howdah.plan.batch import micro_steps
from howdah.plan.recording import Traffic
from howdah.sim.traffic import step_traffic
from howdah.text.tokens import Corpus
from howdah.train.checkpointing import Checkpointer
from howdah.train.evaluate import HeldOut
from howdah.train.finished_run import FinishedRun, open_run
from howdah.train.job import Job
from howdah.train.metrics import MIB
from howdah.train.monitor import SpeedMonitor
from howdah.train.report import Bytes, compare
from howdah.train.run_folder import EXPORT
from howdah.train.sample import Draw, sample_text

SAMPLE_TOKENS = 120
SCALARS = "scalars"  # the operation


def finish(job: Job, checkpointer: Checkpointer, monitor: SpeedMonitor, held: Bytes) -> None:
    """Evaluates on all held-out text, exports, and reports. All ranks call together.

    held  what rank 0 was measured to hold, by component; empty when no step was taken

    Raises Unfinished where the checkpoint of the last step is no longer there.
    """
    held_out = checkpointer.evaluate(job.train.steps, limit=0)
    mesh = checkpointer.context.mesh
    if mesh.rank != 0:
        return
    opened = open_last(job, checkpointer)
    lines = ["", *quality(held_out, checkpointer.corpus), *speed(job, mesh, monitor)]
    lines += compare(job.plan, mesh, held) if held else []
    lines += _optional("export", export, job, opened) if job.train.export else []
    lines += _optional("sample", sample, job, opened) if job.train.prompt else []
    for line in [*lines, *paths(job, opened)]:
        checkpointer.say(line)


def open_last(job: Job, checkpointer: Checkpointer) -> FinishedRun:
    """The run with what it has just saved: no older step passes for its end.

    Raises Unfinished where somebody has removed or damaged it since.
    """
    stands = "no other one is"
    with suppress(UserError):
        opened = open_run(job.folder, say=checkpointer.say)
        if opened.checkpoint.step == checkpointer.saved:
            return opened
        stands = f"step {opened.checkpoint.step} is the newest that is"
    raise Unfinished(
        f"step {checkpointer.saved} was saved, and is no longer whole in {checkpointer.folder}; "
        f"{stands}; what is missing is trained again by: howdah train {job.folder}"
    )


def _optional(
    name: str, make: Callable[[Job, FinishedRun], list[str]], job: Job, opened: FinishedRun
) -> list[str]:
    """Makes something that is not training, whose end it must not spoil."""
    try:
        return make(job, opened)
    except (UserError, OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or str(error) or "there is not enough memory"
        return [f"{name}      not made: {why}; try again with howdah {name} {_short(job.folder)}"]


def export(job: Job, opened: FinishedRun) -> list[str]:
    """Writes the Hugging Face folder."""
    opened.export(job.folder / EXPORT)
    return [f"export      {_short(job.folder)}/{EXPORT}, for AutoModelForCausalLM.from_pretrained"]


def quality(held_out: HeldOut, corpus: Corpus) -> list[str]:
    """The held-out loss, beside what compressors make of the same text."""
    per_byte = {
        "gzip -9": 8 * corpus.held_out_gzip / corpus.held_out_bytes,
        "xz -9": 8 * corpus.held_out_xz / corpus.held_out_bytes,
    }
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in per_byte.items())
    return [
        f"held-out    loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.2f}, "
        f"{held_out.bits_per_byte:.3f} bits per byte ({others}) "
        f"on {corpus.held_out_bytes / 1e6:.2f} MB of text"
    ]


def speed(job: Job, mesh: Mesh, monitor: SpeedMonitor) -> list[str]:
    """Tokens per second, and bytes predicted beside bytes counted."""
    if not monitor.last or not monitor.seconds:
        return []
    rate, world = monitor.tokens / monitor.seconds, mesh.layout.world
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    lines = [
        f"speed       {rate:,.0f} tokens/s on {mesh.layout} ({ranks}), "
        f"mfu {monitor.last.mfu:.1%} of {monitor.peak / 1e9:,.0f} Gflop/s per rank "
        f"({monitor.peak_source}; full attention square, {monitor.last.mfu_causal:.1%} causal)"
    ]
    predicted, counted = predicted_bytes(job, mesh, monitor.steps), counted_bytes(mesh)
    return [*lines, sent(predicted, counted, monitor.steps)] if predicted or counted else lines


def sent(predicted: Mapping[Traffic, int], counted: Mapping[Traffic, int], steps: int) -> str:
    """Bytes predicted beside bytes counted, in sum; and the first row in which they differ."""
    sums = sum(predicted.values()), sum(counted.values())
    differ = (r for r in {*predicted, *counted} if predicted.get(r, 0) != counted.get(r, 0))
    verdict = "equal"
    if row := min(differ, default=None):
        told, found = predicted.get(row, 0), counted.get(row, 0)
        verdict = (
            f"NOT EQUAL in {row.axis} {row.operation} over {row.link}, {told:,} and {found:,}: "
            "please report this"
        )
    return (
        f"sent        {sums[1] / MIB:,.1f} MiB by rank 0 in {steps} steps; "
        f"predicted {sums[0]:,} bytes, counted {sums[1]:,}: {verdict}"
    )


def counted_bytes(mesh: Mesh) -> dict[Traffic, int]:
    """What this rank has sent in the steps, without scalars: those also pass between the steps."""
    rows = mesh.counters.sent().items()
    return {row: count for row, count in rows if row.operation != SCALARS}


def predicted_bytes(job: Job, mesh: Mesh, steps: int) -> dict[Traffic, int]:
    """What this rank sends in the run's last `steps` steps, by the simulator: where the batch
    grows, with the micro-batches that each step has.
    """
    plan, predicted = job.plan, Counter[Traffic]()
    sizes = (job.batch.size(step) for step in range(job.train.steps - steps, job.train.steps))
    readers = plan.layout.readers
    taken = Counter(micro_steps(n, micro=plan.micro_batch, replicas=readers) for n in sizes)
    for micros, times in taken.items():
        then = replace(plan, layout=replace(plan.layout, micros=micros))
        for row, count in step_traffic(then, mesh.rank, mesh.wires).items():
            if row.operation != SCALARS:
                predicted[row] += count * times
    return predicted


def sample(job: Job, opened: FinishedRun) -> list[str]:
    """A continuation of the run's prompt."""
    parts = sample_text(
        opened.model(),
        opened.tokenizer(),
        job.train.prompt,
        length=min(SAMPLE_TOKENS, job.shape.context // 2),
        draw=Draw(temperature=0.5, top_p=0.95, seed=job.seed),
        end=opened.end,
    )
    return ["", job.train.prompt + "".join(parts), ""]


def paths(job: Job, opened: FinishedRun) -> list[str]:
    """What the run has left, and what to do next."""
    run = _short(job.folder)
    lines = [
        f"checkpoint  {_short(opened.checkpoint.path)}",
        f"log         {run}/log.txt, {run}/metrics.jsonl; tensorboard --logdir {run}/tensorboard",
    ]
    return [*lines, f'go on       howdah sample {run} "{job.train.prompt or "def "}"']


def how_to_go_on(job: Job, step: int) -> str:
    """What a stopped run says."""
    run = _short(job.folder)
    return f"stopped after step {step} of {job.train.steps} and saved; go on: howdah train {run}"


def how_to_finish(job: Job) -> str:
    """What a run says that was stopped when its last step was saved already."""
    run = _short(job.folder)
    return f"stopped after the last step, which is saved; for what follows it: howdah train {run}"


def _short(path: Path) -> str:
    """Relative to the current folder where it lies below it; that may have been removed."""
    with suppress(OSError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
