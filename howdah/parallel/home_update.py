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

With `method.optimizer.delay` an update is one step late, and runs beside the passes of the next:

    passes    | step 1            | step 2              | step 3              |
    host                          | by gradients of 1   | by gradients of 2   |
    between                       ^ weights come up, gradients go down: here alone they change

The gradients that wait are a state of the optimizer, which checkpoints have; NaN where none wait.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, nan, sqrt

from torch import Tensor

from howdah.comm.handle import DONE, Handle
from howdah.optim.clip import EPSILON
from howdah.optim.in_turns import InTurns, Turn
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.homes import Homes
from howdah.plan.homes import set_width, sets_of
from howdah.plan.method import AVERAGE, LATE
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
        kinds = {(decay, rate) for u in units if u.trains for *_, decay, rate in u.buffer.runs}
        self.turns, self._homes = InTurns(plan.method.optimizer, kinds), homes
        self._running: Handle = DONE  # the update that is one step late
        self.delay = plan.method.optimizer.delay
        if self.delay:
            for states in homes.states.values():
                states[LATE].fill_(nan)
        if plan.method.optimizer.average:
            for unit in units:
                homes.put(unit, AVERAGE, homes.own(unit, "masters", 0, None))
        self._units = [unit for unit in units if len(unit.masters)]
        count, longest = sets_of(plan, homes.rank)
        wide = units[0].masters.dtype
        self.sets: list[Buffers] = [
            {
                kind: homes.memory(longest, units[0].weights.dtype if kind == "weights" else wide)
                for kind in set_width(plan)
            }
            for _ in range(count or SETS)
        ]
        self._in_set = ["" for _ in self.sets]  # the unit that was last in each

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers."""
        every = [buffer for one in self.sets for buffer in one.values()]
        return sum(buffer.nbytes for buffer in every) + self._homes.staged_bytes

    def run(self, *, square: Tensor, limit: float, beside: Beside, share: float = 0.0) -> None:
        """One update by gradients that are scaled by limit/norm when their norm is above `limit`
        (0: never); none when the norm is not finite.

        square  the square of the global norm over all ranks
        beside  is called with each unit, when its masters are updated and before they leave
        share   by which the average of the weights moves toward them behind that; 0: none is kept
        """
        norm = sqrt(square.item())
        scale = limit / (norm + EPSILON) if norm > limit > 0 else None
        if self.delay:
            return self._exchange(scale if isfinite(norm) else nan, beside, share)
        updates = isfinite(norm)  # without one, all that moves still moves, as it was planned
        ahead, coming = min(1, len(self.sets) - 1), list[tuple[Buffers, list[Handle]]]()
        for number, unit in enumerate(self._units):
            for one in self._units[len(coming) : number + 1 + ahead]:
                coming.append(self._come(one, len(coming) % len(self.sets)))
            flats, handles = coming[number]
            self._homes.wait(f"the states of {unit.buffer.unit}", *handles)
            if updates:
                self._update(unit, flats, scale)
                beside([replace(unit, masters=flats["masters"])])
            if updates and share:
                flats[AVERAGE].lerp_(flats["masters"], share)
            self._homes.leaving[unit.buffer.unit] = [*self._leave(unit, flats)]
        self.turns.updates += updates

    def begin(self) -> None:
        """Starts the update by the gradients of the step before, if it is one step late: nobody
        reads masters or states until it has ended in `run`.
        """
        if self.delay:
            self._running = self._homes.beside(partial(self._by_late, dict(self._homes.leaving)))

    def _by_late(self, leaving: dict[str, list[Handle]]) -> None:
        """The update by the gradients that wait, when the masters have gone up to the weights."""
        waits = False
        for unit in self._units:
            name, states = unit.buffer.unit, self._homes.states[unit.buffer.unit]
            for handle in leaving.get(name, ()):
                handle.result()
            if not states[LATE][0].isnan():
                waits = True
                flats = {"masters": unit.masters, "gradients": states[LATE], **states}
                self._update(unit, flats, None)
        self.turns.updates += waits

    def _exchange(self, scale: float | None, beside: Beside, share: float) -> None:
        """Ends the update that is one step late: its weights go up, and the gradients of this step,
        times `scale`, wait in its place.
        """
        homes, down = self._homes, list[Handle]()
        homes.wait("the late update", self._running)
        for unit in self._units:
            name = unit.buffer.unit
            beside([unit])
            if share:
                homes.states[name][AVERAGE].lerp_(unit.masters, share)
            if homes.layout.gradients == "device":
                late = homes.states[name][LATE]
                down.append(homes.copy("gradients", "evict", late, unit.summed, of=name))
            homes.leaving[name] = [*self._leave(unit, {"masters": unit.masters})]
        homes.wait("gradients", *down)  # the next step sets them to zero
        for unit in self._units:
            late = homes.states[unit.buffer.unit][LATE]
            if homes.layout.gradients == "host":
                late.copy_(unit.summed)
            if scale is not None:
                late.mul_(scale)

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
                handles.append(homes.copy("gradients", "evict", buffer, unit.summed, of=name))
            elif kind == "gradients":
                handles.append(homes.read("gradients", name, "summed", buffer))
            elif kind != "weights":
                handles.append(homes.read("optimizer", name, kind, buffer))
        return {**flats, **mine}, handles

    def _update(self, unit: FlatUnit, flats: Buffers, scale: float | None) -> None:
        if scale is not None:
            flats["gradients"].mul_(scale)
        states = {name: flats[name] for name in self._homes.states[unit.buffer.unit]}
        turns = []
        for first, last, decay, rate in unit.buffer.runs:
            a, b = (min(max(edge, unit.start), unit.stop) - unit.start for edge in (first, last))
            mine = {name: flat[a:b] for name, flat in states.items()}
            kind = decay, rate
            turns.append(Turn(kind, flats["masters"][a:b], flats["gradients"][a:b], mine))
        self.turns.step(turns)

    def _leave(self, unit: FlatUnit, flats: Buffers) -> Iterator[Handle]:
        """Starts to bring what has changed to its home, and the weights to the device."""
        name, homes, masters = unit.buffer.unit, self._homes, flats["masters"]
        if homes.layout.optimizer == "disk":
            for kind in ("masters", *homes.states[name]):
                yield homes.write("optimizer", name, kind, flats[kind])
        if not unit.away:
            yield homes.copy("weights", "fetch", unit.own_weights, masters, of=name)
        elif unit.apart and homes.layout.weights == "disk":
            if "weights" in flats:
                masters = flats["weights"].copy_(masters)
            yield homes.write("weights", name, "weights", masters)
        elif unit.apart:
            unit.weights.copy_(masters)
