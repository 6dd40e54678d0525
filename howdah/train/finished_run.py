"""A finished or stopped run, opened for use: its weights, its tokenizer, its export."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from howdah.base.errors import UserError
from howdah.base.files import kind_of
from howdah.checkpoint import load
from howdah.checkpoint.export import export
from howdah.checkpoint.facts import facts
from howdah.checkpoint.folders import numbered
from howdah.checkpoint.load import Checkpoint, newest
from howdah.host.measured import left
from howdah.model.transformer import Transformer
from howdah.plan.method import AVERAGE
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import ModelShape
from howdah.text import tokenizer as tokenizers
from howdah.text.template import CHAT, Manner, read_manner
from howdah.train.adapted import fill_for_use, tensors_for_use
from howdah.train.console import Say
from howdah.train.run_folder import TOKENIZER
from howdah.train.whole_model import loaded_model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FinishedRun:
    """A run folder, and one complete checkpoint of that run."""

    folder: Path
    checkpoint: Checkpoint

    @property
    def shape(self) -> ModelShape:
        return facts(self.checkpoint).model

    @property
    def end(self) -> int:
        """The token between documents."""
        return facts(self.checkpoint).end

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        return tokenizers.load(self.folder / TOKENIZER)

    def manner(self) -> Manner | None:
        """How the run's tokenizer writes conversations; None: its text was none."""
        path = self.folder / CHAT
        return read_manner(path) if path.is_file() else None

    def model(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Transformer:
        """The model on one device; any layout may have saved it.

        Raises UserError when too little memory is left there. Otherwise the system would kill the
        process that asks for it, which at the end of a run is the training process.
        """
        needed, there = dtype.itemsize * parameters(self.shape).total, left(device)
        if there is not None and needed > there:
            precision = str(dtype).removeprefix("torch.")
            where = "" if device.type == "cpu" else f" on {device}"
            raise UserError(
                f"the model of {self.folder} takes {needed / 1e9:.1f} GB of memory in {precision}, "
                f"and {there / 1e9:.1f} GB are left{where}; end other programs, or use a larger "
                f"{'machine' if device.type == 'cpu' else 'card'}"
            )
        fill = fill_for_use(self.checkpoint)
        return loaded_model(fill, self.shape, dtype=dtype, device=device)

    def export(self, to: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """Writes the model as a Hugging Face folder in `dtype`, one tensor at a time."""
        export(
            shape=self.shape,
            tensor=tensors_for_use(self.checkpoint),
            tokenizer=self.folder / TOKENIZER,
            manner=self.manner(),
            end=self.end,
            to=to,
            dtype=dtype,
        )


def open_run(
    folder: Path | str, *, say: Say, best: bool = False, average: bool = False
) -> FinishedRun:
    """Opens a run folder at its newest complete checkpoint, or at its best one.

    average  take the average of the weights for the weights

    Raises UserError when there is none.
    """
    folder = Path(folder)
    checkpoints = folder / "checkpoints"
    checkpoint = load.best(checkpoints) if best else newest(checkpoints, say)
    if checkpoint is None:
        kind = "best" if best else "whole"
        if kind_of(folder) == "does not exist":
            raise UserError(f"{folder} does not exist; name a run folder")
        way = "train it first, or name a run folder"
        if numbered(checkpoints):
            way = "all that are there are damaged; restore one from a copy"
        if best and newest(checkpoints, say):
            way = "set train.evaluate_every, or leave --best out"
        raise UserError(f"{folder} has no {kind} checkpoint; {way}")
    if average and AVERAGE not in checkpoint.kinds:
        raise UserError(
            f"{checkpoint.path} has no average of the weights; train with "
            "method.optimizer.average=0.999, or leave --average out"
        )
    return FinishedRun(folder, checkpoint.with_weights_from(AVERAGE) if average else checkpoint)
