"""The update of states that are not on the device: on the host, one unit after the other
(ZeRO-Offload, https://arxiv.org/abs/2101.06840; ZeRO-Infinity, https://arxiv.org/abs/2104.07857).

    set 0   | units 0: comes | update | goes          | unit 3: comes | …
    set 1                    | unit 1: comes | update | goes
    set 2                                    | unit 2: comes | update | …

A set of buffers has room for what one unit brings to the memory of the host and takes away again:
its gradient if that is on the device or the disk, its master and moments if these are on the disk.
What is at home on the host is updated where it is. `plan/homes.py` counts the sets.

The norm of the full gradient is known before the first unit is updated, so that clipping is exact.
What goes last goes beside the next forward pass, which waits for a unit when it needs it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isfinite, sqrt

import torch
from torch import Tensor

from howdah.comm.handle import Handle
from howdah.optim.clip import EPSILON
from howdah.optim.in_turns import InTurns, Turn
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.homes import Homes
from howdah.plan.homes import set_width, sets_of
from howdah.plan.plan import Plan
from howdah.plan.storage import SETS

Buffers = dict[str, Tensor]
Beside = Callable[[Sequence[FlatUnit]], None]  # changes the masters of units besides


class HomeUpdate:
    """The updates of one rank.

    turns  the optimizer
    sets   the buffers, by kind
    """

    def __init__(self, plan: Plan, homes: Homes, units: Sequence[FlatUnit]) -> None:
        self.turns, self._homes = InTurns(plan.method.optimizer), homes
        self._units = [unit for unit in units if len(unit.masters)]
        count, longest = sets_of(plan, homes.rank)
        wide = units[0].masters.dtype
        self.sets: list[Buffers] = [
            {
                kind: torch.empty(
                    longest, dtype=units[0].weights.dtype if kind == "weights" else wide
                )
                for kind in set_width(plan)
            }
            for _ in range(count or SETS)
        ]
        self._in_set = ["" for _ in self.sets]  # the unit that was last in each

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers."""
        every = [buffer for one in self.sets for buffer in one.values()]
        return sum(buffer.nbytes for buffer in (*every, self._homes.adding))

    def run(self, *, square: Tensor, limit: float, beside: Beside) -> None:
        """One update by gradients that are scaled by limit/norm when their norm is above `limit`
        (0: never); none when the norm is not finite.

        square  the square of the global norm over all ranks
        beside  is called with each unit, when its masters are updated and before they leave
        """
        norm = sqrt(square.item())
        if not isfinite(norm):
            return
        scale = limit / (norm + EPSILON) if norm > limit > 0 else None
        ahead, coming = min(1, len(self.sets) - 1), list[tuple[Buffers, list[Handle]]]()
        for number, unit in enumerate(self._units):
            for one in self._units[len(coming) : number + 1 + ahead]:
                coming.append(self._come(one, len(coming) % len(self.sets)))
            flats, handles = coming[number]
            self._homes.wait(*handles)
            self._update(unit, flats, scale)
            beside([replace(unit, masters=flats["masters"])])
            self._homes.leaving[unit.buffer.unit] = [*self._leave(unit, flats)]
        self.turns.updates += 1

    def _come(self, unit: FlatUnit, number: int) -> tuple[Buffers, list[Handle]]:
        """Starts to bring what an update needs of a unit: its tensors, and what to wait for."""
        name, length, homes = unit.buffer.unit, len(unit.masters), self._homes
        homes.settle(self._in_set[number], name)
        self._in_set[number] = name
        states = homes.states[name]
        flats = {"masters": unit.masters, "gradients": unit.summed, **states}
        mine = {kind: buffer[:length] for kind, buffer in self.sets[number].items()}
        handles = []
        for kind, buffer in mine.items():
            if kind == "gradients" and not unit.summed.is_meta:
                handles.append(homes.copy("gradients", "evict", buffer, unit.summed))
            elif kind == "gradients":
                handles.append(homes.read("gradients", name, "summed", buffer))
            elif kind != "weights":
                handles.append(homes.read("optimizer", name, kind, buffer))
        return {**flats, **mine}, handles

    def _update(self, unit: FlatUnit, flats: Buffers, scale: float | None) -> None:
        if scale is not None:
            flats["gradients"].mul_(scale)
        states = {name: flats[name] for name in self._homes.states[unit.buffer.unit]}
        turn = min(max(unit.buffer.decay_stop - unit.start, 0), len(unit.masters))
        self.turns.step(
            [
                Turn(
                    decay,
                    flats["masters"][a:b],
                    flats["gradients"][a:b],
                    {name: flat[a:b] for name, flat in states.items()},
                )
                for a, b, decay in ((0, turn, True), (turn, len(unit.masters), False))
            ]
        )

    def _leave(self, unit: FlatUnit, flats: Buffers) -> Iterator[Handle]:
        """Starts to bring what has changed to its home, and the weights to the device."""
        name, homes, masters = unit.buffer.unit, self._homes, flats["masters"]
        if homes.layout.optimizer == "disk":
            for kind in ("masters", *homes.states[name]):
                yield homes.write("optimizer", name, kind, flats[kind])
        if not unit.away:
            yield homes.copy("weights", "fetch", unit.own_weights, masters)
        elif unit.apart and homes.layout.weights == "disk":
            if "weights" in flats:
                masters = flats["weights"].copy_(masters)
            yield homes.write("weights", name, "weights", masters)
        elif unit.apart:
            unit.weights.copy_(masters)
