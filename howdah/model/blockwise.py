"""Tensors in 8 bits with a scale for each block of them (`method.gather_dtype = "int8"`), or in 4
(`method.gradient_dtype = "int4"`), where 7 is in place of 127.

    scale of a block   largest |x| / 127, in float32
    number             x / scale, rounded to the nearest integer, ties to even
    what it stands for number · scale

So a weight is off by half a scale at most, and what a block is rounded to depends on nothing but
the block (Wang et al. 2023, https://arxiv.org/abs/2306.10209, section 3.1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.model.islands import promoted
from howdah.plan.quantised import BLOCK, message_bytes

TOP = {8: 127, 4: 7}  # the largest number by bits; -128 and -8 are not used
ZERO = 8  # what stands for 0 in 4 bits
SMALLEST = torch.finfo(torch.float32).tiny  # what is divided by in a block of zeros


def quantise(x: Tensor, out: Tensor, bits: int = 8) -> None:
    """Writes x [n], n a multiple of BLOCK, to the bytes `out` [message_bytes(n, bits)]: numbers,
    then scales. A block with something that is not finite comes back as such.
    """
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


def rounded(x: Tensor) -> Tensor:
    """What x, a weight of any shape, comes back as."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % BLOCK))
    message = torch.empty(message_bytes(len(flat)), dtype=torch.uint8, device=x.device)
    quantise(flat, message)
    restore(message, flat, shares=1)
    return flat[: x.numel()].view(x.shape)
