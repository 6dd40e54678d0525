"""Tensors in 8 bits with a scale for each block of them (`method.gather_dtype = "int8"`), or in 4
(`method.gradient_dtype = "int4"`), where 7 is in place of 127.

    scale of a block   largest |x| / 127, in float32
    number             x / scale, rounded to the nearest integer, ties to even
    what it stands for number · scale

So a weight is off by half a scale at most, and what a block is rounded to depends on nothing but
the block (Wang et al. 2023, https://arxiv.org/abs/2306.10209, section 3.1).

On a CPU the engine's library does it in one pass over memory where it is there
(`comm/engine_blocks.h`): the same bits as by torch's operations, of which each is a pass.
"""

from ctypes import CDLL, c_int, c_uint64, c_void_p
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.comm.engine_abi import library_if_there
from howdah.model.islands import promoted
from howdah.plan.quantised import BLOCK, message_bytes

TOP = {8: 127, 4: 7}  # the largest number by bits; -128 and -8 are not used
ZERO = 8  # what stands for 0 in 4 bits
SMALLEST = torch.finfo(torch.float32).tiny  # what is divided by in a block of zeros
IN_LIBRARY = (torch.float32, torch.bfloat16)


def quantise(x: Tensor, out: Tensor, bits: int = 8) -> None:
    """Writes x [n], n a multiple of BLOCK, to the bytes `out` [message_bytes(n, bits)]: numbers,
    then scales. A block with something that is not finite comes back as such.
    """
    if library := _library_for(x, out):
        half = x.dtype == torch.bfloat16
        library.howdah_blocks_quantise(x.data_ptr(), len(x) // BLOCK, bits, half, out.data_ptr())
        return
    blocks, top, length = x.to(promoted(x.dtype)).view(-1, BLOCK), TOP[bits], len(x) * bits // 8
    scales = (blocks.abs().amax(1) / top).to(torch.float32)
    numbers = (blocks / scales.clamp(min=SMALLEST)[:, None]).round_().clamp_(-top, top)
    if bits == 4:  # two in a byte
        pairs = (numbers.to(torch.int8) + ZERO).view(-1, 2).to(torch.uint8)
        out[:length].copy_(pairs[:, 0] | pairs[:, 1] << 4)
    else:
        out[:length].view(torch.int8).copy_(numbers.view(-1))
    out[length:].view(torch.float32).copy_(scales)


def restore(message: Tensor, out: Tensor, *, shares: int, bits: int = 8) -> None:
    """Writes what a message of so many shares of one length stands for to `out` [n]."""
    if library := _library_for(out, message):
        for share, part in zip(message.chunk(shares), out.chunk(shares), strict=True):
            _restore(library, share, part, bits, add=False)
        return
    rows, each = message.view(shares, -1), len(out) // shares * bits // 8
    numbers = rows[:, :each]
    if bits == 4:
        pairs = torch.stack([numbers & 15, numbers >> 4], -1)
        numbers = (pairs.view(torch.int8) - ZERO).view(shares, -1, BLOCK)
    else:
        numbers = numbers.view(torch.int8).unflatten(1, (-1, BLOCK))
    scales = rows[:, each:].view(torch.float32)
    whole = out.view(shares, -1, BLOCK)
    whole.copy_(numbers)  # exact in every dtype
    whole.mul_(scales[:, :, None])


def add(message: Tensor, total: Tensor, *, bits: int = 8) -> None:
    """Adds what a message stands for, in the dtype of `total` [n], to it."""
    if library := _library_for(total, message):
        _restore(library, message, total, bits, add=True)
        return
    term = torch.empty_like(total)
    restore(message, term, shares=1, bits=bits)
    total.add_(term)


def rounded(x: Tensor) -> Tensor:
    """What x, a weight of any shape, comes back as."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % BLOCK))
    message = torch.empty(message_bytes(len(flat)), dtype=torch.uint8, device=x.device)
    quantise(flat, message)
    restore(message, flat, shares=1)
    return flat[: x.numel()].view(x.shape)


def _restore(library: CDLL, message: Tensor, out: Tensor, bits: int, *, add: bool) -> None:
    half, blocks = out.dtype == torch.bfloat16, len(out) // BLOCK
    library.howdah_blocks_restore(message.data_ptr(), blocks, bits, half, add, out.data_ptr())


def _library_for(numbers: Tensor, message: Tensor) -> CDLL | None:
    """The library, if it knows such tensors."""
    known = numbers.device.type == "cpu" and numbers.dtype in IN_LIBRARY
    return _library() if known and numbers.is_contiguous() and message.is_contiguous() else None


@cache
def _library() -> CDLL | None:
    library = library_if_there()
    if library is None or not hasattr(library, "howdah_blocks_quantise"):  # an older one
        return None
    library.howdah_blocks_quantise.restype = library.howdah_blocks_restore.restype = None
    library.howdah_blocks_quantise.argtypes = (c_void_p, c_uint64, c_int, c_int, c_void_p)
    library.howdah_blocks_restore.argtypes = (c_void_p, c_uint64, *[c_int] * 3, c_void_p)
    return library
