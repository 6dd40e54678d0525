"""The transport of ranks that have a GPU each: two wires, chosen by where a tensor is.

tensors of the GPU     cards: NCCL, on a lane (`native.py`)
everything else        host: the engine, or messages over TCP; also scalars, barriers, and the
                       comparison of ledgers, which must not wait for a GPU
"""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.lane import Lane
from howdah.comm.ledger import Entry, check_equal
from howdah.comm.native import Native
from howdah.comm.transport import Counts, SubgroupFactory, Transport, gave_up
from howdah.comm.watcher import Watcher

TEXT = 400  # bytes of the last call, as ranks exchange it


class Both:
    """A transport over a wire for GPUs, `cards`, and one for the host.

    watcher  watches for all wires of this process; closed with this transport
    checked  compare the calls of all ranks before each of them; for `verify`, since it is slow
    """

    among: SubgroupFactory

    def __init__(
        self,
        host: Transport,
        cards: Native,
        *,
        watcher: Watcher | None = None,
        checked: bool = False,
    ) -> None:
        self.host, self.cards, self.watcher, self.checked = host, cards, watcher, checked
        if checked:
            cards.agree = self.compare
        self.rank, self.size, self.link = host.rank, host.size, host.link

    @property
    def site(self) -> str:
        """The line to name in errors of the host's wire."""
        return self.host.site

    @site.setter
    def site(self, line: str) -> None:
        self.host.site = line

    def lane_of(self, x: Tensor) -> Lane | None:
        """The lane of the GPUs' wire, for its tensors."""
        return self.cards.lane_of(x)

    def wire_of(self, x: Tensor) -> Transport:
        """The wire that carries x."""
        return self.cards if x.device == self.cards.device else self.host

    def compare(self) -> None:
        """Compares the calls that all ranks have made on the GPUs' wire so far. All call together.

        Raises Disagreement.
        """
        mine = self.cards.ledger.entry
        text = mine.last.encode()[-TEXT:].ljust(TEXT)
        words = torch.tensor([mine.calls, mine.checksum], dtype=torch.int64).view(torch.uint8)
        own = torch.cat([words, torch.frombuffer(bytearray(text), dtype=torch.uint8)])
        heard = torch.empty(self.size * len(own), dtype=torch.uint8)
        self.host.all_gather(heard, own, [len(own)] * self.size)
        check_equal([_read(one) for one in heard.view(self.size, -1)])

    # -- operations: by the wire of their tensors

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        return self.wire_of(x).all_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        return self.wire_of(x).reduce_scatter(out, x, counts, op)

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        return self.wire_of(x).all_gather(out, x, counts)

    def broadcast(self, x: Tensor, root: int) -> int:
        return self.wire_of(x).broadcast(x, root)

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        return self.wire_of(x).reduce(x, root, op)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        return self.wire_of(x).gather(out, x, root, counts)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        return self.wire_of(out).scatter(out, x, root, counts)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        return self.wire_of(x).all_to_all(out, x, sent, received)

    def send(self, x: Tensor, to: int) -> int:
        return self.wire_of(x).send(x, to)

    def receive(self, x: Tensor, source: int) -> None:
        self.wire_of(x).receive(x, source)

    def barrier(self) -> None:
        self.host.barrier()

    def signal(self, to: int) -> None:
        self.host.signal(to)

    def wait(self, source: int) -> None:
        self.host.wait(source)

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.host.allocate(count, dtype)

    def group(self) -> AbstractContextManager[None]:
        raise UserError("two wires: start operations together on the one that `wire_of` names")

    # -- its end

    def check(self) -> None:
        self.cards.check()

    def abort(self, why: str = "") -> None:
        if self.watcher is not None:  # which tells the other ranks, whose GPUs may wait
            self.watcher.lose(gave_up(self.rank, why))
        self.cards.abort(why)  # first: kernels that wait for other GPUs hold up everything
        self.host.abort(why)

    def close(self) -> None:
        self.cards.close()
        if self.watcher is not None:  # the last: until now another rank may be lost
            self.watcher.close()
        self.host.close()


def explain_losses_in(transport: Transport, folder: Path) -> None:
    """Lets a wire of GPUs write the calls of this rank to `folder` when another one is lost."""
    if isinstance(transport, Both) and transport.watcher is not None:
        transport.watcher.folder = folder


def _read(said: Tensor) -> Entry:
    calls, checksum = said[:16].clone().view(torch.int64).tolist()
    return Entry(calls, checksum, said[16:].numpy().tobytes().decode(errors="replace").strip())
