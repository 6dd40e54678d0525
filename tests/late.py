"""The late double: what an operation writes is there only after somebody has waited for it.

                     target             copy
    start            NaN                the operation runs here, at once
    …                NaN                a sum, a gathered weight, a message
    result()         ← the copy         the target is still NaN, the inputs are as they were

The operation works on copies of its tensors, on the group's own thread and in its own order, so a
run that ends without the double ends with it. Between start and `result` the target is NaN, so a
program that reads early computes NaN. `result` raises Spoiled if the target or an input was written
meanwhile. A program that waits for everything gives the same bits as without the double. Integers
become a third of their largest value, booleans True.

    with LateDouble() as late:
        ...
    late.check_landed()

`after=` an operation that has not landed lands that one first. What is read and written is decided
by `flight.use_of`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock
from typing import Any

import torch
from flight import Use, around_operations, site, use_of
from torch import Tensor

from howdah.comm.group import Group
from howdah.comm.handle import DONE, Handle


class Spoiled(AssertionError):
    """A tensor of an operation was changed before the operation was waited for."""


class LateHandle:
    """An operation whose result waits in copies.

    use    the tensors of the caller
    found  the same parts of the copies on which the operation works
    """

    def __init__(self, name: str, use: Use, found: Use, handle: Handle) -> None:
        self.name, self.handle, self.landed = f"{name} (started at {site()})", handle, False
        self._use, self._found, self._one = use, found, Lock()
        for target in use.writes:
            poison(target)
        self._seen = [bits(x) for x in (*use.reads, *use.writes)]

    def result(self) -> None:
        with self._one:  # a lane of another home waits on a thread of its own
            self._land()

    def _land(self) -> None:
        self.handle.result()
        if self.landed:
            return
        for x, seen in zip((*self._use.reads, *self._use.writes), self._seen, strict=True):
            if not torch.equal(bits(x), seen):
                raise Spoiled(f"a tensor of {self.name} was written before it was waited for")
        for target, copy in zip(self._use.writes, self._found.writes, strict=True):
            target.detach().copy_(copy)
        self.landed, self._use, self._found, self._seen = True, Use([], []), Use([], []), []

    def then(self, note: Callable[..., None]) -> None:
        self.handle.then(note)

    def done(self) -> bool:
        return self.landed


class LateDouble:
    """Makes every asynchronous operation of every group late, inside `with`.

    started   all of them so far
    poisoned  bytes of their targets
    """

    def __init__(self) -> None:
        self.started: list[LateHandle] = []
        self.poisoned = 0
        self._stack = ExitStack()

    def __enter__(self) -> "LateDouble":
        self._stack.enter_context(around_operations(self._around))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def check_landed(self) -> None:
        """Raises Spoiled if an operation was never waited for."""
        for late in self.started:
            if not late.landed:
                raise Spoiled(f"{late.name} was never waited for")

    def _around(
        self, group: Group, name: str, operation: Callable[..., Handle], given: dict[str, Any]
    ) -> Handle:
        if isinstance(after := given.get("after", DONE), LateHandle):
            after.result()
            given["after"] = after.handle
        else:  # what comes from another home lands in these tensors
            after.result()
        if not given["async_op"]:
            return operation(**given)
        copies = given | {key: copied(given[key]) for key in ("out", "x") if key in given}
        use, found = use_of(name, group, given), use_of(name, group, copies)
        late = LateHandle(name, use, found, operation(**copies))
        self.poisoned += sum(x.numel() * x.element_size() for x in use.writes)
        self.started.append(late)
        return late


def copied(x: Any) -> Any:
    """Tensors of their own memory in place of a tensor, of several, or of None."""
    if x is None:
        return None
    return x.detach().clone() if isinstance(x, Tensor) else [copied(one) for one in x]


def poison(x: Tensor) -> None:
    """Fills `x` with what no program expects."""
    if x.is_floating_point() or x.is_complex():
        value: float | bool = float("nan")
    else:
        value = True if x.dtype is torch.bool else torch.iinfo(x.dtype).max // 3
    x.detach().fill_(value)


def bits(x: Tensor) -> Tensor:
    """A copy of the bytes of a tensor."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
