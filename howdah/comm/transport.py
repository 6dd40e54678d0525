"""Transports: how bytes get from one rank to another.

A transport does one thing, `exchange`: it sends some tensors to peers and receives others, and
returns when all have arrived. Collectives are built on it in `group.py`. `Alone` is the
transport of one process. `TorchTransport` is the point-to-point half of a torch process group;
gloo's own reduce-scatter is a whole all-reduce, so it is not used.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]  # a contiguous tensor, and the peer it goes to or comes from


class Transport(Protocol):
    """The ranks of one group and the wire between them."""

    rank: int
    size: int
    link: str

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> int:
        """Send and receive together; returns the bytes sent. Order per pair of ranks counts."""
        ...


class Alone:
    """A group of one: there is nobody to talk to."""

    rank, size, link = 0, 1, "none"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> int:
        """Nothing to send."""
        assert not sends and not receives, "a group of one has no peers"
        return 0


class TorchTransport:
    """Point-to-point messages of torch's gloo process group, over TCP.

    Tensors of an accelerator are staged through host memory.
    """

    link = "tcp"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> int:
        """Posts every message, then waits for all. Raises RuntimeError when a peer is gone."""
        staged = [(_landing(tensor), peer) for tensor, peer in receives]
        work = [self._group.recv([tensor], peer, 0) for tensor, peer in staged]
        outgoing = [(tensor.cpu(), peer) for tensor, peer in sends]
        work += [self._group.send([tensor], peer, 0) for tensor, peer in outgoing]
        for one in work:
            one.wait()
        for (tensor, _), (landed, _) in zip(receives, staged, strict=True):
            if tensor is not landed:
                tensor.copy_(landed)
        return sum(tensor.nbytes for tensor, _ in sends)


def _landing(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")


def torch_transport(
    store: dist.Store, *, rank: int, size: int, seconds: float = 600
) -> TorchTransport:
    """Connects `size` ranks that share a store. A silent peer is given up after `seconds`."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
    return TorchTransport(gloo)
