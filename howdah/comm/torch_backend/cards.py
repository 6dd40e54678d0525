"""Tensors of GPUs in the torch backend: a process group of NCCL beside howdah's own transports.

It is made when the first such tensor comes, so programs of the CPU never load NCCL. Its results,
errors and time-outs are those of NCCL. This was never run with two GPUs (decision 27).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.torch_backend.work import Work

OLD = {  # names of methods before torch 2.13
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
Call = Callable[..., Work]


class Cards:
    """The wire of GPUs.

    options  of torch, which names store, ranks and time-out
    made     the process group of NCCL; None: no tensor of a GPU has come
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self.made: Any = None

    def of(self, tensors: Sequence[Tensor]) -> Call | None:
        """What calls NCCL for these tensors; None: they are on the CPU. Raises UserError."""
        kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
        if kinds <= {"cpu", "meta"}:
            return None
        if kinds != {"cuda"}:
            raise UserError(
                f"tensors of {' and '.join(sorted(kinds))} are in one call: howdah takes those of "
                "the CPU, or of CUDA"
            )
        if self.made is None:
            self.made = self._make()
        return self.call

    def call(self, name: str, *arguments: Any) -> Work:
        """Calls a method of NCCL's process group, by the name that it has."""
        method = getattr(self.made, name, None) or getattr(self.made, OLD.get(name, name))
        given = arguments[:-1] if arguments[-1] is None else arguments
        work: Work = method(*given)
        return work

    def _make(self) -> Any:
        if not dist.is_nccl_available():
            raise UserError("tensors of GPUs need NCCL, which this torch was built without")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._options.timeout
        store = dist.PrefixStore("cards", self._options.store)
        place = self._options.group_rank, self._options.group_size
        return dist.ProcessGroupNCCL(store, *place, options)

    def abort(self) -> None:
        """Ends all waits."""
        if self.made is not None:
            self.made.abort()

    def close(self) -> None:
        """Ends it."""
        if self.made is not None:
            self.made.shutdown()
