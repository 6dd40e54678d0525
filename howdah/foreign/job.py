"""A job: a torch module and its optimizer, laid out over processes, and trained step by step.

    step      deal rows ─ micro-batches: forward, backward, sums of gradients ─ update
    update    1. count    loss, rows and squares of the gradient, over all ranks
              2. scale    by the count, and by the clip
              3. update   own ranges by the user's optimizer; cast to the weights; gather them
              4. buffers  means of statistics, or those of rank 0

The loss of a micro-batch is multiplied by its part of the batch's rows before the backward pass, so
gradients are sums, and the sum over micro-batches and processes is the gradient of the mean over
the whole batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howdah.base.errors import UserError, shown
from howdah.comm.group import Group
from howdah.foreign import rows as dealt
from howdah.foreign.states import States
from howdah.foreign.statistics import Statistics
from howdah.foreign.table import Table
from howdah.foreign.weights import Weights
from howdah.optim.clip import clipped_update, squared_norm
from howdah.parallel.flat_params import FlatUnit, publish
from howdah.parallel.mesh import Mesh
from howdah.parallel.sums import GradientSums
from howdah.plan.layout import Layout
from howdah.plan.sharding import counted_range

LossOf = Callable[..., Any]


@dataclass(frozen=True)
class Laid:
    """A model laid out for this rank.

    units    the flat tensors, by name of a buffer
    sharers  by name of a buffer that is shared out, the ranks that have the other shares
    """

    model: nn.Module
    table: Table
    mesh: Mesh
    units: dict[str, FlatUnit]
    sharers: Mapping[str, Group]
    sums: GradientSums
    weights: Weights
    states: States
    statistics: Statistics


class Job:
    """What `howdah.distribute` returns. All processes call its functions together.

    steps  number of updates so far; skipped: of those that changed nothing, because the gradient
           was not finite
    seen   rows of all batches so far
    norm   of the whole gradient of the last step, before it was clipped
    """

    def __init__(self, laid: Laid, *, clip: float | None) -> None:
        self.laid, self.clip = laid, clip or 0.0
        self.model = laid.model
        self.steps = self.skipped = self.seen = 0
        self.norm = 0.0
        self.folders: dict[Path, int] = {}  # of checkpoints, with the step saved or loaded last
        self._ended = ""  # why no step can be made any more
        self._ready = self._updating = False  # for an update; at it
        self._compared: set[int] = set()
        self._hooks: list[Any] = []
        self._micros = 1  # of the step that runs
        self._left = 0  # micro-batches of this step that are still to come
        self._loss = 0.0
        self._rows = 0  # of this process's batch
        self._count, self._pairs = 0.0, 0  # sum of what the user counts, and how often it came
        optimizer: Any = laid.states.optimizer
        self._hooks.append(optimizer.register_step_pre_hook(self._only_in_update))
        for name, parameter in laid.model.named_parameters():
            if name in laid.table.groups:
                listen: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(listen(partial(self._take, name)))

    @property
    def layout(self) -> Layout:
        """The layout, with its number of processes."""
        return self.laid.table.layout

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.laid.mesh.rank

    # -- steps

    def step(self, loss_of: LossOf, batch: Any, *, mine: bool = False) -> float:
        """One update from one batch; returns the mean loss over all rows of all processes.

        loss_of  computes the loss of some rows: the mean over them, a scalar; or a pair of a sum
                 and of the number by which the sum over all rows is divided (tokens that count). It
                 takes the parts of a tuple as arguments, any other batch as one
        batch    the same whole batch on every process, each of which takes its rows; with `mine`
                 this process's own rows

        Raises UserError for a batch of too few rows, and when processes differ.
        """
        rows, layout = dealt.count_rows(batch), self.layout
        replicas, replica = (1, 0) if mine else (layout.replicas, self.rank)
        micros = layout.micros or 1
        ranges = dealt.micros_of(rows, micros, replicas=replicas, replica=replica)
        total = rows * (layout.replicas if mine else 1)
        with self.accumulating(micros):
            for first, last in ranges:
                with self.forward():
                    found = loss_of(*dealt.as_arguments(dealt.cut(batch, first, last)))
                if mine and isinstance(found, Tensor):  # others may have more rows
                    found = found * (last - first), last - first
                self.backward(found, part=(last - first) / total)
        self._rows = rows
        return self.update(same=not mine)

    @contextmanager
    def accumulating(self, micros: int | None = None) -> Iterator[None]:
        """Forward and backward passes of a step run inside: `backward` is called once for each of
        `micros` micro-batches (those of the layout), and `update` after the block.
        """
        self._require_steps()
        count = (self.layout.micros or 1) if micros is None else micros
        if count < 1:
            raise UserError(f"micros is {count}; give the number of micro-batches, at least 1")
        self._left = self._micros = count
        self._loss, self._count, self._pairs, self._rows, self._ready = 0.0, 0.0, 0, 0, False
        self.clear_gradients()
        try:
            with self.laid.weights.in_pass(self.kind(count)):
                yield
                if self._left:
                    raise UserError(
                        f"{self._left} of {count} micro-batches had no job.backward(loss); call it "
                        "once for each"
                    )
            if count not in self._compared:  # on wires that do not compare calls themselves
                self._compared.add(count)
                self.laid.mesh.compare_calls()
        except BaseException as error:
            self._left = 0
            if self.layout.world > 1:  # which have stopped in the middle of their calls
                name = type(error).__name__
                self._ended = f"an earlier step of this job failed ({name}); build it again"
            raise
        self._ready = True

    def forward(self) -> AbstractContextManager[Any]:
        """The context of a forward pass inside of `accumulating`, which `step` enters by itself."""
        return self.laid.weights.saving()

    def backward(self, loss: Any, *, part: float | None = None) -> None:
        """The backward pass of one micro-batch, whose sums over processes run beside it.

        loss  the mean over its rows, or a pair (sum, number); see `step`
        part  of the rows of the whole batch that this micro-batch has; None: all have as many
        """
        if not self._left:
            raise UserError("job.backward is called inside of `with job.accumulating(micros):`")
        count: float | None = None
        if isinstance(loss, tuple | list):
            if len(loss) != 2 or not isinstance(loss[1], Tensor | int | float):
                raise UserError(f"the loss is {len(loss)} things; return a pair (sum, number)")
            loss, count = loss[0], float(loss[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UserError(
                "the loss is no scalar tensor with a gradient; return the mean over the rows, or a "
                "pair (sum, number)"
            )
        if count is None:
            loss = loss * (part or 1 / (self._micros * self.layout.replicas))
        else:
            self._count, self._pairs = self._count + count, self._pairs + 1
        told = float(loss.detach())
        self._loss += told
        if not self.steps and not isfinite(told):
            self.laid.weights.require_run()
        order = self.laid.sums.order
        self._left -= 1
        if not self._left:
            order.arm(0)
        loss.backward()
        order.finish(0)

    @torch.no_grad()
    def update(self, *, same: bool = False) -> float:
        """Updates the weights by the gradients of `accumulating`, and returns the mean loss.

        same  whether all processes were given the same batch; then their rows are compared
        """
        if not self._ready:
            raise UserError("job.update is called once, after `with job.accumulating(micros):`")
        self._ready, laid = False, self.laid
        mine = [unit.summed[a - unit.start : b - unit.start] for unit, a, b in self.counted()]
        square, rows = float(squared_norm(mine)), float(self._rows)
        told = [self._loss, square, rows, rows**2, self._count, float(self._pairs)]
        loss, square, rows, squares, number, pairs = laid.mesh.world.sum_scalars(told)
        world = self.layout.replicas
        if same and squares * world != rows**2:
            raise UserError(
                f"the processes have batches of different numbers of rows ({self._rows} here, "
                f"{rows / world:g} on average); give all the same batch, or each its own rows with "
                "mine=True"
            )
        flats = [unit.summed for unit in laid.units.values()]
        if pairs:
            self._require_number(number, pairs)
            loss, square = loss / number, square / number**2
            torch._foreach_mul_(flats, 1 / number)
        laid.states.attach()
        total = torch.tensor(square, dtype=torch.float64)
        self._updating = True
        clipped_update(laid.states.optimizer, flats, square=total, limit=self.clip)
        self._updating = False
        self.seen += int(rows / world if same else rows)
        self.norm = sqrt(square) if square >= 0 else square
        self.skipped += not isfinite(square)
        publish(laid.units.values())
        laid.weights.updated()
        laid.statistics.after_step()
        self.steps += 1
        return loss

    def clear_gradients(self) -> None:
        """Sets all gradients to zero, in their places."""
        parameters = dict(self.model.named_parameters())
        for unit in self.laid.units.values():
            kept = unit.summed if unit.gradients is None else unit.gradients
            kept.zero_()
            views = {} if unit.gradients is None else unit.views(unit.gradients)
            for name in unit.buffer.names:
                parameters[name].grad = views.get(name)

    def kind(self, micros: int) -> str:
        """The kind of pass of a step."""
        return f"a step of {micros} micro-batches"

    def counted(self) -> Iterator[tuple[FlatUnit, int, int]]:
        """The ranges that this rank counts: over all ranks, each element once."""
        for unit in self.laid.units.values():
            yield unit, *counted_range(unit.buffer, self.layout, self.rank)

    def _require_number(self, number: float, pairs: float) -> None:
        """Raises UserError on all processes alike."""
        if pairs != self._micros * self.layout.replicas:
            raise UserError(
                "some micro-batches have a mean as their loss and others a pair (sum, number); "
                "return pairs for all"
            )
        if not 0 < number < inf:
            raise UserError(
                f"the numbers of the pairs (sum, number) add up to {number:g} over the whole "
                "batch, and its loss is divided by that; leave out a batch of which nothing counts"
            )

    def _require_steps(self) -> None:
        """Raises UserError if there can be no further step."""
        if self._ended:
            raise UserError(self._ended)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad != (name in self.laid.table.groups):
                now = "trained" if parameter.requires_grad else "frozen"
                raise UserError(
                    f"{name} is {now} since howdah.distribute; freeze and free parameters before it"
                )

    def _only_in_update(self, *_: object) -> None:
        if not self._updating:
            raise UserError(
                "optimizer.step() is called, and job.step or job.update does that already, with "
                "gradients of all processes; drop the call"
            )

    def _take(self, name: str, parameter: Tensor) -> None:
        if not self.laid.weights.whole_again:
            self.laid.sums.take(name, parameter)

    # -- beside steps

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The model for forward passes without gradients, with whole weights. Under zero3 every
        process runs the model as often, and each block uses the units in one order.
        """
        kind = f"an inference of {type(self.model).__name__}"
        with torch.no_grad(), self.laid.weights.in_forwards(self.model, kind):
            yield self.model

    def state(self) -> dict[str, Tensor]:
        """The model's whole state_dict, on every process: copies that `load_state_dict` of the
        plain model takes.
        """
        whole = self.whole_weights()
        self.laid.weights.naming = True
        persistent = dict.fromkeys(self.model.state_dict(keep_vars=True))
        self.laid.weights.naming = False
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        first = {id(p): name for name, p in reversed([*self.model.named_parameters()])}
        found: dict[str, Tensor] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            own = first[id(tensor)]
            found[name] = whole[own] if own in whole else tensor.detach().clone()
        return {
            name: found[name] if name in found else buffers[name].detach().clone()
            for name in persistent
            if name in found or name in buffers
        }

    def whole_weights(self, kind: str = "weights") -> dict[str, Tensor]:
        """Copies of all trained weights by name, whole, on every process; kind `masters` are what
        the optimizer updates, and `gradients` those of the last step, clipped.
        """
        found: dict[str, Tensor] = {}
        for name, unit in self.laid.units.items():
            tensors = {"weights": unit.own_weights, "masters": unit.masters}
            own = tensors.get(kind, unit.summed)
            flat = own.new_zeros(unit.buffer.length)
            flat[unit.start : unit.stop] = own
            if name in self.laid.sharers:
                self.laid.sharers[name].all_gather(flat)
            found |= {n: view.clone() for n, view in unit.views(flat).items()}
        return found

    def whole_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's states by kind and name, whole, on every process."""
        found: dict[str, dict[str, Tensor]] = {}
        for kind in self.laid.states.kinds():
            found[kind] = {}
            for name, unit in self.laid.units.items():
                flat = self.laid.states.flat(kind, unit)
                if name in self.laid.sharers:
                    self.laid.sharers[name].all_gather(flat)
                found[kind] |= unit.views(flat)
        return found

    def save(self, folder: str | Path, *, keep: int = 2, extra: Any = None) -> Path:
        """Writes a checkpoint of this step, which any layout of this model resumes; returns its
        folder, FOLDER/step-00000042. See `saving.save`.
        """
        from howdah.foreign.saving import save

        return save(self, _path(folder, "save"), keep=keep, extra=extra)

    def load(self, folder: str | Path) -> Any:
        """Goes on from the newest checkpoint in a folder, or from the one it is; returns what was
        saved as `extra`. See `saving.load`.
        """
        from howdah.foreign.saving import load

        return load(self, _path(folder, "load"))

    def plan(self) -> Any:
        """What is where, and the bytes that this process sends in a step. See `outline.py`."""
        from howdah.foreign.outline import outline

        return outline(self)

    def close(self) -> None:
        """Ends the connections to the other processes; the model keeps its weights and is an
        ordinary one again. Under zero3 it has none: take `state` before, for a model built again.
        """
        self._ended = "this job is closed; call howdah.distribute again"
        for hook in self._hooks:
            hook.remove()
        self.laid.weights.close()
        self.laid.mesh.close()


def is_laid_out(parameter: Tensor) -> bool:
    """Whether a job that is not closed trains this parameter."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    own = [hook.func for hook in (hooks or {}).values() if isinstance(hook, partial)]
    return any(getattr(one, "__func__", None) is Job._take for one in own)


def _path(folder: object, function: str) -> Path:
    """The folder that was named. Raises UserError for what is no name of one."""
    if not isinstance(folder, str | Path) or not str(folder):
        raise UserError(f"job.{function} takes the name of a folder, and got {shown(folder)}")
    return Path(folder)
