"""Sums over tp ranks of gradients of which each tp rank has a term, such as Megatron-LM's of layer
norms under sequence parallelism and of shared key-value heads. They precede the sums over replicas.

Weights that tp does not cut are equal on all tp ranks. For most of them the tp ranks do the same
work, and have the same gradient. But several tp ranks that share a key-value head use it for
different query heads; a norm of every head is applied to different heads; and under sp, norms and
biases see different tokens. Then the true gradient is the sum (`plan/sharding.py`,
`summed_over_tp`).

    backward   … layers.5 ready ─┐ layers.4 …            a message for each unit and set of tp ranks
    tp thread              [sum] │
                                 └ when layers.4 is ready: sum complete, passed to the replicas' sum

If one of these sums is missing, no loss changes at first: such an error stays silent.
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

Key = tuple[str, tuple[int, ...]]  # a unit, and the tp ranks whose gradients add up


@dataclass
class _Flying:
    """A sum in flight."""

    key: Key
    flat: Tensor
    future: Future[None]


def sum_parts(
    plan: Plan,
    mesh: Mesh,
    units: dict[str, FlatUnit],
    after: Reducer | ShareReducer | None,
) -> "PartSums | Reducer | ShareReducer | None":
    """Puts the sums over tp ranks before those over the replicas, `after`, which is None if there
    are no replicas. Returns `after` itself if tp has nothing to sum. All ranks call together.
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
    """Sums gradients over tp ranks, then has them summed over the replicas, if there are any.

    names   the weights whose gradients are summed in one message, by unit and tp ranks
    groups  the group of each set of tp ranks
    after   sums over the replicas, or None
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
        # Sums after every micro-batch; otherwise only after the last of a step.
        self._each = isinstance(after, ShareReducer)
        self._views = {} if after else whole_gradients(units)
        self._last = False
        self._missing = self._counts()
        self._flying: list[_Flying] = []
        self._waited = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that this rank has waited for sums, over the whole run."""
        return self._waited + (self._after.exposed if self._after else 0.0)

    def arm(self) -> None:
        """Announces the last backward of the step."""
        self._last = True
        if self._after:
            self._after.arm()

    def target(self, name: str) -> Tensor:
        """The tensor to which the gradient of `name` is added."""
        return self._after.target(name) if self._after else self._views[name]

    def ready(self, name: str) -> None:
        """Called when the gradient of `name` is complete for this micro-batch."""
        key = self._of.get(name)
        if key is None or not (self._last or self._each):
            self._hand_on(name)
            return
        self._missing[key] -= 1
        if not self._missing[key]:
            self._land(lambda flying: flying.key[0] != key[0])
            self._start(key)

    def take(self, name: str, parameter: Tensor) -> None:
        """Never called: with tp, weights are not parameters of torch."""
        raise AssertionError("parts of tp have no parameters of torch")

    def finish(self) -> None:
        """Waits until all gradients are summed. Between micro-batches whose gradients add up
        locally, nothing is summed.
        """
        if self._last or self._each:
            for key, missing in self._missing.items():
                if missing:  # backward did not reach some of its weights
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
        """Waits for the sums that are due, and writes them over the terms."""
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
