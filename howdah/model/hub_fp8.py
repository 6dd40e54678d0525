"""Weights of Hugging Face folders in 8 bits, as DeepSeek-V3 is given out.

    config.json   quantization_config: quant_method fp8, weight_block_size [m, n]
    X.weight              F8_E4M3 [rows, columns]
    X.weight_scale_inv    F32 [⌈rows/m⌉, ⌈columns/n⌉]: a number for each block of m·n

A weight is its block's number times what is stored (DeepSeek-V3's `inference/kernel.py`,
weight_dequant; https://arxiv.org/abs/2412.19437, section 3.3). Blocks at the ends may be short.
Some folders round the numbers to powers of two, stored as exponents (F8_E8M0). What is not in 8
bits (embeddings, norms, routers) has no such number.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from howdah.base.errors import UserError, shown

SCALES = "_scale_inv"  # behind the name of a weight
EIGHT_BITS = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F8_E8M0")

Block = tuple[int, int]


def block_of(config: Mapping[str, Any]) -> Block | None:
    """The sizes of a block; None where nothing is quantised. Raises UserError for other ways."""
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    block = given.get("weight_block_size") if isinstance(given, dict) else None
    sizes = isinstance(block, list) and [n for n in block if type(n) is int and n > 0]
    if method != "fp8" or not sizes or len(sizes) != 2:
        raise UserError(
            f"config.json has a quantization_config of {shown(method)} with weight_block_size "
            f"{shown(block)}, and howdah reads fp8 with two sizes of a block alone: use the "
            "model's unquantised weights"
        )
    return sizes[0], sizes[1]


def grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """How many blocks a matrix has each way."""
    return tuple(-(-size // part) for size, part in zip(shape, block, strict=True))


def widened(stored: Tensor, scales: Tensor, block: Block) -> Tensor:
    """The matrix [rows, columns] in float32, of what is stored and of its blocks' numbers
    [⌈rows/m⌉, ⌈columns/n⌉].
    """
    rows, columns = stored.shape
    across = scales.to(torch.float32).repeat_interleave(block[1], 1)[:, :columns]
    out = stored.to(torch.float32)
    for number, line in enumerate(across):  # no second matrix beside it
        out[number * block[0] : min((number + 1) * block[0], rows)] *= line
    return out
