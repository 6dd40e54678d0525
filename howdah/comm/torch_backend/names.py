"""What torch asks a process group about itself: its name, ranks, devices and what it cannot do.

A process group in Python has no backend object, which torch asks for some of this: it is its own.
Without the names, functional collectives, DTensor and FSDP2 refuse the group.
"""

from typing import Any

import torch
import torch.distributed as dist

NAME = "howdah"
Base: Any = dist.ProcessGroup  # torch's stubs describe what C++ has, and not what it calls


class Named(Base):  # type: ignore[misc]
    """A process group that says what it is."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, options: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = options.store
        self._place, self._count, self._numbers = rank, size, 0
        self._said_name, self._said_description = str(options.group_id), "undefined"

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._count

    def get_group_store(self) -> dist.Store:
        """The store through which its ranks have met."""
        store: dist.Store = self._store
        return store

    getRank, getSize = rank, size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        """howdah."""
        return NAME

    name = _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._said_name = name

    setGroupName = _set_group_name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch gave it."""
        return self._said_name

    def _set_group_desc(self, description: str) -> None:
        self._said_description = description

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._said_name

    @property
    def group_desc(self) -> str:
        """What torch says it is for."""
        return self._said_description

    @property
    def _device_types(self) -> list[torch.device]:
        """The CPU: objects are sent from there, also beside GPUs."""
        return [torch.device("cpu")]

    def _get_backend(self, device: object) -> "Named":
        return self

    def supports_tensor_alloc(self, device: object) -> bool:
        """No: `fsdp2.py` has memory that ranks share."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._numbers = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._numbers
