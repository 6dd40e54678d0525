"""The reductions of torch.distributed, by those of a transport and for dtypes that it cannot add.

sum, mean, min, max, product     as they are
premultiplied sum                each rank's term is multiplied, then the sum
bool                             or is the maximum, and is the minimum, of bytes
uint16, uint32, float8           as a wider dtype, rounded once at the end
complex                          sums of the real and the imaginary parts
bits of integers, and the rest   every rank hears all terms and combines them, in rank order
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.reduction import REDUCIBLE, check_reduction
from howdah.comm.staging import DIRECT
from howdah.comm.transport import Transport

NAMES = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
NAMES |= {"BAND": "band", "BOR": "bor", "BXOR": "bxor", "PREMUL_SUM": "premul"}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.bool: torch.uint8}
WIDER |= dict.fromkeys(FLOAT8, torch.float32)
OF_BOOL = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min"}
FOLDS: dict[str, Callable[..., Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
NO_ROWS = (0, 0)


class Reduction(NamedTuple):
    """How terms are combined.

    factor  by which they are multiplied before; None: they are not
    """

    name: str
    factor: Any = None


class _Way(NamedTuple):
    """What is done with terms of one dtype: which dtype is sent, and combined by what.

    fold  by this rank, of all terms; None: by the transport
    """

    sent: torch.dtype
    op: str
    fold: Callable[..., Tensor] | None = None


def reduction_of(op: Any) -> Reduction:
    """The Reduction of a ReduceOp, or of the options that hold one."""
    op = getattr(op, "reduceOp", op)
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
    kind, factor = state
    name = NAMES.get(kind.name)
    if name is None:
        raise UserError(f"howdah has no reduction {kind.name}: take one of {', '.join(NAMES)}")
    return Reduction("sum", factor) if name == "premul" else Reduction(name)


@cache
def _way(dtype: torch.dtype, name: str) -> _Way:
    """How terms of `dtype` are combined by `name`. Raises UserError."""
    if name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(f"the mean of {dtype} is not of that dtype: reduce the sum, or cast it")
    if dtype == torch.bool and name in OF_BOOL:
        return _Way(torch.uint8, OF_BOOL[name])
    if name in ("band", "bor", "bxor"):
        if dtype.is_floating_point or dtype.is_complex:
            raise UserError(f"{name.upper()} combines the bits of integers, not of {dtype}")
        return _Way(dtype, name, FOLDS[name])
    if dtype.is_complex:
        if name in ("sum", "mean"):
            return _Way(dtype.to_real(), name)
        raise UserError(f"{name} of complex numbers is not reduced: torch refuses it too")
    if dtype in WIDER:
        check_reduction(WIDER[dtype], name)
        return _Way(WIDER[dtype], name)
    check_reduction(dtype, name)
    return _Way(dtype, name)


def all_reduce(wire: Transport, x: Tensor, how: Reduction) -> None:
    """Replaces x by the reduction, on all ranks."""
    way = _way(x.dtype, how.name)
    terms = _terms(x, how, way)
    if way.fold is None:
        wire.all_reduce(terms, way.op)
    else:
        terms = _fold(_heard(wire, terms), x.dtype, way.fold, wire.size)
    _put(x, terms)


def reduce(wire: Transport, x: Tensor, root: int, how: Reduction) -> None:
    """Replaces the root's x by the reduction."""
    way = _way(x.dtype, how.name)
    terms = _terms(x, how, way)
    if way.fold is None:
        wire.reduce(terms, root, way.op)
    else:
        terms = _fold(_heard(wire, terms), x.dtype, way.fold, wire.size)
    if wire.rank == root:
        _put(x, terms)


def reduce_scatter(
    wire: Transport, out: Tensor, x: Tensor, counts: Sequence[int], how: Reduction
) -> None:
    """Writes this rank's share of the reduction of x to out.

    x       one whole tensor
    counts  its numbers of elements for each rank
    """
    way = _way(x.dtype, how.name)
    terms = _terms(x, how, way)
    each = terms.numel() // x.numel() if x.numel() else 1  # a complex number is two, bytes more
    cut = [count * each for count in counts]
    if way.fold is not None:
        whole = _fold(_heard(wire, terms), x.dtype, way.fold, wire.size)
        _put(out, DIRECT.take(whole).split(cut)[wire.rank])
        return
    own = DIRECT.take(out, NO_ROWS) if out.dtype == terms.dtype else None
    if own is None:
        own = torch.empty(cut[wire.rank], dtype=terms.dtype)
    wire.reduce_scatter(own, terms, cut, way.op)
    _put(out, own)


def _terms(x: Tensor, how: Reduction, way: _Way) -> Tensor:
    """What this rank sends: flat; a view of x where it can be."""
    x = x.detach()
    if how.factor is not None:
        factor = how.factor
        x = x * (factor.to(x.dtype) if isinstance(factor, Tensor) else factor)
    if x.dtype.is_complex and way.sent != x.dtype:
        x = torch.view_as_real(x.resolve_conj().resolve_neg())
    elif way.sent != x.dtype:
        x = x.to(way.sent)
    return DIRECT.take(x)


def _put(x: Tensor, terms: Tensor) -> None:
    """Writes terms, or what they became, to x."""
    if terms.dtype == torch.uint8 and x.dtype not in REDUCIBLE and x.dtype != torch.bool:
        terms = terms.view(x.dtype)
    elif x.dtype.is_complex and terms.dtype == x.dtype.to_real():
        terms = torch.view_as_complex(terms.view(-1, 2))
    DIRECT.give(x, terms) if terms.dtype == x.dtype else x.detach().copy_(terms.view(x.shape))


def _heard(wire: Transport, terms: Tensor) -> Tensor:
    """The terms of all ranks."""
    heard = torch.empty(wire.size * terms.numel(), dtype=terms.dtype)
    wire.all_gather(heard, terms, [terms.numel()] * wire.size)
    return heard


def _fold(heard: Tensor, dtype: torch.dtype, fold: Callable[..., Tensor], size: int) -> Tensor:
    total, *rest = heard.view(dtype).view(size, -1)
    for term in rest:
        total = fold(total, term)
    return total
