"""The input of the training loop: a run in which no setting is left open.

`config/recipe.py` makes a Job from the user's settings, once the number of processes is known. All
sizes agree, all names are resolved, all paths are absolute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from howdah.base.bounds import Bound, Length, Steps
from howdah.plan.batch import Batch
from howdah.plan.expert_places import orders
from howdah.plan.flat_buffers import BY_NUMBER, Orders
from howdah.plan.layout import Layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan
from howdah.shapes.shape import ModelShape
from howdah.text.sources import Data

MOST_STEPS, MOST_EPOCHS = 10**7, 10**6
TrackerName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class Training:
    """The length of a run, and what it does besides training steps.

    steps             updates of the whole run; the learning rate's schedule spans them
    tokens            the length in tokens instead, as a number or a text such as "1.5B"
    epochs            the length in epochs instead; an epoch is as many samples as the text has
    log_every         steps between log lines
    evaluate_every    steps between held-out evaluations; 0: only at the end
    evaluate_samples  held-out samples of an evaluation between steps; 0: all. The last takes all.
    save_every        steps between checkpoints; 0: only at the end
    keep_last         number of newest checkpoints to keep, besides the best
    prompt            text that the sample at the end continues; empty: no sample
    export            whether to write a Hugging Face folder at the end
    profile           the step that torch's profiler records, counted from 1; 0: none
    callbacks         functions that are called after every step, FILE.py:FUNCTION
    expert_placement  which rank of ep has which experts: by number, or by load at each checkpoint
    tracker           where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow
    """

    steps: Annotated[int, Bound(1, MOST_STEPS)] = 1000
    tokens: Annotated[int, Bound(0, 10**16)] = 0
    epochs: Annotated[float, Bound(0, MOST_EPOCHS)] = 0.0
    log_every: Annotated[int, Bound(1, 10**7)] = 10
    evaluate_every: Steps = 0
    evaluate_samples: Annotated[int, Bound(0, 1 << 31)] = 64
    save_every: Steps = 0
    keep_last: Annotated[int, Bound(1, 10**6)] = 2
    prompt: str = ""
    export: bool = False
    profile: Steps = 0
    callbacks: Annotated[tuple[str, ...], Length(0, 100)] = ()
    expert_placement: Literal["number", "load"] = "number"
    tracker: Annotated[tuple[TrackerName, ...], Length(0, 10)] = ("tensorboard",)


@dataclass(frozen=True)
class Job:
    """One training run, ready to start on any rank.

    folder     the run folder
    cache      folder of the token caches
    plan       model, layout, batch and method
    init_from  a Hugging Face folder to start from, or None
    init_adapter  a folder of PEFT's whose adapter to start from, or None
    threads    number of threads that torch uses in each process
    compile    whether each block is compiled with torch.compile
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
    init_adapter: Path | None = None
    compile: bool = False

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self.plan.shape

    @property
    def layout(self) -> Layout:
        """The resolved layout: how the run is split over the ranks."""
        return self.plan.layout

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return self.method.processes(self.layout.workers, self.layout.server)

    def orders(self, tokens: Mapping[str, Sequence[int]]) -> Orders:
        """The experts at the places of the ranks of ep, by the tokens that each had in the steps
        before a checkpoint; by number unless the run asks for more.
        """
        by_load = self.train.expert_placement == "load" and self.layout.ep > 1
        return orders(tokens, self.layout.ep) if by_load else BY_NUMBER

    @property
    def batch(self) -> Batch:
        """The batch sizes, in samples."""
        return self.plan.batch

    @property
    def method(self) -> Method:
        """The settings that change the mathematics."""
        return self.plan.method
