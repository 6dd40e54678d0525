"""Floating-point operations, counted from a list of matrix products for each part of the model.

Publications count the same run differently, by up to a factor of two, so a number without its
convention says nothing. Four are given, all for forward and backward:

    by parameters   6·N·T, and nothing for attention       https://arxiv.org/abs/2001.08361
    model           every product, all s² pairs of tokens  https://arxiv.org/abs/2205.05198
                    GPT: 72·B·s·L·h²·(1 + s/6h + V/12Lh)
    causal model    the same, and half of the pairs where the mask drops the others
    hardware        the same again, and what recomputation does a second time

A product of m rows, inner size k and n columns takes 2·m·n·k operations forward, and twice that
backward: one product for the gradient of its input and one for its weight's. Attention's own
are 2·(d of keys + d of values) for each head and pair. Norms, activations and softmax are not
counted, nor what a flash kernel does twice inside its backward pass.

    layers.0   attention.q        token × width · width × query     a row for each token
               attention.k        token × width · width × key
               attention.v        token × width · width × key
               attention          pair, heads of d
               attention.o        token × query · query × width
               feedforward.gate   token × width · width × ffn
               …

A product has the name of its weight in `weights.py`; a test holds the two lists equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from howdah.shapes.activations import Recompute
from howdah.shapes.dims import OF_SOURCE, Dim, Local, Per, Tokens, local
from howdah.shapes.shape import ModelShape, parameters
from howdah.shapes.weights import parts


@dataclass(frozen=True)
class Product:
    """Rows of `inner` numbers times a weight [columns, inner].

    per     what there is a row for
    copies  rows for each of those: a token goes to several experts
    groups  weights that share the rows out: experts
    """

    name: str
    per: Per
    columns: Dim
    inner: Dim
    copies: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Pairs:
    """Attention between pairs of tokens: queries times keys, and the shares times values.

    key, value  numbers of a head's key and value
    causal      whether the mask drops half of the pairs
    """

    name: str
    per: Per
    heads: Dim
    key: int
    value: int
    causal: bool


Operator = Product | Pairs


def operators(shape: ModelShape, part: str) -> tuple[Operator, ...]:
    """The matrix products of a part's forward pass, in order; none where tokens are embedded."""
    stack, _, layer = part.partition(".")
    if stack == "head":
        return tuple(_head(shape))
    if not layer:
        return ()
    sparse = stack == "layers" and shape.sparse(int(layer))
    block = tuple(_block(shape, sparse=sparse))
    if stack == "layers":
        return block
    # an encoder in front of a decoder: no cross attention, no mask, and other tokens
    own = (operator for operator in block if not operator.name.startswith("cross"))
    return tuple(_of_source(operator) for operator in own)


def _of_source(operator: Operator) -> Operator:
    per = OF_SOURCE[operator.per]
    if isinstance(operator, Pairs):
        return replace(operator, per=per, causal=False)
    return replace(operator, per=per)


def _block(shape: ModelShape, *, sparse: bool) -> Iterator[Operator]:
    if shape.latent is None:
        causal = shape.family != "encoder"
        yield from _attention(shape, "attention", "token", "pair", causal=causal)
    else:
        yield from _latent(shape)
    if shape.family == "encoder-decoder":
        yield from _attention(shape, "cross", "source", "cross_pair", causal=False)
    if shape.experts is None or not sparse:
        yield from _feedforward(shape, "feedforward", Dim("ffn", shape.ffn))
        return
    choice, inner = Dim("choice", shape.experts.number), Dim("expert_ffn", shape.experts.ffn)
    yield Product("router", "token", choice, Dim("width", shape.width))
    if shape.experts.shared:
        yield from _feedforward(shape, "shared", Dim("ffn", shape.experts.shared))
    for product in _feedforward(shape, "experts", inner):
        yield replace(product, copies=shape.experts.chosen, groups=shape.experts.number)


def _attention(
    shape: ModelShape, name: str, keys: Per, pair: Per, *, causal: bool
) -> Iterator[Operator]:
    width, heads = Dim("width", shape.width), Dim("heads", shape.heads)
    query, key = Dim("query", shape.heads * shape.d), Dim("key", shape.k * shape.d)
    yield Product(f"{name}.q", "token", query, width)
    yield Product(f"{name}.k", keys, key, width)
    yield Product(f"{name}.v", keys, key, width)
    yield Pairs(name, pair, heads, shape.d, shape.d, causal)
    yield Product(f"{name}.o", "token", width, query)


def _latent(shape: ModelShape) -> Iterator[Operator]:
    """As it is trained, with keys and values unfolded (https://arxiv.org/abs/2405.04434, 2.1)."""
    latent, a, width = shape.latent, shape.heads, Dim("width", shape.width)
    assert latent is not None
    query, value = Dim("query", a * shape.d), Dim("query", a * latent.value)
    if latent.query_rank:
        yield Product("attention.q_down", "token", Dim("rank", latent.query_rank), width)
        yield Product("attention.q_up", "token", query, Dim("rank", latent.query_rank))
    else:
        yield Product("attention.q", "token", query, width)
    down, unfolded = latent.kv_rank + latent.rotary, a * (latent.plain + latent.value)
    yield Product("attention.kv_down", "token", Dim("rank", down), width)
    yield Product("attention.kv_up", "token", Dim("query", unfolded), Dim("rank", latent.kv_rank))
    yield Pairs("attention", "pair", Dim("heads", a), shape.d, latent.value, causal=True)
    yield Product("attention.o", "token", width, value)


def _feedforward(shape: ModelShape, name: str, inner: Dim) -> Iterator[Product]:
    width = Dim("width", shape.width)
    if shape.gated:
        yield Product(f"{name}.gate", "token", inner, width)
    yield Product(f"{name}.up", "token", inner, width)
    yield Product(f"{name}.down", "token", width, inner)


def _head(shape: ModelShape) -> Iterator[Product]:
    width = Dim("width", shape.width)
    if shape.transform:
        yield Product("transform", "token", width, width)
    yield Product("head", "token", Dim("vocab", shape.vocab), width)


# -- counting ------------------------------------------------------------------


def flops(operator: Operator, of: Local, *, causal: bool) -> int:
    """Operations of the forward pass on the rank `of`. `causal` leaves out masked pairs."""
    count = of.counts[operator.per]
    if isinstance(operator, Product):
        rows = count * operator.copies
        return 2 * rows * of.size(operator.columns) * of.size(operator.inner)
    half = count * of.size(operator.heads) * (operator.key + operator.value)
    return half if causal and operator.causal else 2 * half


def part_flops(shape: ModelShape, part: str, sequence: int, *, causal: bool = True) -> int:
    """Operations of a part's forward pass over one sequence.

    The source of an encoder-decoder is as long as its target.
    """
    of = _one(shape, sequence)
    return sum(flops(operator, of, causal=causal) for operator in operators(shape, part))


def forward_flops(shape: ModelShape, sequence: int, *, causal: bool) -> float:
    """Operations of the forward pass, per token of a sequence of `sequence`.

    In an encoder-decoder that is a token of the target, with the work for one of the source.
    """
    total = sum(part_flops(shape, part, sequence, causal=causal) for part in parts(shape))
    return total / sequence


def train_flops(
    shape: ModelShape, sequence: int, *, causal: bool, recompute: Recompute = "none"
) -> float:
    """Operations of forward, backward (twice the forward) and recomputation, per token."""
    of = _one(shape, sequence)
    again = sum(
        flops(operator, of, causal=causal)
        for part in parts(shape)
        if part != "head"
        for operator in operators(shape, part)
        if recompute == "full" or (recompute == "selective" and isinstance(operator, Pairs))
    )
    return 3 * forward_flops(shape, sequence, causal=causal) + again / sequence


def _one(shape: ModelShape, sequence: int) -> Local:
    source = sequence if shape.family == "encoder-decoder" else 0
    return local(shape, Tokens(1, sequence, source))


# -- conventions ---------------------------------------------------------------


@dataclass(frozen=True)
class Conventions:
    """Operations of training per token, in the four conventions above."""

    by_parameters: float
    model: float
    causal_model: float
    hardware: float


def conventions(shape: ModelShape, sequence: int, recompute: Recompute = "none") -> Conventions:
    """The four numbers. Times the tokens of a step or a run, they are its operations.

    N is all parameters that a token meets, the embedding among them, but only chosen experts.
    """
    return Conventions(
        by_parameters=6.0 * parameters(shape).active,
        model=train_flops(shape, sequence, causal=False),
        causal_model=train_flops(shape, sequence, causal=True),
        hardware=train_flops(shape, sequence, causal=True, recompute=recompute),
    )
