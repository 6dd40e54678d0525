"""UnitWeightStore: the weights of own operations. It also counts the gradients that will follow.

    expect   layers.0.attention.q.weight      1    a gradient will follow
    add      layers.0.attention.q.weight      0    it was added: the weight is ready

A tied weight is used twice in a forward pass, and is ready after both gradients. A pipeline that
computes weight gradients apart from input gradients defers them:

    store.defer()                   backward leaves what it would add in a queue
    queue = store.take_deferred()   … which the caller runs later

An addition that would keep much memory until then is made at once all the same; the weight is ready
when its entry in the queue runs.

A pipeline runs several forwards before its first backward. The gradients that each forward expects
are set aside, and expected again when its own backward begins: so a weight is ready after each.

    uses = store.set_aside()      … store.expect_again(uses)
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.model.loss import Add
from howdah.parallel.flat_params import FlatUnit

Target = Callable[[str], Tensor]
Ready = Callable[[str], None]
TakeRows = Callable[[str, Tensor, Tensor], bool]


class Coming(Protocol):
    """What brings weights when they are used."""

    def value(self, name: str) -> Tensor:
        """The weight `name`, valid until the operation ends."""
        ...

    def rows(self, name: str, index: Tensor) -> Tensor:
        """The rows of a table for index [...] → [..., h]."""
        ...


class UnitWeightStore:
    """Has all weights of `units`, and knows where their gradients are added.

    target  name of a weight → the tensor to which its gradient is added
    ready   called with the name of a weight when all expected gradients of it were added
    come    brings the weights of units that hold only shares of theirs; None: units hold them whole
    shared  weights that several stages of this rank use; their gradients are expected together
    take_rows  takes rows of a gradient that have another place than the target, if they have
    """

    def __init__(
        self,
        units: dict[str, FlatUnit],
        target: Target,
        ready: Ready,
        come: Coming | None = None,
        shared: frozenset[str] = frozenset(),
        *,
        take_rows: TakeRows = lambda *_: False,
    ) -> None:
        self._value = come.value if come else whole_weights(units).__getitem__
        self._come, self._target, self._take_rows = come, target, take_rows
        self._shared = shared
        self._awaited: Counter[str] = Counter()
        self._held: list[Callable[[], None]] | None = None
        self._ready = ready

    def value(self, name: str) -> Tensor:
        """The weight `name`, valid until the operation ends; then it may be released."""
        return self._value(name)

    def rows(self, name: str, index: Tensor) -> Tensor:
        """The rows of a table for index [...] → [..., h]."""
        come = self._come
        return come.rows(name, index) if come else F.embedding(index, self.value(name))

    def expect_gradient(self, name: str) -> None:
        """Expects one more gradient of `name`."""
        self._awaited[name] += 1

    def add(self, name: str, add: Add, *, now: bool = False) -> None:
        """Adds to the gradient, or defers the addition, unless it must be made `now`."""
        self._make(name, lambda: add(self._target(name)), now=now)

    def add_rows(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, h] to those rows of the gradient whose numbers are `index` [n], or defers
        the addition.
        """

        def make() -> None:
            if not self._take_rows(name, index, rows):
                target = self._target(name)
                target.index_add_(0, index, rows.to(target.dtype))

        self._make(name, make)

    def _make(self, name: str, make: Callable[[], object], *, now: bool = False) -> None:
        """Makes an addition, or defers it."""
        if now or self._held is None:
            with torch.no_grad():
                make()
        if self._held is None:
            self._added(name)
        elif now:  # the queue must not keep the tensors of `make`
            self._held.append(lambda: self._added(name))
        else:
            self._held.append(lambda: self._make_deferred(name, make))

    def defer(self) -> None:
        """Defers all additions from now on."""
        self._held = []

    def take_deferred(self) -> list[Callable[[], None]]:
        """The additions deferred since `defer`, to be called in any order. Later ones are made at
        once again.
        """
        held, self._held = self._held, None
        return held or []

    def set_aside(self) -> Counter[str]:
        """Stops expecting the gradients of the forward pass that has just ended, and returns their
        counts. Those of shared weights stay expected.
        """
        uses = Counter({n: count for n, count in self._awaited.items() if n not in self._shared})
        for name in uses:
            del self._awaited[name]
        return uses

    def expect_again(self, uses: Counter[str]) -> None:
        """Expects gradients that `set_aside` has returned for a forward pass."""
        self._awaited.update(uses)

    def clear(self) -> None:
        """Expects no gradients any longer: the forward passes so far were only measured."""
        self._awaited.clear()

    def _make_deferred(self, name: str, make: Callable[[], object]) -> None:
        with torch.no_grad():  # this is outside of a backward pass
            make()
        self._added(name)

    def _added(self, name: str) -> None:
        self._awaited[name] -= 1
        if not self._awaited[name]:
            self._ready(name)


def whole_weights(units: dict[str, FlatUnit]) -> dict[str, Tensor]:
    """The weights, by name, of units that hold them whole."""
    whole = (unit for unit in units.values() if not unit.comes)
    return {name: view for unit in whole for name, view in unit.views(unit.weights).items()}
