"""The end of a run: the last evaluation, a sample, an export, and a report.

The report shows the bytes that were predicted before the run beside the bytes that were counted in
it. They must be equal; a difference is reported.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from howdah.base.errors import Unfinished, UserError, pasted
from howdah.comm.launch import explain
from howdah.generate.draw import Draw
from howdah.generate.predictor import OneDevice
from howdah.generate.texts import sample_text
from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import DTYPES
from howdah.parallel.mesh import Mesh
from howdah.plan.batch import micro_steps
from howdah.plan.homes import AXIS
from howdah.plan.recording import Traffic
from howdah.plan.sharding import fixed_capacity
from howdah.sim.traffic import activation_traffic, rows_traffic, step_traffic
from howdah.text.tokens import Corpus
from howdah.train.apart import bring_home
from howdah.train.checkpointing import Checkpointer
from howdah.train.evaluate import HeldOut
from howdah.train.finished_run import FinishedRun, open_run
from howdah.train.job import Job
from howdah.train.metrics import MIB
from howdah.train.monitor import SpeedMonitor
from howdah.train.report import Bytes, allocated, compare, compare_time
from howdah.train.run_folder import EXPORT
from howdah.train.whole_model import own_model

SAMPLE_TOKENS = 120
COMPARABLE = 10_000  # bytes of text from which on compressors are worth a comparison
SCALARS = "scalars"  # an operation of Traffic rows


def finish(job: Job, checkpointer: Checkpointer, monitor: SpeedMonitor, held: Bytes) -> None:
    """Evaluates on all held-out text; rank 0 also exports, samples and reports. All ranks call
    together.

    held  bytes that rank 0 was measured to hold, by component; empty when no step was taken

    Raises Unfinished when the checkpoint of the last step no longer exists.
    """
    held_out = checkpointer.at_end(job.train.steps)
    mesh, team = checkpointer.context.mesh, checkpointer.team
    bring_home(checkpointer.folder, checkpointer.saved, mesh, team, checkpointer.say)
    if mesh.rank != 0:
        return
    opened = open_last(job, checkpointer)
    lines = ["", *quality(held_out, checkpointer.corpus), *speed(job, mesh, monitor)]
    lines += compare_time(job, monitor.paces)
    lines += compare(job.plan, mesh, held) if held else []
    if held and mesh.device.type == "cuda":
        lines.append(allocated(job.plan, mesh.rank, monitor.most))
    lines += _optional("export", export, job, opened) if job.train.export else []
    sampled = partial(sample, placed=checkpointer.context.placed)
    lines += _optional("sample", sampled, job, opened) if job.train.prompt else []
    for line in [*lines, *paths(job, opened)]:
        checkpointer.say(line)


def open_last(job: Job, checkpointer: Checkpointer) -> FinishedRun:
    """Opens the run at the checkpoint that was just saved; an older one is not accepted as its end.

    Raises Unfinished when that checkpoint has been removed or damaged since.
    """
    stands = "no other one is"
    with suppress(UserError):
        opened = open_run(job.folder, say=checkpointer.say)
        if opened.checkpoint.step == checkpointer.saved:
            return opened
        stands = f"step {opened.checkpoint.step} is the newest that is"
    raise Unfinished(
        f"step {checkpointer.saved} was saved, and is no longer whole in {checkpointer.folder}; "
        f"{stands}; what is missing is trained again by: howdah train {pasted(job.folder)}"
    )


def _optional(
    name: str, make: Callable[[Job, FinishedRun], list[str]], job: Job, opened: FinishedRun
) -> list[str]:
    """Makes an output that is not part of training. A failure becomes a line of the report, and
    does not make the run fail.
    """
    try:
        return make(job, opened)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        failure = explain(error)  # torch reports a lack of memory as a RuntimeError
        if failure.kind not in ("mistake", "limit"):
            raise
        why = failure.told
        return [f"{name}      not made: {why}; try again with howdah {name} {_short(job.folder)}"]


def export(job: Job, opened: FinishedRun) -> list[str]:
    """Writes the Hugging Face folder of the run."""
    opened.export(job.folder / EXPORT)
    kinds = {"decoder": "CausalLM", "encoder": "MaskedLM", "encoder-decoder": "Seq2SeqLM"}
    kind = "SequenceClassification" if job.shape.labels else kinds[job.shape.family]
    return [f"export      {_short(job.folder)}/{EXPORT}, for AutoModelFor{kind}.from_pretrained"]


def quality(held_out: HeldOut, corpus: Corpus) -> list[str]:
    """The held-out loss, beside the bits per byte of compressors on the same text."""
    per_byte = {
        "gzip -9": 8 * corpus.held_out_gzip / corpus.held_out_bytes,
        "xz -9": 8 * corpus.held_out_xz / corpus.held_out_bytes,
    }
    if held_out.scores:
        loss = f"loss {held_out.loss:.4f}, {held_out.scores}"
        return [f"held-out    {loss} of {held_out.tokens:,} texts"]
    if corpus.mask is not None:  # bits of hidden tokens are not those of a text
        loss = f"loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.2f}"
        return [f"held-out    {loss} of {held_out.tokens:,} hidden tokens"]
    if corpus.start is not None:
        loss = f"loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.2f}"
        return [f"held-out    {loss} of {held_out.tokens:,} tokens of targets"]
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in per_byte.items())
    size = corpus.held_out_bytes
    compared = f" ({others})" if size >= COMPARABLE else ""
    text = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"
    return [
        f"held-out    loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.2f}, "
        f"{held_out.bits_per_byte:.3f} bits per byte{compared} on {text} of text"
    ]


def speed(job: Job, mesh: Mesh, monitor: SpeedMonitor) -> list[str]:
    """Tokens per second, and the bytes predicted beside the bytes counted."""
    if not monitor.last or not monitor.seconds:
        return []
    rate, world = monitor.tokens / monitor.seconds, mesh.layout.world
    full, causal = monitor.mfu
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    lines = [
        f"speed       {rate:,.0f} tokens/s on {mesh.layout} ({ranks}), "
        f"mfu {full:.1%} of {monitor.peak / 1e9:,.0f} Gflop/s per rank "
        f"({monitor.peak_source}; full attention square, {causal:.1%} causal)"
    ]
    predicted = predicted_bytes(job, mesh, monitor.steps, monitor.packed)
    counted = counted_bytes(mesh)
    but = "ep" if mesh.layout.ep > 1 and not fixed_capacity(job.plan) else ""
    if but:  # nor is it known how many rows at experts leave the device
        for rows in (predicted, counted):
            for row in [row for row in rows if row.axis == AXIS and "activations" in row.operation]:
                del rows[row]
    if not predicted and not counted:
        return lines
    away = any(row.axis == AXIS for row in predicted)
    return [*lines, sent(predicted, counted, monitor.steps, but=but, away=away)]


def sent(
    predicted: Mapping[Traffic, int],
    counted: Mapping[Traffic, int],
    steps: int,
    *,
    but: str = "",
    away: bool = False,
) -> str:
    """The total bytes predicted and counted, and the first row in which they differ.

    but   an axis whose bytes depend on the data: they were predicted for evenly busy experts
    away  whether there are bytes from and to homes among them
    """
    sums = sum(predicted.values()), sum(counted.values())
    rows = (row for row in {*predicted, *counted} if row.axis != but)
    differ = (row for row in rows if predicted.get(row, 0) != counted.get(row, 0))
    verdict = f"equal but for {but}, predicted for evenly busy experts" if but else "equal"
    if row := min(differ, default=None):
        told, found = predicted.get(row, 0), counted.get(row, 0)
        verdict = (
            f"NOT EQUAL in {row.axis} {row.operation} over {row.link}, {told:,} and {found:,}: "
            "please report this"
        )
    who = "rank 0 and its homes" if away else "rank 0"
    return (
        f"sent        {sums[1] / MIB:,.1f} MiB by {who} in {steps} steps; "
        f"predicted {sums[0]:,} bytes, counted {sums[1]:,}: {verdict}"
    )


def counted_bytes(mesh: Mesh) -> dict[Traffic, int]:
    """The bytes that this rank has sent in the steps, by row. Scalars are left out, because they
    are also sent between steps.
    """
    rows = mesh.counters.sent().items()
    return {row: count for row, count in rows if row.operation != SCALARS}


def predicted_bytes(
    job: Job, mesh: Mesh, steps: int, packed: Mapping[bool, int]
) -> dict[Traffic, int]:
    """The bytes that this rank sends in the run's last `steps` steps, as the simulator predicts
    them. Where the batch grows, each step is predicted with its own number of micro-batches.

    packed  how many of them had rows of several documents, and how many not
    """
    plan, predicted = job.plan, Counter[Traffic]()
    sizes = (job.batch.size(step) for step in range(job.train.steps - steps, job.train.steps))
    readers = plan.layout.readers
    taken = Counter(micro_steps(n, micro=plan.micro_batch, replicas=readers) for n in sizes)
    for micros, times in taken.items():
        then = replace(plan, layout=replace(plan.layout, micros=micros))
        for row, count in step_traffic(then, mesh.rank, mesh.wires, rows=False).items():
            if row.operation != SCALARS:
                predicted[row] += count * times
    rows = mesh.counters.rows_sent, mesh.counters.dense_sums
    predicted += activation_traffic(plan, mesh.rank, packed)
    return predicted + rows_traffic(plan, mesh.rank, mesh.wires, *rows)


def sample(job: Job, opened: FinishedRun, placed: ParallelModel) -> list[str]:
    """A continuation of the run's prompt, by the weights that this rank trains. Where it has a part
    of them, they are loaded whole, in the run's precision and on its device.
    """
    dtype = DTYPES[job.method.precision]
    parts = sample_text(
        OneDevice(own_model(placed) or opened.model(dtype, placed.mesh.device)),
        opened.tokenizer(),
        job.train.prompt,
        length=min(SAMPLE_TOKENS, job.shape.context // 2),
        draw=Draw(temperature=0.5, top_p=0.95, seed=job.seed),
        end=opened.end,
    )
    return ["", job.train.prompt + "".join(parts), ""]


def paths(job: Job, opened: FinishedRun) -> list[str]:
    """The files that the run has written, and a command to continue with."""
    run = _short(job.folder)
    there = pasted(f"{run}/tensorboard")
    lines = [
        f"checkpoint  {_short(opened.checkpoint.path)}",
        f"log         {run}/log.txt, {run}/metrics.jsonl; tensorboard --logdir {there}",
    ]
    if job.shape.family != "decoder" or job.shape.labels:
        return lines
    chat = " --chat" if job.data.chats else ""
    prompt = job.train.prompt or ("Hello" if chat else "def ")
    return [*lines, f'go on       howdah sample {pasted(run)} "{prompt}"{chat}']


def how_to_go_on(job: Job, step: int) -> str:
    """The last message of a run that was stopped before its last step."""
    run = pasted(_short(job.folder))
    return f"stopped after step {step} of {job.train.steps} and saved; go on: howdah train {run}"


def how_to_finish(job: Job) -> str:
    """The last message of a run that was stopped when its last step was already saved."""
    run = pasted(_short(job.folder))
    return f"stopped after the last step, which is saved; for what follows it: howdah train {run}"


def _short(path: Path) -> str:
    """`path` relative to the current folder if it is below it; unchanged if it is not, or if the
    current folder was removed.
    """
    with suppress(OSError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
