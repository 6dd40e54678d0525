"""The flight checker: refuses operators that touch memory which a started operation still uses.

    with FlightChecker() as checker:
        handle = group.reduce_scatter(flat, async_op=True)
        flat.add_(1)           Race: aten::add_ writes what reduce_scatter is reading
        handle.result()        from here on, flat may be used again
    checker.check_landed()     Race, if an operation was never waited for

From its start until somebody has waited for it, an operation is in flight. Nobody may write what it
reads, or touch what it writes:

    operation                  reads                    writes
    all_reduce(x)              x                        x
    reduce_scatter(x)          x                        this rank's share of x
    all_gather(x)              this rank's share of x   the other shares of x
    … (out, x), all_to_all,    x                        out
    gather, scatter,
    exchange, copy
    reduce(x, root)            x                        x, on the root
    send(x)                    x
    receive(x)                                          x
    broadcast(x, root)         x, on the root           x, on the others

The checker knows nothing of time. It follows the order in which one thread starts operations, waits
for them and runs operators. So it sees a race on every run, even if the operation has long ended.
What it proves on a CPU holds for streams: they too order an operation behind what came before its
start, and what comes after its `result` behind the operation.

It sees the operators of the thread that entered it, with backward passes, on any device. It does
not see those inside of an operation of a group, and what reads memory without torch, such as numpy
(`late.py` does). A strided tensor counts from its first element to its last.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from sys import _getframe
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from howdah.comm.group import Group
from howdah.comm.handle import Handle

ROOT = Path(__file__).resolve().parents[1]
INSIDE = tuple(f"{ROOT}/{path}" for path in ("howdah/comm", "tests/flight.py", "tests/late.py"))
OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send",
    "receive",
    "exchange",
    "copy",
)
# They take a tensor for its size, dtype and device only.
FRESH = ("aten::new_", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")


class Race(AssertionError):
    """Memory is touched that an operation in flight uses."""


# -- what an operation uses ----------------------------------------------------------


class Use(NamedTuple):
    """The tensors, or the parts of them, that an operation reads and writes on this rank."""

    reads: list[Tensor]
    writes: list[Tensor]


def use_of(name: str, group: Group, given: dict[str, Any]) -> Use:
    """The use of operation `name` of `group`, called with the arguments `given`."""
    x, out = given.get("x"), given.get("out")
    if name == "all_reduce":
        return Use(listed(x), listed(x))
    if name in ("send", "receive", "broadcast"):
        reads = name == "send" or (name == "broadcast" and given["root"] == group.rank)
        return Use([x], []) if reads else Use([], [x])
    if name == "reduce":
        return Use([x], [x] if given["root"] == group.rank else [])
    if x is not None or name == "scatter":
        return Use([] if x is None else [x], [] if out is None else [out])
    wholes = listed(out)
    own = [group.own_shard(whole) for whole in wholes]
    if name == "reduce_scatter":
        return Use(wholes, own)
    ranks = [rank for rank in range(group.size) if rank != group.rank]
    return Use(own, [group.own_shard(whole, rank) for whole in wholes for rank in ranks])


def listed(x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


class Span(NamedTuple):
    """The bytes [start, stop) of a device."""

    device: torch.device
    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        apart = self.stop <= other.start or other.stop <= self.start
        return self.device == other.device and not apart


def span_of(x: Tensor) -> Span:
    """The bytes from the first element of a tensor to its last."""
    start = x.data_ptr()
    if not x.numel():
        return Span(x.device, start, start)
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return Span(x.device, start, start + (last + 1) * x.element_size())


# -- the checker ---------------------------------------------------------------------


@dataclass(eq=False)
class Flight:
    """An operation that has been started. It holds its tensors, so that their memory is not that of
    others.

    before  the operation behind which it runs
    landed  whether all that follows is ordered behind it
    waited  whether somebody has waited for it itself
    """

    name: str
    site: str
    held: Use
    before: "Flight | None"
    landed: bool = False
    waited: bool = False

    def __post_init__(self) -> None:
        self.reads = [span_of(x) for x in self.held.reads]
        self.writes = [span_of(x) for x in self.held.writes]

    def __str__(self) -> str:
        return f"{self.name} (started at {self.site})"

    def chain(self) -> "Iterator[Flight]":
        """This operation, and those behind which it runs."""
        flight: Flight | None = self
        while flight:
            yield flight
            flight = flight.before

    def land(self) -> None:
        """It was waited for."""
        self.waited = True
        for flight in list(self.chain()):
            flight.landed, flight.held, flight.before = True, Use([], []), None


class FlightChecker(TorchDispatchMode):
    """Checks every operator of this thread, and every operation of a group, inside `with`.

    started  all operations so far that did not end at once
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Flight] = []
        self._flying: list[Flight] = []
        self._inside = 0  # operations of groups that are being called
        self._stack = ExitStack()

    def __enter__(self) -> "FlightChecker":
        with ExitStack() as stack:
            stack.enter_context(around_operations(self._around))
            # On a card, other threads would run the backward pass.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled; else torch wraps each call of __torch_dispatch__

    @property
    def flying(self) -> list[Flight]:
        """What has been started and not waited for."""
        self._flying = [flight for flight in self._flying if not flight.landed]
        return self._flying

    def start(self, name: str, use: Use, after: Flight | None = None) -> Flight:
        """Puts an operation into flight behind `after`, until `land` is called. Raises Race."""
        flight = Flight(name, site(), use, after)
        self._check_use(flight)
        self.started.append(flight)
        self._flying.append(flight)
        return flight

    def check_landed(self) -> None:
        """Raises Race if an operation is in flight, or was never waited for itself."""
        for flight in self.started:
            if not flight.waited:
                raise Race(f"{flight} was never waited for")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._inside and self.flying:
            for tensor, writes in touched(func, args, kwargs or {}):
                self._check(func._schema.name, span_of(tensor), writes=writes)
        return func(*args, **(kwargs or {}))

    def _check_use(self, flight: Flight) -> None:
        earlier = frozenset(flight.chain())
        for span in flight.writes:
            self._check(str(flight), span, writes=True, but=earlier)
        for span in flight.reads:
            self._check(str(flight), span, writes=False, but=earlier)

    def _check(
        self, name: str, span: Span, *, writes: bool, but: frozenset[Flight] = frozenset()
    ) -> None:
        does = "writes" if writes else "reads"
        for flight in self.flying:
            if flight in but:
                continue
            if any(span.meets(other) for other in flight.writes):
                raise Race(f"{name} {does} what {flight} is writing")
            if writes and any(span.meets(other) for other in flight.reads):
                raise Race(f"{name} {does} what {flight} is reading")

    def _around(
        self, group: Group, name: str, operation: Callable[..., Handle], given: dict[str, Any]
    ) -> Handle:
        """An operation of a group, called while the checker watches."""
        after, before = given.get("after"), None
        if isinstance(after, CheckedHandle):
            given["after"], before = after.handle, after.flight
        use = use_of(name, group, given)
        if not given["async_op"]:
            if before:  # which it waits for
                before.land()
            self._check_use(Flight(name, site(), use, before))
            with self.aside():
                return operation(**given)
        flight = self.start(name, use, before)
        with self.aside():
            return CheckedHandle(self, flight, operation(**given))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside belongs to an operation, and is not checked."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


class CheckedHandle:
    """The handle of an operation, which lands when it is waited for."""

    def __init__(self, checker: FlightChecker, flight: Flight, handle: Handle) -> None:
        self._checker, self.flight, self.handle = checker, flight, handle

    def result(self) -> None:
        with self._checker.aside():
            self.handle.result()
        self.flight.land()

    def then(self, note: Callable[..., None]) -> None:
        self.handle.then(note)

    def done(self) -> bool:
        return self.handle.done()


# -- calls and operators -------------------------------------------------------------


@contextmanager
def around_operations(around: Callable[..., Handle]) -> Iterator[None]:
    """Calls around(group, name, operation, arguments) in place of each operation of every group.

    operation  does it, and takes the arguments by name
    """
    calling: set[Group] = set()

    def replaced(name: str) -> Callable[..., Handle]:
        original = getattr(Group, name)
        parameters = signature(original)

        @wraps(original)
        def call(group: Group, *args: Any, **kwargs: Any) -> Handle:
            if group in calling:  # another operation calls this one
                return original(group, *args, **kwargs)
            bound = parameters.bind(group, *args, **kwargs)
            bound.apply_defaults()
            given = {key: value for key, value in bound.arguments.items() if key != "self"}
            calling.add(group)
            try:
                return around(group, name, lambda **given: original(group, **given), given)
            finally:
                calling.discard(group)

        return call

    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(patch.object(Group, name, replaced(name)))
        yield


def touched(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Yields the tensors whose elements an operator reads or writes, and whether it writes them."""
    for place, name, writes in uses_of(operator):
        value = args[place] if place < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                yield tensor, writes


@cache
def uses_of(operator: Any) -> list[tuple[int, str, bool]]:
    """The arguments whose elements an operator reads or writes: place, name, whether it writes."""
    found, fresh = [], operator._schema.name.startswith(FRESH)
    for place, argument in enumerate(operator._schema.arguments):
        alias = argument.alias_info
        writes = bool(alias and alias.is_write)
        view = alias and not writes  # the result is of the same memory
        if "Tensor" in str(argument.type) and (writes or not (fresh or view)):
            found.append((place, argument.name, writes))
    return found


def site() -> str:
    """`file:line` of the innermost caller outside of howdah.comm and of the doubles."""
    frame = _getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
