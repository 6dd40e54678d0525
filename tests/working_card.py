"""A device `card` that is not the CPU and computes with real numbers, for processes of their own.

A tensor of the card wraps one of the CPU. Every operation is done by the CPU's kernel, so results
are right to the bit; what a GPU forbids is refused:

    tensors of the card and of the CPU in one operation (scalars may be mixed)
    .numpy() and memory of the card under a tensor of the CPU, without a copy

Streams and events of torch.cuda are played by ones on which everything is done at once, and pinned
memory by ordinary memory. torch keeps the device for the life of the process: `install` belongs
into a worker. Needs a private function of torch; without it, `there` is False.
"""

from contextlib import nullcontext
from mmap import PAGESIZE
from time import perf_counter

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

SETUP = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
there = SETUP is not None
COPY, COPY_TO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class OnCard(torch.Tensor):
    """A tensor of the card; `raw` is the tensor of the CPU that has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("card", 0),
        )

    def __init__(self, raw):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return perform(function, args, kwargs or {})

    def data_ptr(self):
        return self.raw.data_ptr()

    def untyped_storage(self):
        return self.raw.untyped_storage()


def perform(function, args, kwargs):
    """Does an operation by the CPU's kernel. Raises RuntimeError where a GPU could not do it."""
    if function is COPY_TO:  # between devices
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    out = None
    if function is not COPY:
        _refuse_mixture(function, tree_leaves((args, kwargs)))
    out = function(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if function is COPY and torch.device(kwargs.get("device") or args[0].device).type == "cpu":
        return out
    mine = {id(x.raw): x for x in tree_leaves((args, kwargs)) if isinstance(x, OnCard)}
    return tree_map(lambda x: _wrapped(x, mine), out)


def _raw(x):
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.raw if isinstance(x, OnCard) else x


def _wrapped(x, mine):
    """What an operation returns; where it is one of its inputs, that input itself."""
    if not isinstance(x, torch.Tensor):
        return x
    return mine[id(x)] if id(x) in mine else OnCard(x)


def _refuse_mixture(function, leaves):
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, OnCard) and x.ndim:
            raise RuntimeError(f"{function}: Expected all tensors to be on the same device, card:0")


class AtOnce:
    """A stream or an event: everything has been done when the call returns."""

    def __init__(self, *_, **__):
        self.at = perf_counter()

    def wait_event(self, event):
        assert event is not None

    def wait_stream(self, stream):
        assert stream is not None

    def record(self, stream=None):
        self.at = perf_counter()

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


class Driver:
    """Locks whole pages, which no two tensors share."""

    def cudaHostRegister(self, address, size, _):  # noqa: N802
        shared = any(address < end and start < address + size for start, end in LOCKED.items())
        if address % PAGESIZE or shared:
            return 1
        LOCKED[address] = address + -(-size // PAGESIZE) * PAGESIZE
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        return 0 if LOCKED.pop(address, None) else 1


def install():
    """Makes the device known to this process; returns it. May be called again."""
    if not getattr(torch, "card", None):
        SETUP("card")
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda function, *args, **kwargs: perform(function, args, kwargs), CARD)
        KEPT.append(library)
        torch.cuda.Stream = torch.cuda.Event = AtOnce
        torch.cuda.current_stream = torch.cuda.default_stream = AtOnce
        torch.cuda.stream = nullcontext
        torch.Tensor.pin_memory = lambda x: x
        torch.cuda.cudart = Driver
        torch.empty = _unpinned(torch.empty)
    return torch.device("card", 0)


CARD = "PrivateUse1"
LOCKED = {}  # addresses, and where they end
KEPT = []  # a library that is collected takes its operations along


def _unpinned(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made
