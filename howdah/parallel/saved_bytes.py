"""Measuring activations: the memory that autograd holds between forward and backward.

A tensor that an operation saves is often a view, and two operations often save the same one, so
what is counted is unique *storages*, each with all of its bytes. Parameters are no activations.

    with SavedTensorMeter(model.parameters()) as kept:
        loss = ...
    kept.count(loss)
    loss.backward()

Two ways lead to what is held. Operations that say what they save pass it through a hook. A
custom function may also put a tensor on its context, as the head does with the exponentials of
its last chunk; those are found by walking the graph from the loss. `shapes/activations.py`
predicts the same number.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node, saved_tensors_hooks


class SavedTensorMeter:
    """Counts what a forward pass saves, while it is entered; results are not changed.

    besides  tensors that do not count, nor anything that shares memory with them
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        self._besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        # the storages themselves, so that none is freed and its address given to another
        self._seen: dict[int, UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> "SavedTensorMeter":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def count(self, loss: Tensor) -> int:
        """Bytes held for the backward pass of `loss`, which has not begun yet. Call it once.

        It lets go of the storages, so that measuring holds no memory that backward frees.
        """
        for node in _nodes(loss.grad_fn):
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


def _nodes(root: Node | None) -> Iterable[Any]:
    """Every node of the graph behind `root`, once."""
    waiting, met = [root], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            yield node
            waiting.extend(after for after, _ in node.next_functions)
