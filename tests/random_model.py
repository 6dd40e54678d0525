"""Small models with random weights, and batches for them."""

import torch

from howdah.model.transformer import Transformer
from howdah.shapes.shape import Latent, ModelShape, RopeScaling
from howdah.shapes.weights import weights

LLAMA = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_size=24, vocab=40, context=32)
GPT2 = ModelShape(
    layers=2,
    width=16,
    heads=4,
    ffn_size=64,
    vocab=40,
    context=32,
    feedforward="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
    tie_embeddings=True,
)
QWEN3 = ModelShape(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_size=6,
    ffn_size=24,
    vocab=40,
    context=32,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)
LATENT = ModelShape(
    layers=2,
    width=16,
    heads=4,
    ffn_size=24,
    vocab=40,
    context=32,
    norm_eps=1e-6,
    latent=Latent(kv_rank=8, query_rank=12, qk_nope_size=4, qk_rope_size=4, v_size=4),
)
BLOOM = ModelShape(
    layers=2,
    width=18,
    heads=3,
    ffn_size=72,
    vocab=40,
    context=32,
    feedforward="gelu",
    norm="layernorm",
    positions="alibi",
    bias=True,
    tie_embeddings=True,
    embedding_norm=True,
)
BERT = ModelShape(
    layers=2,
    width=16,
    heads=4,
    ffn_size=24,
    vocab=40,
    context=32,
    feedforward="gelu_exact",
    norm="layernorm",
    norm_at="after",
    norm_eps=1e-12,
    positions="learned",
    bias=True,
    tie_embeddings=True,
    family="encoder",
    embedding_norm=True,
    token_types=3,
    transform=True,
)
STRETCHED = RopeScaling(factor=4.0, low=1.0, high=4.0, context=28)


def random_weights(shape, *, seed=0, dtype=torch.float64):
    """Our names → tensors. Every weight is random, so that none can be left out unnoticed."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for weight in weights(shape):
        noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
        found[weight.name] = (weight.mean + 0.2 * noise).to(dtype)
    return found


def model_of(shape, tensors, *, dropout=0.0):
    """The model with these weights."""
    with torch.device("meta"):
        model = Transformer(shape, dropout=dropout)
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    return model


def random_model(shape, *, seed=0, dtype=torch.float64, dropout=0.0):
    """A model with random weights."""
    return model_of(shape, random_weights(shape, seed=seed, dtype=dtype), dropout=dropout)


def random_tokens(shape, rows, length, *, seed=1):
    """Tokens [rows, length] and their positions, each row one document."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (rows, length), generator=draw)
    return tokens, torch.arange(length).expand(rows, length)


def pack(lengths):
    """Positions and document numbers [1, s] of documents of these lengths in one row."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    return positions, documents
