"""The outputs of a run that grow while it works: log.txt, metrics.jsonl and TensorBoard files.

The log line begins like torchtitan's, for which parsers exist:

    step: 10  loss:  5.61120  grad_norm:  1.2201  memory:  0.52GiB(2.21%)  tps: 4,310  tflops: 0.11
    mfu: 41.20%  lr: 3.00e-03  sent: 12.1MiB  exposed: 2.10%  data: 0.05%
    epoch: 0.02  left: 0:04:10

tps is tokens per second *per rank*. tflops and mfu count the full attention square, as torchtitan
does; metrics.jsonl also has the causal count. On a card, what torch has reserved of it follows lr.
TensorBoard keys are torchtitan's.

Training needs none of these files: if one cannot be written, the run reports it once and continues.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from howdah.base.atomic import replacing, sync_folder
from howdah.base.files import read_file
from howdah.train.length import spell_time
from howdah.train.optional import OptionalOutput
from howdah.train.tensorboard import Board, write_all
from howdah.train.trackers import Tracker

METRICS, LOG, BOARD = "metrics.jsonl", "log.txt", "tensorboard"
# Kinds of rows. HELD_OUT is of some samples, on the way; HELD_OUT_ALL of all held-out text.
TRAIN, HELD_OUT, HELD_OUT_ALL = "train", "held_out", "held_out_all"
OWN = "own"  # what callbacks have logged
GIB = 1 << 30
MOST_BYTES = GIB  # of metrics.jsonl that are read again
MIB = 1 << 20


@dataclass(frozen=True)
class Busy:
    """How evenly experts are busy: shares of the mean, and of all choices."""

    least: float
    most: float
    dropped: float


def busy(counts: Mapping[str, list[int]]) -> Busy | None:
    """Of `counts` by block: the tokens of each expert, and last how many were dropped. None for a
    dense model, or a step without tokens.
    """
    blocks = [(tokens, dropped) for *tokens, dropped in counts.values() if sum(tokens)]
    if not blocks:
        return None
    shares = [len(tokens) * count / sum(tokens) for tokens, _ in blocks for count in tokens]
    total = sum(sum(tokens) for tokens, _ in blocks)
    return Busy(min(shares), max(shares), sum(dropped for _, dropped in blocks) / total)


@dataclass(frozen=True)
class StepMetrics:
    """The measurements of one logged stretch of steps, taken on rank 0.

    step          the last step of the stretch, counted from 1
    loss, norm    of that step: mean loss per token, gradient norm before clipping
    rate          learning rate of that step
    tps           tokens per second and rank
    tflops, mfu   full-square convention; mfu_causal counts the half that causal attention needs
    memory        peak bytes: of a card those of tensors in the stretch, else of this process since
                  its start; memory_share is their share of all memory
    reserved      peak bytes that torch took from the card in the stretch; None on a CPU
    sent          bytes that this rank sent per step
    exposed       share of the time in which computation waited for other ranks, or for what comes
                  from its home on the host or the disk, or goes there
    waited        share of the time that the loop waited for data
    seconds       duration of the stretch
    epoch         epochs of the text that the run has used so far
    left          seconds that the rest of the run takes, at the speed since its start or resume
    experts       by name of a block with experts, the tokens that each of them had in that step
    busy          how evenly the experts were busy in that step
    spikes        steps of the run so far whose loss was a spike; None where nobody watches
    """

    step: int
    loss: float
    norm: float
    rate: float
    tps: float
    tflops: float
    mfu: float
    mfu_causal: float
    memory: int
    memory_share: float
    sent: float
    exposed: float
    waited: float
    seconds: float
    epoch: float = 0.0
    left: float = 0.0
    reserved: int | None = None
    experts: Mapping[str, list[int]] | None = None
    busy: Busy | None = None
    spikes: int | None = None

    def line(self) -> str:
        """The log line."""
        card = "" if self.reserved is None else f"reserved: {self.reserved / GIB:.2f}GiB  "
        if self.busy:
            dropped = f"dropped: {self.busy.dropped:.2%}  " if self.busy.dropped else ""
            card += f"experts: {self.busy.least:.0%}-{self.busy.most:.0%}  {dropped}"
        if self.spikes:
            card += f"spikes: {self.spikes}  "
        return (
            f"step: {self.step:2d}  loss: {self.loss:8.5f}  grad_norm: {self.norm:7.4f}  "
            f"memory: {self.memory / GIB:5.2f}GiB({self.memory_share:.2%})  "
            f"tps: {round(self.tps):,}  tflops: {self.tflops:,.2f}  mfu: {self.mfu:.2%}  "
            f"lr: {self.rate:.2e}  {card}sent: {self.sent / MIB:.1f}MiB  "
            f"exposed: {self.exposed:.2%}  data: {self.waited:.2%}  "
            f"epoch: {self.epoch:.2f}  left: {spell_time(self.left)}"
        )

    def scalars(self) -> dict[str, float]:
        """The values, by TensorBoard key."""
        card = {} if self.reserved is None else {"memory/max_reserved(GiB)": self.reserved / GIB}
        if self.busy:
            card |= {f"experts/{name}": value for name, value in asdict(self.busy).items()}
        if self.spikes is not None:
            card["spikes"] = self.spikes
        return {
            "loss_metrics/global_avg_loss": self.loss,
            "grad_norm": self.norm,
            "lr": self.rate,
            "throughput(tps)": self.tps,
            "tflops": self.tflops,
            "mfu(%)": 100 * self.mfu,
            "memory/max_active(GiB)": self.memory / GIB,
            "memory/max_active(%)": 100 * self.memory_share,
            "time_metrics/end_to_end(s)": self.seconds,
            "time_metrics/data_loading(%)": 100 * self.waited,
            "communication/sent(MiB)": self.sent / MIB,
            "communication/exposed(%)": 100 * self.exposed,
            **card,
        }


# -- files that grow -----------------------------------------------------------


def append(path: Path, line: str) -> None:
    """Appends a line to a text file. Raises OSError when that is impossible.

    The file is opened for every line: so the run notices when it was removed, and uses it when it
    is back. A last line that was cut off, by a full disk or a power cut, is ended first. A pipe in
    its place, which may have no reader, keeps nobody waiting.
    """
    with open(path, "ab+", buffering=0, opener=_without_waiting) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
        write_all(file, f"{'' if whole else chr(10)}{line}\n".encode(errors="replace"))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def sift(metrics: Path, keep: Callable[[str, int], bool]) -> int:
    """Keeps the rows of metrics.jsonl for which keep(kind, step) is true, and removes all other
    lines. Returns how many of these were not rows at all. Raises OSError.
    """
    if not metrics.is_file():
        return 0
    lines = read_file(metrics, MOST_BYTES).splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row and keep(*row)]
    if kept != lines:
        with replacing(metrics) as file:
            file.writelines(kept)
        sync_folder(metrics.parent)
    return rows.count(None)


def _row(line: bytes) -> tuple[str, int] | None:
    """(kind, step) of a row; None if a power cut, a full disk or an editor damaged the line."""
    try:
        row = json.loads(line)
        kind, step = row["kind"], row["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (kind, step) if line.endswith(b"\n") and type(step) is int else None


class MetricsWriter:
    """Writes the files of a run folder that grow. A resumed run appends to them.

    step  the step from which the run resumes. Metrics of later steps are removed first: these steps
          run again, and each step should be in the file once. log.txt keeps all lines
    say   shows a sentence to the user when a file cannot be written; log.txt gets it, too
    trackers  by name, what else gets the metrics; None: TensorBoard's files
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        say: Callable[[str], None],
        trackers: Mapping[str, Tracker] | None = None,
    ) -> None:
        self._folder, self._say = folder, say
        self._beside = OptionalOutput(self._tell)
        board = {BOARD: Board(folder / BOARD, step=step)}
        self._trackers: Mapping[str, Tracker] = board if trackers is None else trackers
        self._evaluated = step  # no evaluation of a later step is in metrics.jsonl
        with self._beside.writing(METRICS):
            spoilt = sift(folder / METRICS, lambda _, done: done <= step)
            if spoilt:
                self._tell(f"{METRICS}: lines that cannot be read were left out: {spoilt}")

    def measured(self, measured: StepMetrics) -> None:
        """Writes the measurements of a stretch of steps."""
        with self._beside.writing(METRICS):
            row = asdict(measured)
            self._add(TRAIN, {name: value for name, value in row.items() if value is not None})
        self.log(measured.line())
        self._track(measured.scalars(), measured.step)

    def held_out(self, *, step: int, values: Mapping[str, float], whole: bool) -> None:
        """Writes the values of an evaluation, of some held-out samples or of the `whole` text. If a
        step is evaluated again, its last result is kept.
        """
        kind = HELD_OUT_ALL if whole else HELD_OUT
        with self._beside.writing(METRICS):
            if step <= self._evaluated:
                sift(self._folder / METRICS, lambda *row: row != (kind, step))
            self._add(kind, {"step": step, **values})
            self._evaluated = step
        self._track({f"{kind}/{name}": value for name, value in values.items()}, step)

    def own(self, step: int, values: Mapping[str, float]) -> None:
        """Writes what callbacks have logged of a step."""
        with self._beside.writing(METRICS):
            self._add(OWN, {"step": step, **values})
        told = "  ".join(f"{name}: {value:.6g}" for name, value in values.items())
        self.log(f"own         step: {step:2d}  {told}")
        self._track({f"{OWN}/{name}": value for name, value in values.items()}, step)

    def log(self, line: str) -> None:
        """Appends a line to log.txt."""
        with self._beside.writing(LOG):
            append(self._folder / LOG, line)

    def back_to(self, step: int) -> None:
        """Removes the rows of steps behind `step`, which are done again."""
        with self._beside.writing(METRICS):
            sift(self._folder / METRICS, lambda _, done: done <= step)
        self._evaluated = min(self._evaluated, step)

    def close(self) -> None:
        """Ends what the trackers have begun."""
        for name, tracker in self._trackers.items():
            with self._beside.writing(name):
                tracker.close()

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for name, tracker in self._trackers.items():
            with self._beside.writing(name):
                tracker.add(values, step)

    def _add(self, kind: str, values: Mapping[str, object]) -> None:
        append(self._folder / METRICS, json.dumps({"kind": kind, **values}))

    def _tell(self, sentence: str) -> None:
        self._say(sentence)
        self.log(sentence)
