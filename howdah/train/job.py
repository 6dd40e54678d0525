"""What the training loop takes: a run with nothing left open.

`config/recipe.py` makes a Job from what the user wrote, once the number of processes is known. All
sizes agree, all names are resolved, all paths are absolute.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from howdah.plan.batch import Batch
from howdah.plan.layout import Layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan
from howdah.shapes.shape import ModelShape
from howdah.text.sources import Data


@dataclass(frozen=True)
class Training:
    """How long a run is, and what happens on the way.

    steps             updates of the whole run; the learning rate's schedule spans them
    log_every         steps between log lines
    evaluate_every    steps between held-out evaluations; 0: only at the end
    evaluate_samples  held-out samples of an evaluation on the way; 0: all. The last takes all.
    save_every        steps between checkpoints; 0: only at the end
    keep_last         newest checkpoints that are kept, beside the best
    prompt            what the sample at the end goes on from; empty: no sample
    export            write a Hugging Face folder at the end
    """

    steps: int = 1000
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_samples: int = 64
    save_every: int = 0
    keep_last: int = 2
    prompt: str = ""
    export: bool = False


@dataclass(frozen=True)
class Job:
    """One training run, ready to start on any rank.

    folder     the run folder
    plan       model, layout, batch and method
    cache      where tokenised text is kept
    init_from  a Hugging Face folder to start from, or None
    threads    that torch uses in each process
    compile    each block through torch.compile
    """

    name: str
    folder: Path
    cache: Path
    plan: Plan
    data: Data
    train: Training
    seed: int
    device: Literal["cpu", "cuda"]
    threads: int
    init_from: Path | None = None
    compile: bool = False

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.plan.shape

    @property
    def layout(self) -> Layout:
        """How it is split, with nothing left open."""
        return self.plan.layout

    @property
    def batch(self) -> Batch:
        """Its sizes in samples."""
        return self.plan.batch

    @property
    def method(self) -> Method:
        """What changes the mathematics."""
        return self.plan.method
