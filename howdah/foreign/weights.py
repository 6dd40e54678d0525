"""The weights of a foreign model between and during their uses.

    zero0, 1, 2   each parameter is a view of the flat weights of its unit, whole; after an update,
                  ranks gather what others have updated
    zero3         each process has a share of a unit. While the unit's forward pass runs, its
                  parameters are views of the window of `parallel/zero3.py`, and before and after
                  that NaN, so that a use outside is seen and is not a use of old numbers

    forward of a unit   gather, parameters := views ── the module's own forward ── parameters := NaN
    autograd saves      a view of the window: what is kept is (unit, place), not the tensor
    backward asks       gather again, and make the same view

Operations are torch's. What they save for the backward pass goes through `saved_tensors_hooks`,
where a tensor of the window is known by its memory: so the window is used for unit after unit, as
under howdah's own operations. Parameters stay the objects that the user's code holds.

The rest (`units.py`) is whole during a pass. Each dtype has windows of its own.

With recompute=full a unit keeps its inputs alone (`torch.utils.checkpoint`), and runs a second time
in the backward pass. Its module buffers, such as statistics, are put back after that: they change
once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from howdah.base.errors import UserError
from howdah.comm.group import Group
from howdah.foreign.table import Table
from howdah.foreign.units import REST
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.parallel.zero import UpdatedWeights
from howdah.parallel.zero3 import ShardedWeights


class Saved(NamedTuple):
    """A tensor of a window that autograd has saved: a view of a unit's flat weights."""

    weights: ShardedWeights
    name: str  # a weight of the unit
    start: int  # from that weight's first element
    size: torch.Size
    stride: tuple[int, ...]


class Kept(NamedTuple):
    """Another tensor that autograd has saved, as it was then."""

    tensor: Tensor
    version: int


class Weights:
    """The weights of `model`, which hold the parameters `table` lists.

    units    the flat units, by name of a buffer
    sharers  by name of a buffer that is shared out, the ranks that have the other shares
    ran      the units that have run in this pass
    """

    def __init__(
        self,
        model: nn.Module,
        table: Table,
        units: dict[str, FlatUnit],
        mesh: Mesh,
        sharers: Mapping[str, Group],
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if name in table.groups}
        self._table, self._units = table, units
        self._names: dict[str, list[str]] = {}
        for name, unit in units.items():
            self._names.setdefault(table.unit_of[name], []).extend(unit.buffer.names)
        self._updated: list[UpdatedWeights] = []
        self._sharded: dict[str, ShardedWeights] = {}  # by name of a weight
        self._windows: dict[int, ShardedWeights] = {}  # by the address of its memory
        self._views: dict[
            ShardedWeights, str
        ] = {}  # a weight of the unit whose views are handed out
        self._kind, self.ran = "", set[str]()
        self.whole_again = False  # whether whole weights stand in for the shares, in `verify_step`
        self.naming = False  # whether only the names of a state_dict are asked for
        layout = table.layout
        for buffers in table.buffers.values():
            for rest in (True, False):
                some = {
                    b.unit: units[b.unit]
                    for b in buffers
                    if (table.unit_of[b.unit] == REST) is rest and b.unit in sharers
                }
                if not some:
                    continue
                theirs = {name: sharers[name] for name in some}
                if layout.zero < 3:
                    self._updated.append(UpdatedWeights(some, theirs, mesh.waited))
                    continue
                keep, cast = rest or layout.release == "step", layout.gather == "broadcast"
                one = ShardedWeights(
                    some, mesh.shard, mesh.waited, keep=keep, cast=cast, sharers=theirs
                )
                self._windows[one.window.data_ptr()] = one
                self._sharded |= {n: one for unit in some.values() for n in unit.buffer.names}
        self._nothing = {
            name: torch.full((), float("nan"), dtype=p.dtype, device=p.device).expand(p.shape)
            for name, p in self._parameters.items()
            if name in self._sharded
        }
        self._absent = {x.untyped_storage().data_ptr(): name for name, x in self._nothing.items()}
        self._restore: list[Callable[[], object]] = []  # at the end; under zero3 `_refuse` stays
        self._enclose(model, again=layout.recompute == "full")
        if self._sharded:
            hooked: Any = model.register_state_dict_pre_hook
            hooked(self._refuse)
        self.drop()

    @property
    def shares(self) -> bool:
        """Whether weights are whole only during a pass."""
        return bool(self._sharded)

    # -- passes

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[None]:
        """Forward and backward passes run inside. All passes of a kind use units in one order."""
        self._begin(kind)
        yield
        self._end()

    @contextmanager
    def in_forwards(self, model: nn.Module, kind: str) -> Iterator[None]:
        """Each forward pass of the whole model is a pass of this kind."""
        if not self._sharded:
            yield
            return
        hooks = (
            model.register_forward_pre_hook(lambda *_: self._begin(kind)),
            model.register_forward_hook(lambda *_: self._end(), always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, kind: str) -> None:
        self._kind, self.ran = kind, set()
        for one in self._every():
            one.begin(kind)
        self._take(REST)

    def _end(self) -> None:
        self._kind = ""
        self.drop()
        for one in self._every():
            one.end()

    def updated(self) -> None:
        """Brings the updated ranges to all ranks, where they have whole weights."""
        for one in self._updated:
            one.updated()
            one.start()
        for one in self._updated:
            one.wait()

    def saving(self) -> AbstractContextManager[Any]:
        """The context of a forward pass, in which autograd saves tensors."""
        if not self._sharded or self.whole_again:
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def drop(self) -> None:
        """Makes parameters NaN of which this rank has shares."""
        for name, nothing in self._nothing.items():
            self._parameters[name].data = nothing

    def close(self) -> None:
        """Gives the submodules their own forward functions back."""
        for restore in self._restore:
            restore()

    def gathers(self, kind: str) -> Counter[str]:
        """How often each buffer came in a pass of a kind, and so will come in the next."""
        return Counter(unit for one in self._every() for unit in one.orders.get(kind, ()))

    def _every(self) -> list[ShardedWeights]:
        return [*dict.fromkeys(self._sharded.values())]

    # -- units

    def _enclose(self, model: nn.Module, *, again: bool) -> None:
        """Puts gathering, and recomputation, around the forward functions of the units."""
        for path, names in self._names.items():
            if path == REST or not (again or any(name in self._sharded for name in names)):
                continue
            module = model.get_submodule(path)
            run = partial(self._run, path, module.forward)
            outer = partial(self._again, run, module) if again else run
            module.forward = update_wrapper(outer, module.forward)  # with its signature
            self._restore.append(partial(module.__dict__.pop, "forward", None))

    def _run(self, unit: str, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.whole_again:
            return forward(*args, **named)
        self._take(unit)
        try:
            return forward(*args, **named)
        finally:
            for name in self._names[unit]:
                if name in self._nothing:
                    self._parameters[name].data = self._nothing[name]

    def _again(self, run: Callable[..., Any], module: nn.Module, *args: Any, **named: Any) -> Any:
        if self.whole_again or not torch.is_grad_enabled():
            return run(*args, **named)
        contexts = partial(_contexts, module)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **named)

    def _take(self, unit: str) -> None:
        """Makes the parameters of a unit whole."""
        names = [name for name in self._names.get(unit, ()) if name in self._sharded]
        self.ran.add(unit)
        if names and not self._kind:
            raise UserError(
                f"{unit} runs outside of a step, and under zero3 its weights are shared out; "
                "call the model inside of `with job.inference():`"
            )
        for name in names:
            one = self._sharded[name]
            self._parameters[name].data = one.value(name)
            if unit != REST:
                self._views[one] = name

    def _refuse(self, *_: object) -> None:
        if not self.naming:
            raise UserError(
                "model.state_dict() has no whole weights under zero3; take job.state(), on every "
                "process, before job.close()"
            )

    def put_whole(self, whole: Mapping[str, Tensor]) -> None:
        """Makes the parameters those tensors."""
        for name, parameter in self._parameters.items():
            parameter.data = whole[name]

    def put_views(self) -> None:
        """Makes the parameters views of the flat weights again, or NaN."""
        for unit in self._units.values():
            if not unit.shared_out:
                for name, view in unit.views(unit.weights).items():
                    self._parameters[name].data = view
        self.drop()

    # -- what autograd saves

    def _pack(self, tensor: Tensor) -> Saved | Kept:
        plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.numel()
        memory = tensor.untyped_storage().data_ptr() if plain else 0
        if memory in self._absent:
            raise UserError(self._used_outside(self._absent[memory]))
        one = self._windows.get(memory)
        if one is None or one not in self._views:
            return Kept(tensor, tensor._version)
        name = self._views[one]
        start = int(tensor.storage_offset() - one.value(name).storage_offset())
        return Saved(one, name, start, tensor.size(), tensor.stride())

    def require_run(self) -> None:
        """Raises UserError if weights of a unit that did not run may have been used as NaN."""
        for unit, names in self._names.items():
            if unit not in self.ran and any(name in self._nothing for name in names):
                raise UserError(
                    f"the first loss is not finite, and {unit} has not run: if the model uses its "
                    f"weights without calling it, say units=[...] without {unit}"
                )

    def _used_outside(self, name: str) -> str:
        unit = next(unit for unit, names in self._names.items() if name in names)
        return (
            f"{name} is used outside of the forward pass of its unit {unit}, and under zero3 it is "
            f"whole only inside; say units=[...] without {unit}, which makes it part of the rest"
        )

    def _unpack(self, saved: Saved | Kept) -> Tensor:
        if isinstance(saved, Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that the backward pass needs was changed in place: "
                    f"{list(saved.tensor.shape)}"
                )
            return saved.tensor
        view = saved.weights.value(saved.name)
        return view.as_strided(saved.size, saved.stride, view.storage_offset() + saved.start)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), _put_back(module)


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Puts module buffers back behind the block."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, then in before:
                buffer.copy_(then)
