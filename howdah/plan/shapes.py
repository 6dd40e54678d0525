"""The sizes of a model, and what follows from them by arithmetic: parameters, flops.

A `ModelShape` describes a decoder-only Transformer without building it. `sharding.py` lists
its tensors one by one; this file counts them by formula, and a test holds the two, the real
model and the published totals equal.

Letters: h width, a heads, k key-value heads, d head size, f feed-forward width, V vocabulary,
L layers, s sequence.
"""

from dataclasses import dataclass, replace
from typing import Literal

from howdah.plan.problems import BadInput

FeedForward = Literal["swiglu", "gelu", "relu"]
Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of rotary wavelengths (https://arxiv.org/abs/2407.21783).

    Wavelengths longer than context/low are stretched by `factor`, shorter than context/high
    are kept, and those between are blended.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only Transformer, in the words of the papers.

    layers          blocks
    width           size of the residual stream (h)
    heads           query heads (a)
    kv_heads        key-value heads (k); None means as many as heads, multi-head attention
    head_size       d; None means width / heads
    ffn             inner width of the feed-forward (f)
    vocab           rows of the embedding (V)
    context         the longest sequence; also the number of learned positions
    feedforward     swiglu (gated, 3 matrices), gelu (tanh form) or relu (2 matrices)
    norm            rmsnorm or layernorm
    norm_at         before each sub-layer (and once at the end), or after each
    epsilon         added to the variance
    positions       rotary or learned
    rotary_base     θ of the rotary wavelengths
    bias            biases of the linear layers
    tied            the head is the embedding
    query_key_norm  an RMSNorm over each head of query and key (Qwen 3)
    """

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int
    context: int
    kv_heads: int | None = None
    head_size: int | None = None
    feedforward: FeedForward = "swiglu"
    norm: Norm = "rmsnorm"
    norm_at: Literal["before", "after"] = "before"
    epsilon: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    bias: bool = False
    tied: bool = False
    query_key_norm: bool = False

    @property
    def k(self) -> int:
        """Key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d(self) -> int:
        """Size of a head."""
        return self.width // self.heads if self.head_size is None else self.head_size


def stated(shape: ModelShape) -> ModelShape:
    """The shape with what it leaves to follow said out loud: equal models are equal shapes."""
    return replace(shape, kv_heads=shape.k, head_size=shape.d)


def check_shape(shape: ModelShape) -> list[str]:
    """Everything that is wrong with the sizes, as sentences."""
    problems = [
        f"model.{name} is {size}; it must be at least 1"
        for name in ("layers", "width", "heads", "ffn", "vocab", "context", "kv_heads", "head_size")
        if (size := getattr(shape, name)) is not None and size < 1
    ]
    if problems:
        return problems
    if shape.head_size is None and shape.width % shape.heads:
        fits = _nearest_divisor(shape.width, shape.heads)
        problems.append(
            f"model.width {shape.width} does not divide into {shape.heads} heads; "
            f"use {fits} heads, or give model.head_size"
        )
    if shape.heads % shape.k:
        fits = _nearest_divisor(shape.heads, shape.k)
        problems.append(f"model.kv_heads {shape.k} does not divide {shape.heads} heads; use {fits}")
    if shape.positions == "rotary" and shape.d % 2:
        problems.append(
            f"rotary positions turn pairs, but a head has {shape.d} numbers; make it even"
        )
    return problems


def require_shape(shape: ModelShape) -> None:
    """Raises BadInput with the first sentence of `check_shape`, if there is one."""
    for problem in check_shape(shape):
        raise BadInput(problem)


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - wanted))


# -- parameters ----------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Parameters by component. `layer` is one block's; `total` counts a tied head once."""

    embedding: int
    positions: int
    attention: int
    feedforward: int
    norms: int
    layer: int
    final_norm: int
    head: int
    total: int


def parameters(shape: ModelShape) -> Parameters:
    """The exact number of parameters, by formula.

    Attention h(a + 2k)d + adh, feed-forward 2hf or gated 3hf, norms h (RMS) or 2h each;
    biases where the model has them; embedding Vh, and Vh again for a head of its own.
    """
    h, a, k, d, f = shape.width, shape.heads, shape.k, shape.d, shape.ffn
    norm = h if shape.norm == "rmsnorm" else 2 * h
    gated = shape.feedforward == "swiglu"
    attention = h * (a + 2 * k) * d + a * d * h
    feedforward = (3 if gated else 2) * h * f
    if shape.bias:
        attention += (a + 2 * k) * d + h
        feedforward += (2 if gated else 1) * f + h
    if shape.query_key_norm:
        attention += 2 * d
    layer = attention + feedforward + 2 * norm
    embedding = shape.vocab * h
    positions = shape.context * h if shape.positions == "learned" else 0
    final_norm = norm if shape.norm_at == "before" else 0
    head = 0 if shape.tied else embedding
    return Parameters(
        embedding=embedding,
        positions=positions,
        attention=attention,
        feedforward=feedforward,
        norms=2 * norm,
        layer=layer,
        final_norm=final_norm,
        head=head,
        total=embedding + positions + shape.layers * layer + final_norm + head,
    )


# -- flops ---------------------------------------------------------------------


def forward_flops(shape: ModelShape, sequence: int, *, causal: bool) -> float:
    """Floating-point operations of one forward pass, per token of a sequence of `sequence`.

    Two for each weight of a matrix product, plus attention scores and values 4·s·a·d a layer,
    of which causal attention needs half. The head is counted, embeddings and norms are not.
    """
    h, a, k, d, f = shape.width, shape.heads, shape.k, shape.d, shape.ffn
    matrices = h * (a + 2 * k) * d + a * d * h
    matrices += (3 if shape.feedforward == "swiglu" else 2) * h * f
    scores = 4 * sequence * a * d * (0.5 if causal else 1.0)
    return shape.layers * (2 * matrices + scores) + 2 * shape.vocab * h


def train_flops(shape: ModelShape, sequence: int, *, causal: bool) -> float:
    """Forward and backward, per token: the backward pass costs twice the forward."""
    return 3 * forward_flops(shape, sequence, causal=causal)
