"""A user's optimizer on ranges of flat buffers, and its states by name.

The object stays the user's, so that schedulers of torch go on setting its rates; its groups get new
parameters: the ranges that this rank updates. A range is a run of elements of one unit and one
group. Each group also has a *pilot* of one element that stays zero: no group is empty then, and the
pilot's state says how many updates there were (`step`, and such numbers), which is the same for all
ranges of the group.

    group 0   pilot   the rest |..]   layer1.0 [....|   …       own ranges of group 0
    group 1   pilot                   layer1.0     |..]  …
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.group import Group
from howdah.foreign.elementwise import another
from howdah.foreign.table import Table
from howdah.parallel.flat_params import FlatUnit
from howdah.plan.flat_buffers import pieces

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a unit's flat buffer, which the optimizer updates."""

    unit: str
    start: int
    stop: int
    master: Tensor
    gradient: Tensor


class States:
    """The optimizer of one rank on its ranges, and what it keeps for them.

    parts   the ranges
    pilots  of each group
    named   the model's parameters, by name
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        table: Table,
        units: Mapping[str, FlatUnit],
        named: Mapping[str, Tensor],
    ) -> None:
        self.optimizer, self._units, self._groups = optimizer, units, table.groups
        self.parts: list[Part] = []
        self.pilots: list[Tensor] = []
        device = next(iter(units.values())).masters.device
        members: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for mine in members:
            self.pilots.append(torch.zeros(1, dtype=table.wide, device=device))
            mine.append(self.pilots[-1])
        for unit in units.values():
            for run in table.runs(unit.buffer):
                first, last = max(run.start, unit.start), min(run.stop, unit.stop)
                if first < last:
                    cut = slice(first - unit.start, last - unit.start)
                    here = unit.masters[cut], unit.summed[cut]
                    self.parts.append(Part(unit.buffer.unit, first, last, *here))
                    members[run.group].append(here[0])
        self._moved(members, table, {id(p): name for name, p in named.items()})

    def _moved(self, members: list[list[Tensor]], table: Table, name_of: Mapping[int, str]) -> None:
        """Gives the groups their ranges, and the ranges what the optimizer had kept for their
        parameters: sums that some optimizers begin with, or those of earlier updates.
        """
        kept: dict[str, dict[str, Any]] = {}
        old = self.optimizer.state
        names = {name: number for number, name in enumerate(table.groups)}
        in_group: dict[int, list[str]] = {}
        for name in names:
            in_group.setdefault(table.groups[name], []).append(name)
        for number, group in enumerate(self.optimizer.param_groups):
            trained = [p for p in group["params"] if p.requires_grad]
            for parameter in trained:
                if parameter in old:
                    kept[name_of[id(parameter)]] = _as_rows(old[parameter], parameter)
            group["params"] = members[number]
        old.clear()
        if not kept:
            return
        if missing := [name for name in names if name not in kept]:
            raise UserError(
                f"the optimizer has states of some parameters and none of {missing[0]}; give it "
                "before its first step, and read states with job.load"
            )
        for number, pilot in enumerate(self.pilots):
            state = kept[in_group[number][0]] if number in in_group else {}
            self.optimizer.state[pilot] = {
                key: torch.zeros_like(pilot) if _is_elements(value) else _own(value)
                for key, value in state.items()
            }
        for part in self.parts:
            state = {}
            for piece, start, stop in self._pieces(part):
                for key, value in kept[piece.name].items():
                    if not _is_elements(value):
                        state.setdefault(key, _own(value))
                        continue
                    flat = state.setdefault(key, torch.zeros_like(part.master))
                    cut = value.reshape(-1)[piece.start : piece.stop]
                    flat[start - part.start : stop - part.start] = cut.to(flat.dtype)
            self.optimizer.state[part.master] = state

    def attach(self) -> None:
        """Gives every range its gradient, which `zero_grad` may have taken away."""
        for part in self.parts:
            part.master.grad = part.gradient
        for pilot in self.pilots:
            pilot.grad = torch.zeros_like(pilot)

    def kinds(self) -> list[str]:
        """The names of the states that have a number for each element."""
        state = self.optimizer.state.get(self.pilots[0], {})
        return [key for key, value in state.items() if _is_elements(value)]

    def entries(self, counted: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Any, Tensor]]:
        """The pieces of states inside of the ranges `counted` of the units, as `saving.entries`."""
        for part in self.parts:
            first, last = counted[part.unit]
            inside = max(first, part.start), min(last, part.stop)
            state = self.optimizer.state.get(part.master, {})
            for kind in (key for key, value in state.items() if _is_elements(value)):
                for piece, start, stop in pieces(self._units[part.unit].buffer, *inside):
                    yield kind, piece, state[kind][start - part.start : stop - part.start]

    def facts(self) -> list[dict[str, Any]]:
        """Of each group, what JSON can hold: its settings, and its numbers (`step`)."""
        found = []
        for group, pilot in zip(self.optimizer.param_groups, self.pilots, strict=True):
            state = self.optimizer.state.get(pilot, {})
            numbers = {key: _told(value) for key, value in state.items() if not _is_elements(value)}
            settings = {key: _plain(value) for key, value in group.items() if key != "params"}
            told = {key: value for key, value in settings.items() if value is not NotImplemented}
            found.append({"settings": told, "numbers": numbers})
        return found

    def restore(self, checkpoint: Any, facts: list[dict[str, Any]], kinds: list[str]) -> None:
        """Fills the states of all ranges from a checkpoint of the same optimizer."""
        self.optimizer.state.clear()
        for group, pilot, told in zip(self.optimizer.param_groups, self.pilots, facts, strict=True):
            for key, value in told["settings"].items():
                if key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
            if told["numbers"] or kinds:
                fresh = {key: torch.zeros_like(pilot) for key in kinds}
                self.optimizer.state[pilot] = {**self._numbers(group, told), **fresh}
            held = {id(member) for member in group["params"]}
            for part in self.parts:
                if id(part.master) not in held or not (told["numbers"] or kinds):
                    continue
                state = {key: torch.zeros_like(part.master) for key in kinds}
                for piece, start, stop in self._pieces(part):
                    for key in kinds:
                        out = state[key][start - part.start : stop - part.start]
                        checkpoint.read(key, piece, out)
                self.optimizer.state[part.master] = {**self._numbers(group, told), **state}

    def _numbers(self, group: Mapping[str, Any], told: dict[str, Any]) -> dict[str, Any]:
        """The numbers of a group, as tensors of their own for each range."""
        there = group.get("capturable") or group.get("fused")
        device = self.pilots[0].device if there else "cpu"
        return {
            key: torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)
            if isinstance(value, dict)
            else value
            for key, value in told["numbers"].items()
        }

    def _pieces(self, part: Part) -> Iterator[tuple[Any, int, int]]:
        return pieces(self._units[part.unit].buffer, part.start, part.stop)

    def copied(self) -> dict[int, dict[str, Any]]:
        """Copies of all states, by number of a range; for `put_back`."""
        every = [*self.pilots, *(part.master for part in self.parts)]
        return {
            number: {key: _own(value) for key, value in self.optimizer.state.get(one, {}).items()}
            for number, one in enumerate(every)
        }

    def put_back(self, copies: Mapping[int, dict[str, Any]]) -> None:
        """Restores what `copied` has returned."""
        every = [*self.pilots, *(part.master for part in self.parts)]
        self.optimizer.state.clear()
        for number, one in enumerate(every):
            if copies[number]:
                self.optimizer.state[one] = copies[number]

    def on_whole(
        self, masters: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """An optimizer of the same class, settings and states on whole parameters.

        masters  the parameters by name, with gradients
        states   by kind and name, the whole states
        """
        told = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        names = [[n for n in masters if self._groups[n] == number] for number in range(len(told))]
        groups = [
            {**one, "params": [masters[name] for name in some]}
            for one, some in zip(told, names, strict=True)
            if some
        ]
        fresh = another(self.optimizer, groups)
        fresh.state.clear()
        for number, pilot in enumerate(self.pilots):
            state = self.optimizer.state.get(pilot, {})
            for name in names[number] if state else ():
                fresh.state[masters[name]] = {
                    key: states[key][name].clone() if _is_elements(value) else _own(value)
                    for key, value in state.items()
                }
        return fresh

    def flat(self, kind: str, unit: FlatUnit) -> Tensor:
        """A state of the own range of a unit, in the place that it has in the whole unit."""
        flat = unit.masters.new_zeros(unit.buffer.length)
        for part in self.parts:
            if part.unit == unit.buffer.unit:
                flat[part.start : part.stop] = self.optimizer.state[part.master][kind]
        return flat


def agree(optimizer: torch.optim.Optimizer, world: Group) -> None:
    """Makes the states that an optimizer already has those of rank 0, on all ranks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.numel():
                    world.broadcast(value, 0)


def _is_elements(value: object) -> bool:
    """Whether a state has a number for each element, and not one for the whole parameter."""
    return isinstance(value, Tensor) and value.ndim > 0


def _as_rows(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter, whose elements have one dim at least."""
    return {
        key: value.reshape(1) if parameter.ndim == 0 and key != "step" else value
        for key, value in state.items()
    }


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _plain(value: Any) -> Any:
    """A setting as JSON has it; NotImplemented for what it cannot hold."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, tuple) and all(isinstance(one, PLAIN) for one in value):
        return list(value)
    return value if isinstance(value, PLAIN) else NotImplemented
