"""What a run writes down: log lines, metrics.jsonl and TensorBoard.

The log line begins as torchtitan's, because people's parsers know it:

    step: 10  loss:  5.61120  grad_norm:  1.2201  memory:  0.52GiB(2.21%)  tps: 4,310  tflops: 0.11
    mfu: 41.20%  lr: 3.00e-03  sent: 12.1MiB  exposed: 2.10%  data: 0.05%

tps is tokens per second *per rank*. tflops and mfu count the full attention square, as
torchtitan does; metrics.jsonl also has the causal count. TensorBoard keys are torchtitan's.

None of these files is needed to train: what cannot be written is said once, and training goes on.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from howdah.base.atomic import replacing, sync_folder
from howdah.train.optional import OptionalOutput
from howdah.train.tensorboard import Board, write_all

METRICS, LOG, BOARD = "metrics.jsonl", "log.txt", "tensorboard"
TRAIN, HELD_OUT = "train", "held_out"  # kinds of rows
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class StepMetrics:
    """One logged stretch of steps, as rank 0 saw it.

    step         the last step of the stretch, counted from 1
    loss, norm   of that step: mean loss per token, gradient norm before clipping
    tps          tokens per second and rank
    tflops, mfu  full-square convention; mfu_causal counts the half that causal attention needs
    sent         bytes that this rank sent per step
    exposed      share of the time spent waiting for gradients after backward
    waited       share of the time spent waiting for data
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

    def line(self) -> str:
        """The log line."""
        return (
            f"step: {self.step:2d}  loss: {self.loss:8.5f}  grad_norm: {self.norm:7.4f}  "
            f"memory: {self.memory / GIB:5.2f}GiB({self.memory_share:.2%})  "
            f"tps: {round(self.tps):,}  tflops: {self.tflops:,.2f}  mfu: {self.mfu:.2%}  "
            f"lr: {self.rate:.2e}  sent: {self.sent / MIB:.1f}MiB  "
            f"exposed: {self.exposed:.2%}  data: {self.waited:.2%}"
        )

    def scalars(self) -> dict[str, float]:
        """The values under TensorBoard's keys."""
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
        }


# -- files that grow -----------------------------------------------------------


def append(path: Path, line: str) -> None:
    """Adds a line to a text file. Raises OSError where that is impossible.

    The file is opened for every line: then one that was removed is noticed, and one that comes
    back is used. A last line that was cut off, by a full disk or a power cut, is ended first.
    """
    with path.open("ab+", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
        write_all(file, f"{'' if whole else chr(10)}{line}\n".encode(errors="replace"))


def sift(metrics: Path, keep: Callable[[str, int], bool]) -> int:
    """Keeps the rows of metrics.jsonl whose kind and step are wanted.

    Lines that are no rows go as well; returns how many there were.
    """
    if not metrics.is_file():
        return 0
    lines = metrics.read_bytes().splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row and keep(*row)]
    if kept != lines:
        with replacing(metrics) as file:
            file.writelines(kept)
        sync_folder(metrics.parent)
    return rows.count(None)


def _row(line: bytes) -> tuple[str, int] | None:
    """Kind and step of a row; None where a power cut, a full disk or a hand has spoilt the line."""
    try:
        row = json.loads(line)
        kind, step = row["kind"], row["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (kind, step) if line.endswith(b"\n") and type(step) is int else None


class MetricsWriter:
    """The files of a run folder that grow. A resumed run appends.

    What was measured after `step`, from which the run goes on, is dropped first: those steps are
    done again, and each step should stand there once. log.txt keeps all that was said. `say` is
    told in a sentence what cannot be written, and log.txt as well.
    """

    def __init__(self, folder: Path, *, step: int, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._beside = OptionalOutput(self._tell)
        self._board = Board(folder / BOARD, step=step)
        self._evaluated = step  # no evaluation of a later step is in metrics.jsonl
        with self._beside.writing(METRICS):
            spoilt = sift(folder / METRICS, lambda _, done: done <= step)
            if spoilt:
                self._tell(f"{METRICS}: lines that cannot be read were left out: {spoilt}")

    def measured(self, measured: StepMetrics) -> None:
        """A stretch of steps."""
        with self._beside.writing(METRICS):
            self._add(TRAIN, asdict(measured))
        self.log(measured.line())
        with self._beside.writing(BOARD):
            self._board.add(measured.scalars(), measured.step)

    def held_out(self, *, step: int, loss: float, bits_per_byte: float) -> None:
        """An evaluation. Of a step that is evaluated again, the last one stays."""
        values = {"loss": loss, "bits_per_byte": bits_per_byte}
        with self._beside.writing(METRICS):
            if step <= self._evaluated:
                sift(self._folder / METRICS, lambda *row: row != (HELD_OUT, step))
            self._add(HELD_OUT, {"step": step, **values})
            self._evaluated = step
        with self._beside.writing(BOARD):
            self._board.add({f"held_out/{name}": value for name, value in values.items()}, step)

    def log(self, line: str) -> None:
        """A line of log.txt."""
        with self._beside.writing(LOG):
            append(self._folder / LOG, line)

    def _add(self, kind: str, values: Mapping[str, object]) -> None:
        append(self._folder / METRICS, json.dumps({"kind": kind, **values}))

    def _tell(self, sentence: str) -> None:
        self._say(sentence)
        self.log(sentence)
