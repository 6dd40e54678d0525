"""Keepers of weights for own operations: here the simplest, to whom all weights are resident.

    used   layers.0.attention.q.weight      1    a gradient will come
    add    layers.0.attention.q.weight      0    it has: ready

A tied weight is used twice in a forward pass and is ready after both gradients. A pipeline that
computes weight gradients apart from those of its inputs holds them back:

    keeper.hold()          backward leaves what it would add in a queue
    queue = keeper.let()   … which whoever called runs when it suits
"""

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from howdah.parallel.flatten import FlatUnit
from howdah.parallel.ops import Add

Target = Callable[[str], Tensor]
Ready = Callable[[str], None]


class Resident:
    """Keeps all weights of `units`.

    target  where the gradient of a weight is added, by name
    ready   is called with the name of a weight whose gradients have all come
    """

    def __init__(self, units: dict[str, FlatUnit], target: Target, ready: Ready) -> None:
        self._weights = {n: v for u in units.values() for n, v in u.views(u.weights).items()}
        self._target = target
        self._awaited: Counter[str] = Counter()
        self._held: list[Callable[[], None]] | None = None
        self._ready = ready

    def value(self, name: str) -> Tensor:
        """The weight."""
        return self._weights[name]

    def used(self, name: str) -> None:
        """One more gradient will come."""
        self._awaited[name] += 1

    def add(self, name: str, add: Add) -> None:
        """Adds to the gradient, or puts that off."""
        if self._held is None:
            self._add(name, add)
        else:
            self._held.append(lambda: self._add(name, add))

    def hold(self) -> None:
        """From now on, what is to be added waits."""
        self._held = []

    def let(self) -> list[Callable[[], None]]:
        """What has waited since `hold`, to be called in any order; adds are made at once again."""
        held, self._held = self._held, None
        return held or []

    def _add(self, name: str, add: Add) -> None:
        add(self._target(name))
        self._awaited[name] -= 1
        if not self._awaited[name]:
            self._ready(name)
