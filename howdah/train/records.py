"""What a run writes down: log lines, metrics.jsonl and TensorBoard.

The log line begins as torchtitan's, because people's parsers know it:

    step: 10  loss:  5.61120  grad_norm:  1.2201  memory:  0.52GiB(2.21%)  tps: 4,310  tflops: 0.11
    mfu: 41.20%  lr: 3.00e-03  sent: 12.1MiB  exposed: 2.10%  data: 0.05%

tps is tokens per second *per rank*. tflops and mfu count the full attention square, as
torchtitan does; metrics.jsonl also has the causal count. TensorBoard keys are torchtitan's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from howdah.checkpoint.atomic import write_text

METRICS = "metrics.jsonl"
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Measured:
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


def forget_after(metrics: Path, step: int) -> None:
    """Drops the rows of later steps from metrics.jsonl, and a last row that was cut off."""
    if not metrics.exists():
        return
    lines = metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if kept != lines:
        write_text(metrics, "".join(kept))


class Records:
    """The files of a run folder that grow. A resumed run appends.

    What was measured after `step`, from which the run goes on, is dropped first: those steps are
    done again, and each step should stand there once. log.txt keeps all that was said.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        forget_after(folder / METRICS, step)
        self._metrics: TextIO = (folder / METRICS).open("a")
        self._log: TextIO = (folder / "log.txt").open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def measured(self, measured: Measured) -> None:
        """A stretch of steps."""
        self._write("train", asdict(measured))
        self.log(measured.line())
        for name, value in measured.scalars().items():
            self._board.add_scalar(name, value, measured.step)

    def held_out(self, *, step: int, loss: float, bits_per_byte: float) -> None:
        """An evaluation."""
        self._write("held_out", {"step": step, "loss": loss, "bits_per_byte": bits_per_byte})
        self._board.add_scalar("held_out/loss", loss, step)
        self._board.add_scalar("held_out/bits_per_byte", bits_per_byte, step)

    def log(self, line: str) -> None:
        """A line of log.txt."""
        self._log.write(line + "\n")
        self._log.flush()

    def _write(self, kind: str, values: Mapping[str, object]) -> None:
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        self._metrics.close()
        self._log.close()
        self._board.close()
