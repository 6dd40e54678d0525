"""Messages: what one rank of a group sends to another, and whatever else is no collective.

    group.send(x, to)                 sends one tensor to rank `to`, which must call
    group.receive(x, source)          … with a tensor of equal size and dtype
    group.exchange(out, x, to, source)  both at once, as in a ring
    group.signal(to)                  lets one wait(this rank) of rank `to` return
    group.copy(out, x)                copies a tensor here, in the order of the group's operations
    with group.together(): ...        the operations inside start together

A message may wait for its receiver: over gloo a send ends when rank `to` has called, in shared
memory a small one ends before. So what two ranks send to each other goes by `exchange`, or inside
of `together`, where all may send before they receive.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import Checks, whole_number
from howdah.comm.counters import Counters
from howdah.comm.handle import DONE, Handle
from howdah.comm.running import Runner, Steps
from howdah.comm.staging import Stage, check_tensor
from howdah.comm.transport import Transport

NONE = (0, 0)  # no rows: the operation reads nothing of a tensor


class Messages:
    """A rank in a group; `group.Group` adds the collectives.

    axis      the label under which bytes are counted
    counters  counts what this rank sends; several groups may share them
    owns      whether `close` closes the transport too
    """

    def __init__(
        self,
        transport: Transport,
        *,
        axis: str = "world",
        counters: Counters | None = None,
        owns: bool = False,
    ) -> None:
        self._owns = owns
        self.axis, self.link = axis, transport.link
        self.rank, self.size = transport.rank, transport.size
        self.counters = counters or Counters()
        self._checks = Checks(self.rank, self.size)
        self._transport = transport
        self._run = Runner(transport, axis, self.counters)

    def send(self, x: Tensor, to: int, *, async_op: bool = False) -> Handle:
        """Sends `x` to rank `to`. `x` may be changed when the handle is done."""
        check_tensor("send", x, written=False)
        to = self._checks.peer(to, other=True, operation="send")

        def work(stage: Stage) -> Steps:
            yield [partial(self._transport.send, stage.take(x), to)]

        return self._run("send", work, [x], async_op)

    def receive(self, x: Tensor, source: int, *, async_op: bool = False) -> Handle:
        """Writes the next tensor that rank `source` sends to this rank to `x`."""
        check_tensor("receive", x, written=True)
        source = self._checks.peer(source, other=True, operation="receive")

        def work(stage: Stage) -> Steps:
            flat = stage.take(x, NONE)
            yield [partial(self._transport.receive, flat, source)]
            stage.give(x, flat)

        return self._run("receive", work, [x], async_op)

    def exchange(
        self,
        out: Tensor,
        x: Tensor,
        to: int,
        source: int,
        *,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Sends `x` to rank `to` and writes the next tensor of rank `source` to `out`, at once.

        The two may be one rank, and have other sizes. All ranks of a ring may call it together.
        """
        with self.together(async_op=async_op, after=after) as handle:
            self.send(x, to)
            self.receive(out, source)
        return handle

    def copy(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Handle:
        """Copies `x` to `out`, both of this rank, behind the group's earlier operations."""
        check_tensor("copy", out, written=True)
        check_tensor("copy", x, written=False)
        if out.shape != x.shape or out.dtype != x.dtype:
            raise UserError(f"copy: out is {spell(out)}, and x is {spell(x)}: they must be alike")

        def work(stage: Stage) -> Steps:
            with stage.aside():
                out.detach().copy_(x.detach())
            yield []
            torch.autograd.graph.increment_version(out)

        return self._run("copy", work, [out, x], async_op)

    def signal(self, to: int, *, async_op: bool = False) -> Handle:
        """Lets one `wait(this rank)` of rank `to` return, for which it may wait itself."""
        to = self._checks.peer(to, other=True, operation="signal")

        def work(_: Stage) -> Steps:
            yield [partial(self._transport.signal, to)]

        return self._run("signal", work, (), async_op)

    def wait(self, source: int, *, async_op: bool = False) -> Handle:
        """Waits for a `signal` of rank `source`; each `signal` lets one `wait` return."""
        source = self._checks.peer(source, other=True, operation="wait")

        def work(_: Stage) -> Steps:
            yield [partial(self._transport.wait, source)]

        return self._run("wait", work, (), async_op)

    @contextmanager
    def together(self, *, async_op: bool = False, after: Handle = DONE) -> Iterator[Handle]:
        """The operations called inside start together when the block ends: messages first, all at
        once, so that all ranks may send before they receive. The result is unspecified if one of
        them uses what another one writes.

        Yields the handle of all of them; those that they return are the same. `async_op` and
        `after` are given here and not to the operations. Tensors of all are on one device. What
        has no tensor (barrier, signal, wait, scalars) is refused. If the block raises, nothing is
        started.
        """
        with self._run.together(async_op, after) as handle:
            yield handle

    def barrier(self, *, async_op: bool = False) -> Handle:
        """Returns when every rank has called it."""

        def work(_: Stage) -> Steps:
            yield [self._transport.barrier]

        return self._run("barrier", work, (), async_op)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros on the CPU in memory that all ranks of a machine share, from which the group's
        operations are read without a copy; without such memory, ordinary ones.

        The memory is not used again after the tensor is freed: allocate few, large ones, once.
        """
        lengths = [whole_number("a length of the shape", length) for length in shape]
        return self._transport.allocate(prod(lengths), dtype).view(lengths)

    @property
    def narrow_bytes(self) -> int:
        """Bytes that are kept for copies of tensors that are sent as a narrower dtype."""
        return sum(scratch.nbytes for scratch in self._run.scratch.values())

    @property
    def staging_bytes(self) -> int:
        """Bytes that are kept for what programs of chosen algorithms receive to add it."""
        staging: int = getattr(self._transport, "staging", 0)
        return staging

    def compare_calls(self) -> None:
        """Compares the calls of all ranks so far, where the transport has not done so at each call.
        All ranks call together. Raises Disagreement.
        """
        self._run.settle()
        self._transport.compare()

    def check(self) -> None:
        """Raises PeerLost if a rank was found to be lost while the host waited for its GPU."""
        self._transport.check()

    def abort(self, why: str = "") -> None:
        """Ends the waits of all ranks, and of this rank's progress thread, with an error. For a
        rank that cannot continue; `why` is told to others.
        """
        self._transport.abort(why)

    def close(self) -> None:
        """Ends the progress thread after it has finished all started operations."""
        self._run.close()
        if self._owns:
            self._transport.close()


def spell(x: Tensor) -> str:
    """A tensor's dtype and shape, as errors name it.

    >>> spell(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
