"""The store of weights for own operations: here what is the same whoever has the weights.

    used   layers.0.attention.q.weight      1    a gradient will come
    add    layers.0.attention.q.weight      0    it has: ready

A tied weight is used twice in a forward pass and is ready after both gradients. A pipeline that
computes weight gradients apart from those of its inputs holds them back:

    store.defer()          backward leaves what it would add in a queue
    queue = store.take_deferred()   … which whoever called runs when it suits

What would have to keep much until then is added at once all the same; the weight is ready when its
turn in the queue comes.

A pipeline goes forward several times before it first goes backward. What each forward awaits is
set aside, and expected again when its own backward begins: so a weight is ready after each.

    uses = store.set_aside()      … store.expect_again(uses)
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from howdah.model.loss import Add
from howdah.parallel.flat_params import FlatUnit

Target = Callable[[str], Tensor]
Ready = Callable[[str], None]


class UnitWeightStore:
    """Knows where all weights of `units` are, and where their gradients go.

    target  where the gradient of a weight is added, by name
    ready   is called with the name of a weight whose gradients have all come
    value   gives a weight, by name, where units have shares of theirs; None: they lie in the units
    shared  weights that several stages of this rank use, whose gradients are awaited together
    """

    def __init__(
        self,
        units: dict[str, FlatUnit],
        target: Target,
        ready: Ready,
        value: Target | None = None,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self._value = value or whole_weights(units).__getitem__
        self._target = target
        self._shared = shared
        self._awaited: Counter[str] = Counter()
        self._held: list[Callable[[], None]] | None = None
        self._ready = ready

    def value(self, name: str) -> Tensor:
        """The weight, for the operation that asks; afterwards it may be let go."""
        return self._value(name)

    def expect_gradient(self, name: str) -> None:
        """One more gradient will come."""
        self._awaited[name] += 1

    def add(self, name: str, add: Add, *, now: bool = False) -> None:
        """Adds to the gradient, or puts that off, unless it is to be `now`."""
        if now or self._held is None:
            with torch.no_grad():
                add(self._target(name))
        if self._held is None:
            self._added(name)
        elif now:  # the queue must not keep what `add` keeps
            self._held.append(lambda: self._added(name))
        else:
            self._held.append(lambda: self._let(name, add))

    def defer(self) -> None:
        """From now on, what is to be added waits."""
        self._held = []

    def take_deferred(self) -> list[Callable[[], None]]:
        """What has waited since `hold`, to be called in any order; adds are made at once again."""
        held, self._held = self._held, None
        return held or []

    def set_aside(self) -> Counter[str]:
        """What the forward pass that has just ended awaits, which is awaited no longer."""
        uses = Counter({n: count for n, count in self._awaited.items() if n not in self._shared})
        for name in uses:
            del self._awaited[name]
        return uses

    def expect_again(self, uses: Counter[str]) -> None:
        """The gradients that a forward pass was to have come next."""
        self._awaited.update(uses)

    def clear(self) -> None:
        """No gradient will come of what was used so far: it was only to be looked at."""
        self._awaited.clear()

    def _let(self, name: str, add: Add) -> None:
        with torch.no_grad():  # this is outside of a backward pass
            add(self._target(name))
        self._added(name)

    def _added(self, name: str) -> None:
        self._awaited[name] -= 1
        if not self._awaited[name]:
            self._ready(name)


def whole_weights(units: dict[str, FlatUnit]) -> dict[str, Tensor]:
    """The weights, by name, of units that have them whole."""
    whole = (unit for unit in units.values() if not unit.shared_out)
    return {name: view for unit in whole for name, view in unit.views(unit.weights).items()}
