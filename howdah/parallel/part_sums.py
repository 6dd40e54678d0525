"""Gradients of which each part of tp has a part, such as Megatron-LM's of layer norms under
sequence slices and of shared key-value heads: they are summed before those of the replicas.

What tp does not cut, all of its parts hold alike. Most of that they also reached by the same
work, and have the same gradient. But a key-value head that several parts share was asked by other
query heads on each, a norm of every head saw other heads, and under sp norms and biases saw
other tokens: there the true gradient is the sum (`plan/sharding.py`, `summed_over_tp`).

    backward   … layers.5 ready ─┐ layers.4 …            a message for each unit and group of parts
    tp thread              [sum] │
                                 └ when layers.4 is ready: landed, handed on to the replicas' sum

Forgetting one of these sums shifts no loss at first: it is among the errors that stay silent.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.parallel.data import Reducer, whole_gradients
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.parallel.zero import ShareReducer
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import summed_over_tp

Key = tuple[str, tuple[int, ...]]  # a unit, and the parts of tp whose gradients add up


@dataclass
class _Flying:
    """A sum on its way."""

    key: Key
    flat: Tensor
    future: Future[None]


def sum_parts(
    plan: Plan,
    mesh: Mesh,
    units: dict[str, FlatUnit],
    after: Reducer | ShareReducer | None,
) -> "PartSums | Reducer | ShareReducer | None":
    """Puts the sums over parts of tp before those of the replicas, `after`; None where there are
    no replicas. Where nothing is to be summed, that is `after` itself. All ranks call together.
    """
    names: dict[Key, list[str]] = {}
    for unit in units.values():
        for name in unit.buffer.names:
            parts = summed_over_tp(plan.weight(name), plan, mesh.rank)
            if len(parts) > 1:
                names.setdefault((unit.buffer.unit, parts), []).append(name)
    groups = {parts: _group(plan, mesh, parts) for parts in sorted({key[1] for key in names})}
    if not names:
        return after
    return PartSums(names, groups, units, after)


def _group(plan: Plan, mesh: Mesh, parts: tuple[int, ...]) -> Group:
    if len(parts) == plan.layout.tp:
        return mesh.tp
    ranks = axis(plan.layout, "tp").group(mesh.rank)
    return mesh.join([ranks[part] for part in parts], label="tp")


class PartSums:
    """Sums gradients over parts of tp, then has them summed over the replicas, if there are any.

    names   what is summed in one message, by unit and parts
    groups  the parts, joined
    """

    def __init__(
        self,
        names: dict[Key, list[str]],
        groups: dict[tuple[int, ...], Group],
        units: dict[str, FlatUnit],
        after: Reducer | ShareReducer | None,
    ) -> None:
        self._names, self._groups, self._after = names, groups, after
        self._of = {name: key for key, listed in names.items() for name in listed}
        self._each = isinstance(after, ShareReducer)  # micro-batch; else the last of a step
        self._views = {} if after else whole_gradients(units)
        self._last = False
        self._missing = self._counts()
        self._flying: list[_Flying] = []
        self._waited = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that this rank has waited, over the whole run."""
        return self._waited + (self._after.exposed if self._after else 0.0)

    def arm(self) -> None:
        """The next backward is the step's last."""
        self._last = True
        if self._after:
            self._after.arm()

    def target(self, name: str) -> Tensor:
        """Where the gradient of `name` is added."""
        return self._after.target(name) if self._after else self._views[name]

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete for this micro-batch."""
        key = self._of.get(name)
        if key is None or not (self._last or self._each):
            self._hand_on(name)
            return
        self._missing[key] -= 1
        if not self._missing[key]:
            self._land(lambda flying: flying.key[0] != key[0])
            self._start(key)

    def take(self, name: str, parameter: Tensor) -> None:
        """Backward has added to the parameter's gradient, which lies where it belongs."""
        raise AssertionError("parts of tp have no parameters of torch")

    def finish(self) -> None:
        """All gradients are summed when this returns; between micro-batches whose gradients add
        up here, nothing is.
        """
        if self._last or self._each:
            for key, missing in self._missing.items():
                if missing:  # backward never came there
                    self._start(key)
        self._land(lambda flying: True)
        self._missing, self._last = self._counts(), False
        if self._after:
            self._after.finish()

    def _counts(self) -> dict[Key, int]:
        return {key: len(names) for key, names in self._names.items()}

    def _hand_on(self, name: str) -> None:
        if self._after:
            self._after.ready(name)

    def _start(self, key: Key) -> None:
        flat = torch.cat([self.target(name).reshape(-1) for name in self._names[key]])
        future = self._groups[key[1]].all_reduce(flat, async_op=True)
        self._flying.append(_Flying(key, flat, future))

    def _land(self, due: Callable[[_Flying], bool]) -> None:
        """Waits for those that are due, and puts the sums where the terms were."""
        landing = [flying for flying in self._flying if due(flying)]
        self._flying = [flying for flying in self._flying if flying not in landing]
        for flying in landing:
            began = perf_counter()
            flying.future.result()
            self._waited += perf_counter() - began
            views = [self.target(name) for name in self._names[flying.key]]
            parts = flying.flat.split([view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view(view.shape))
            for name in self._names[flying.key]:
                self._hand_on(name)
