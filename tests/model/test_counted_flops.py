"""The operator list of `shapes/products.py` against what torch counts of the real model."""

from dataclasses import replace

import pytest
import torch
from random_model import GPT2, LLAMA, QWEN3, random_model, random_tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from howdah.model.loss import cross_entropy_sum
from howdah.shapes.dims import Tokens, local
from howdah.shapes.products import flops, operators, train_flops
from howdah.shapes.weights import parts

SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    # without its norms of queries and keys: their backward pass has a product of its own, in
    # which torch counts 2 operations for each number that is normed
    "qwen3": replace(QWEN3, qk_norm=False),
    "relu": replace(LLAMA, feedforward="relu", kv_heads=4, tie_embeddings=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_torch_counts_the_same_products(shape):
    """Attention in plain matrices, which torch counts for all pairs, masked or not.

    In bfloat16, where the head's gradient adds up in another format than it multiplies: the
    counter does not know the product that adds in place.
    """
    model = random_model(shape, dtype=torch.bfloat16)
    tokens, positions = random_tokens(shape, 3, 8)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = cross_entropy_sum(model(tokens, positions), model.head_weight, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    of = local(shape, Tokens(3, 8))
    listed = [operator for part in parts(shape) for operator in operators(shape, part)]
    assert forward.get_total_flops() == sum(flops(one, of, causal=False) for one in listed)
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    together = forward.get_total_flops() + backward.get_total_flops()
    assert together == 3 * 8 * train_flops(shape, 8, causal=False)
