"""Functions of the user's own that are called after every step, on every rank.

    def watch(now):                          mine.py; train.callbacks = ["mine.py:watch"]
        now.log(ratio=now.norm / now.loss)   into log.txt, metrics.jsonl and the trackers, by rank 0
        if now.loss < 2.0:
            now.stop("the loss is low enough")

A class is made once on each rank, without arguments, and called in the same way: its attributes
live as long as the process, and no checkpoint has them. What needs all ranks (`now.sum`, whole
tensors of `now.model`) must be called by all of them, so it may not stand behind `now.rank == 0`.

All ranks stop after the same step: the request goes along with what the ranks exchange before the
next step, so that step still runs (on a GPU, where steps are reported late, one or two more). A
callback that raises KeyboardInterrupt is a Ctrl-C: the run is saved, and goes on another time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from signal import SIGINT, raise_signal

from howdah.base.errors import UserError, shown
from howdah.base.named_code import failed, load
from howdah.base.signals import stop_behind
from howdah.parallel.apply import ParallelModel
from howdah.train.console import Say
from howdah.train.metrics import MetricsWriter

Value = float | int
ROW = ("kind", "step")  # of every row of metrics.jsonl
LONGEST = 400  # bytes of a reason that another rank tells


@dataclass
class Moment:
    """What a callback gets: a step that was just done.

    step        counted from 1
    steps       of the whole run
    loss, norm  of the step: mean loss per token of the global batch, and gradient norm before
                clipping; equal on all ranks
    rate        learning rate of the step
    tokens      labelled tokens of the global batch
    epoch       epochs of the text that the run has used so far
    held_out    (step, loss) of the latest evaluation of this process; None before the first
    rank, world  the number of this process, and of all
    model       this rank's part of the model, for `howdah.full_parameter` and its relatives
    logged      what was logged so far
    why         why the run is to stop; None: it goes on
    """

    step: int
    steps: int
    loss: float
    norm: float
    rate: float
    tokens: int
    epoch: float
    held_out: tuple[int, float] | None
    rank: int
    world: int
    model: ParallelModel
    logged: dict[str, float] = field(default_factory=dict)
    why: str | None = None

    def log(self, **values: Value) -> None:
        """Logs values by name; those of rank 0 are written. Raises UserError for what is no finite
        number, and for a name that a row has already or that is no line.
        """
        for name, value in values.items():
            if name in ROW or not name.isprintable():
                raise UserError(f"a callback logs a value named {shown(name)}; name it otherwise")
            number = value if isinstance(value, float | int) else _number(value)
            if number is None or not isfinite(number):
                raise UserError(f"a callback logs {name} as {shown(value)}; give a finite number")
            self.logged[name] = float(number)

    def stop(self, why: str = "a callback asked") -> None:
        """Asks all ranks to stop; the run is then saved, evaluated and exported as at its end."""
        self.why = why

    def sum(self, value: Value) -> float:
        """The sum over all ranks, which must all call."""
        with self.model.mesh.counters.aside():
            (total,) = self.model.mesh.world.sum_scalars([float(value)])
        return total


def _number(value: object) -> float | None:
    """The number in a tensor of one element or a number of numpy; None for anything else."""
    item = getattr(value, "item", None)
    try:
        return float(item()) if callable(item) else None
    except (TypeError, ValueError, RuntimeError):
        return None


class Callbacks:
    """The callbacks of a run on one rank.

    why  after which step, by which callback and why the run is to stop, as far as this rank knows;
         None: it goes on
    """

    def __init__(
        self, names: Sequence[str], placed: ParallelModel, records: MetricsWriter | None, say: Say
    ) -> None:
        self._named: dict[str, Callable[[Moment], object]] = {
            name: load("train.callbacks", name) for name in names
        }
        self._placed, self._records, self._say = placed, records, say
        self.why: str | None = None

    def __bool__(self) -> bool:
        return bool(self._named)

    def call(self, now: Moment) -> None:
        """Calls all of them. Raises UserError, with the place, if one fails."""
        for name, function in self._named.items():
            try:
                with self._placed.mesh.counters.aside():
                    function(now)
            except UserError:
                raise
            except KeyboardInterrupt:
                raise_signal(SIGINT)
            except BaseException as error:  # it may raise what it likes
                if stop_behind(error):
                    raise
                raise failed(f"train.callbacks: {name} at step {now.step}", error) from error
            if now.why is not None and self.why is None:
                self.why = f"after step {now.step}, by {name}: {now.why}"
                self._say(f"stop        {self.why}")
        if now.logged and self._records:
            self._records.own(now.step, now.logged)

    def tell_others(self) -> None:
        """Gives all ranks the reason of the first rank that asked to stop; of rank 0 if it did. All
        ranks call together.
        """
        mesh = self._placed.mesh
        world, rank, mine = mesh.world, mesh.rank, (self.why or "").encode()[:LONGEST]
        with mesh.counters.aside():
            asked = world.sum_scalars(
                [float(self.why is not None and at == rank) for at in range(world.size)]
            )
            first = asked.index(1.0) if 1.0 in asked else 0
            if first == 0:
                return
            given = mine if rank == first else b""
            letters = world.sum_scalars([*given, *[0] * (LONGEST - len(given))])
        why = bytes(map(int, letters)).rstrip(b"\0").decode(errors="ignore")
        self._say(f"stop        {why} (rank {first})")
