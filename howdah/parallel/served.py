"""Parameter servers by collectives: a push is a reduce to each server, a pull a broadcast from it.

    worker    backward  head ── layers.1 ── layers.0           forward  embedding ── layers.0
              push         [head][layers.1][layers.0]          pull     [embedding][layers.0]…
    server k  its range of each    sum over the workers → norm → update → its range of each

A worker has no masters and no moments; a server has those of its range of every unit, and computes
nothing else. With update=workers it has the sum of its range alone, and a broadcast of that follows
each reduce: the workers have all states, and update as if they had summed by themselves. The order
of additions is that of the ranks, so a run repeats bit for bit. It is the form of the lecture,
exact on any transport; the asynchronous server is on the floor `server/`.

Pulls start with the forward pass that needs them, as the all-gathers of zero1 do (`zero.py`), and
each server's messages run in its own group, beside those of the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.handle import DONE, Handle, Note
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.plan.gathers import Pull, pulls
from howdah.plan.plan import Plan
from howdah.plan.servers import server_groups, summed_range


class Links(Protocol):
    """What pushes to servers and pulls from them: collectives, or a client of `server/`."""

    def push(self, unit: str) -> list[Handle]:
        """Starts to bring the gradients of a unit to the servers."""
        ...

    def pull(self, unit: str) -> list[Handle]:
        """Starts to bring the weights of a unit to the workers."""
        ...


Connect = Callable[[Mapping[str, FlatUnit]], Links]


def with_sums(units: dict[str, FlatUnit], mesh: Mesh) -> dict[str, FlatUnit]:
    """The units of a rank; those of a server that only adds have the sums of its ranges."""
    if not mesh.serves or mesh.layout.servers_update:
        return units
    ranges = {
        name: summed_range(unit.buffer.length, mesh.layout, mesh.rank)
        for name, unit in units.items()
    }
    return {
        name: replace(unit, summed=unit.summed.new_zeros(ranges[name][1] - ranges[name][0]))
        for name, unit in units.items()
    }


class ServerLinks:
    """The groups of the workers and each server, the server last; a server has its own alone. All
    ranks of the mesh make it together.
    """

    def __init__(self, plan: Plan, mesh: Mesh, units: Mapping[str, FlatUnit]) -> None:
        self._units, self._layout, self._serves = units, mesh.layout, mesh.serves
        self._pulls = _by_unit(plan, mesh.rank, "dp")
        self._returns = not mesh.layout.servers_update  # sums go back to the workers
        self._groups = {
            ranks[-1]: mesh.join(ranks, label="dp")
            for ranks in server_groups(mesh.layout)
            if mesh.rank in ranks
        }

    def push(self, unit: str) -> list[Handle]:
        """Starts to sum the workers' gradients of a unit into the servers' ranges, which are zeros
        before; those of the workers stay as they are, or become the sum (update=workers).
        """
        one = self._units[unit]
        flat = one.summed if one.gradients is None else one.gradients
        pushed = self._each(one, flat, lambda to, x: to.reduce(x, to.size - 1, async_op=True))
        return [*pushed, *(self._sent_back(one, flat, pushed) if self._returns else ())]

    def pull(self, unit: str) -> list[Handle]:
        """Starts to bring the servers' ranges of a unit's weights to the workers."""
        weights, handles = self._units[unit].weights, []
        for row in self._pulls.get(unit, ()):
            by = self._groups[row.root]
            part = weights if self._serves else weights[row.start : row.stop]
            handles.append(by.broadcast(part, by.size - 1, async_op=True))
        return handles

    def _sent_back(self, unit: FlatUnit, flat: Tensor, after: Iterable[Handle]) -> list[Handle]:
        """Starts to bring the servers' ranges to the workers, each behind one of `after`."""
        behind = iter(after)
        return self._each(
            unit,
            flat,
            lambda by, x: by.broadcast(x, by.size - 1, async_op=True, after=next(behind)),
        )

    def _each(
        self, unit: FlatUnit, flat: Tensor, start: Callable[[Group, Tensor], Handle]
    ) -> list[Handle]:
        """Starts an operation for each server's range of `flat`, which has all of a worker's unit,
        and nothing but a server's own range.
        """
        handles = []
        for server, group in self._groups.items():
            first, last = summed_range(unit.buffer.length, self._layout, server)
            if first < last:
                handles.append(start(group, flat if self._serves else flat[first:last]))
        return handles


@dataclass(frozen=True)
class Given:
    """The handle of a unit's weights that a rank has pulled, and of those that ranks give to others
    when all of them wait for the unit.
    """

    pulled: Sequence[Handle]
    give: Callable[[], None]

    def result(self) -> None:
        """Waits until the weights are here."""
        for handle in self.pulled:
            handle.result()
        self.give()

    def then(self, note: Note) -> None:
        """Calls `note` when the weights are here."""
        self.result()
        DONE.then(note)

    def done(self) -> bool:
        """Whether what this rank has pulled is here."""
        return all(handle.done() for handle in self.pulled)


class PulledOnce:
    """The links of one of a worker's ranks. What several of them hold alike, the first pulls and
    gives to the others, so that all compute with one version of it (`plan/worker_ranks.py`). All
    ranks of the worker make it together.

    links  of this rank
    """

    def __init__(self, links: Links, plan: Plan, mesh: Mesh, units: Mapping[str, FlatUnit]) -> None:
        self._links = links
        self._units, self._alike = units, _by_unit(plan, mesh.rank, "tp")
        several = sorted({row.ranks for every in self._alike.values() for row in every})
        self._groups = {ranks: mesh.group_of(ranks, label="tp") for ranks in several}

    def push(self, unit: str) -> list[Handle]:
        """Starts to bring the gradients that this rank pushes to the servers."""
        return self._links.push(unit)

    def pull(self, unit: str) -> list[Handle]:
        """Starts to bring the weights of a unit to the ranks that hold them."""
        return [Given(self._links.pull(unit), partial(self._give, unit))]

    def _give(self, unit: str) -> None:
        for row in self._alike.get(unit, ()):
            part = self._units[unit].weights[row.start : row.stop]
            self._groups[row.ranks].broadcast(part, row.ranks.index(row.root))


def _by_unit(plan: Plan, rank: int, axis: str) -> dict[str, list[Pull]]:
    """The pulls of a rank along an axis, by unit."""
    found: dict[str, list[Pull]] = {}
    for row in pulls(plan, rank):
        if row.axis == axis:
            found.setdefault(row.unit, []).append(row)
    return found


class PulledWeights:
    """Brings the servers' updated weights to the workers, while the next forward already runs.

    units  in forward order
    """

    def __init__(self, units: Iterable[str], links: Links, waited: Stopwatch) -> None:
        self.units, self._links, self._waited = list(units), links, waited
        self._stale = False
        self._coming: dict[str, list[Handle]] = {}

    def updated(self) -> None:
        """Records that the servers have updated their ranges."""
        self._stale = True

    def start(self) -> None:
        """Starts the pulls after an update, in forward order."""
        if self._stale:
            self._stale = False
            self._coming = {unit: self._links.pull(unit) for unit in self.units}

    def wait(self, *units: str) -> None:
        """Waits until the weights of `units` are those of the last update; of all units when none
        is named.
        """
        self.start()
        with self._waited:
            for unit in units or tuple(self._coming):
                for handle in self._coming.pop(unit, ()):
                    handle.result()
