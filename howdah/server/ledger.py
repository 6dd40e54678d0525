"""The ledger: the order in which a server has applied updates and answered pulls.

    pull 0 1 4 2 17     worker 0, incarnation 1, clock 4, key 2: got version 17
    push 0 1 4 2 18     its update made version 18
    push 1 1 3 2 18     added in the same round of bsp

The weights of a run follow from its ledgers: a worker's gradients from what its pulls got, a key's
versions from the updates. `replay` computes them again in one process, in any order in which
nothing is used before it is there, so that asynchronous runs can be checked to the last bits.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

from torch import Tensor

from howdah.base.errors import UserError, named
from howdah.server.clocks import Round, Update
from howdah.server.shard import Shard, Term

Step = tuple[int, int, int]  # worker, incarnation, clock
Weights = dict[tuple[int, int], Tensor]  # by server and key
# what a worker computes from what it pulled: for each server and key, what it pushes
Gradient = Callable[[Step, Weights], dict[tuple[int, int], Term]]


class Event(NamedTuple):
    """A line of a ledger."""

    kind: Literal["pull", "push"]
    update: Update
    version: int

    def __str__(self) -> str:
        return " ".join(map(str, (self.kind, *self.update, self.version)))


def read_ledger(path: Path) -> list[Event]:
    """The events of a file, in order. Raises UserError for one that is no ledger."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        kind, *rest = line.split(" ")
        if (
            kind not in ("pull", "push")
            or len(rest) != 5
            or not all(n.isascii() and n.isdigit() for n in rest)
        ):
            raise UserError(f"{named(path)}, line {number}: not a line of a ledger: {line[:80]!r}")
        worker, incarnation, clock, key, version = map(int, rest)
        update = Update(worker, incarnation, clock, key)
        found.append(Event(cast(Literal["pull", "push"], kind), update, version))
    return found


def twice(events: Iterable[Event]) -> list[Update]:
    """The updates of a server's ledger that were applied more than once."""
    seen: set[tuple[int, int, int]] = set()
    found = []
    for event in events:
        if event.kind == "push":
            place = event.update.worker, event.update.clock, event.update.key
            found += [event.update] if place in seen else []
            seen.add(place)
    return found


def replay(ledgers: Sequence[Sequence[Event]], shards: Sequence[Shard], gradient: Gradient) -> None:
    """Applies the updates of all servers' ledgers to `shards`, which are as at the start of the
    run. Raises UserError for ledgers that use what is not there: one is missing, or cut.
    """
    again, rest = _Replay(shards, gradient, ledgers), [[*reversed(events)] for events in ledgers]
    moved = True
    while moved:
        moved = False
        for server, events in enumerate(rest):
            while events and again.can_do(events):
                again.do(server, events)
                moved = True
    if any(rest):
        event = next(events[-1] for events in rest if events)
        raise UserError(f"the ledgers lack a pull before '{event}': one of them is missing, or cut")


class _Replay:
    """A replay on the way.

    pulled  by step, what it has pulled so far
    pushed  by step, its gradients, once it has pulled everything
    awaits  by step, its pulls that are still to come: a key may be pulled again, because the answer
            was lost with its connection, and then the worker had the later one
    """

    def __init__(
        self, shards: Sequence[Shard], gradient: Gradient, ledgers: Sequence[Sequence[Event]]
    ) -> None:
        self._shards, self._gradient = shards, gradient
        self._awaits = Counter(step for events in ledgers for step in _pulls(events))
        self._keys = sum(len(shard.chunks) for shard in shards)
        self._pulled: dict[Step, Weights] = defaultdict(dict)
        self._pushed: dict[Step, dict[tuple[int, int], Term]] = {}
        self._versions: dict[tuple[Step, int, int], int] = {}  # that a step pulled

    def can_do(self, events: Sequence[Event]) -> bool:
        """Whether what the next event uses is there."""
        steps = [event.update[:3] for event in _together(events) if event.kind == "push"]
        return all(step in self._pushed for step in steps)

    def do(self, server: int, events: list[Event]) -> None:
        """Does the next event, or the next ones of one round, and removes them."""
        together, shard = list(_together(events)), self._shards[server]
        del events[len(events) - len(together) :]
        (worker, incarnation, clock, key), version = together[0].update, together[0].version
        step = worker, incarnation, clock
        if together[0].kind == "pull":
            self._versions[step, server, key] = version
            weights = shard.pulled(worker, key)
            if step in self._pushed:
                return
            self._pulled[step][server, key] = weights.clone()
            self._awaits[step] -= 1
            if len(self._pulled[step]) == self._keys and not self._awaits[step]:
                self._pushed[step] = self._gradient(step, self._pulled.pop(step))
            return
        updates = tuple(event.update for event in together)
        ages = [version - 1 - self._versions[one[:3], server, key] for one in updates]
        terms = {one.worker: self._pushed[one[:3]][server, key] for one in updates}
        shard.apply(Round(updates, max(ages)), terms)


def _pulls(events: Sequence[Event]) -> Iterator[Step]:
    """The steps of a server's pulls; not of those that came when the step had pushed there."""
    pushed: set[Step] = set()
    for event in events:
        if event.kind == "push":
            pushed.add(event.update[:3])
        elif event.update[:3] not in pushed:
            yield event.update[:3]


def _together(events: Sequence[Event]) -> Iterator[Event]:
    """The next event, which is last in the list, and those that made the same version with it."""
    first = events[-1]
    for event in reversed(events):
        same = event.update.key == first.update.key and event.version == first.version
        if event is not first and not (same and event.kind == first.kind == "push"):
            return
        yield event
