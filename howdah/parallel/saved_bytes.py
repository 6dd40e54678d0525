"""Measures activations: the memory that autograd holds between forward and backward.

A tensor that an operation saves is often a view, and two operations often save the same one. So
unique *storages* are counted, each with all of its bytes. Parameters are not activations.

    with SavedTensorMeter(model.parameters()) as kept:
        loss = ...
    kept.count(loss)
    loss.backward()

There are two ways to find what is held. Operations that declare what they save pass it through a
hook. A custom function may also keep a tensor on its context, as the head does with the
exponentials of its last chunk; such tensors are found in the graph, which is walked from the loss.
`shapes/activations.py` predicts the same number.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node, saved_tensors_hooks


class SavedTensorMeter:
    """Counts what a forward pass saves inside the `with` block; results are not changed.

    besides  tensors that are not counted, with everything that shares memory with them
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        self._besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        # the storages themselves, so that none is freed and its address used by another
        self._seen: dict[int, UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> "SavedTensorMeter":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def count(self, *outs: Tensor) -> int:
        """Bytes held for the backward pass of `outs`, which must not have started yet. Call it
        once.

        It releases the storages, so that the measurement keeps no memory that backward frees.
        """
        for node in _nodes(out.grad_fn for out in outs):
            for value in getattr(node, "__dict__", {}).values():
                for each in value if isinstance(value, tuple) else (value,):
                    if isinstance(each, Tensor):
                        self._add(each)
        total = sum(storage.nbytes() for storage in self._seen.values())
        self._seen = {}
        return total

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._besides:
            self._seen[storage.data_ptr()] = storage


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _nodes(roots: Iterable[Node | None]) -> Iterable[Any]:
    """Yields every node of the graph behind `roots` once."""
    waiting, met = [*roots], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            yield node
            waiting.extend(after for after, _ in node.next_functions)
