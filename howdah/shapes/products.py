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

The products are read off the table of weights: one for each matrix that is not looked up, with the
name of the weight and its last two dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from howdah.shapes.activations import Recompute
from howdah.shapes.dims import Dim, Per, RankSizes, Tokens, local
from howdah.shapes.marks import ALL, Marks
from howdah.shapes.parameters import parameters
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import part_kinds, part_weights, parts


@dataclass(frozen=True)
class Product:
    """Rows of `inner` numbers times a weight [columns, inner].

    per     what there is a row for
    copies  rows for each of those: a token goes to several experts
    groups  weights that share the rows out: experts
    trains  whether the weight is trained
    """

    name: str
    per: Per
    columns: Dim
    inner: Dim
    copies: int = 1
    groups: int = 1
    trains: bool = True


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


def operators(shape: ModelShape, part: Part, marks: Marks = ALL) -> tuple[Operator, ...]:
    """The matrix products of a part's forward pass, in order; none where tokens are embedded.

    marks  what is trained; with it come the products of adapters
    """
    if part in ("embedding", "target"):
        return ()
    if marks.frozen:
        return tuple(_marked(shape, part, marks))
    found = tuple(_read_off(shape, part))
    if (
        part == "head" and shape.tie_embeddings
    ):  # the one matrix that is looked up and multiplied with
        head = Product("head", "token", Dim("vocab", shape.vocab), Dim("width", shape.width))
        return (*found, head)
    return found


def _marked(shape: ModelShape, part: Part, marks: Marks) -> Iterator[Operator]:
    """The products of a part with what is trained of them, and those of adapters."""
    for one in operators(shape, part):
        if not isinstance(one, Product):
            yield one
            continue
        path = f"{part}.{one.name}" if part.is_block else one.name
        tied = one.name == "head" and shape.tie_embeddings
        name = "embedding.weight" if tied else f"{path}.weight"
        yield replace(one, trains=marks.trains(name))
        if name in marks.adapted:
            rank = Dim("adapter", marks.rank)
            yield replace(one, name=f"{one.name}.lora_a", columns=rank)
            yield replace(one, name=f"{one.name}.lora_b", inner=rank)


def _read_off(shape: ModelShape, part: Part) -> Iterator[Operator]:
    """A product for each matrix, and attention's pairs before the matrix of its output."""
    encoder = part.stack == "encoder"  # reads other tokens
    for weight in part_weights(shape, part):
        if not weight.decay:  # a norm or a bias
            continue
        name = weight.name.removesuffix(".weight").removeprefix(f"{part}.")
        if name.endswith(".o"):
            yield _pairs(shape, name.removesuffix(".o"), encoder=encoder)
        *stacked, columns, inner = map(Dim, weight.dims, weight.shape)
        per: Per = "source" if encoder or name in ("cross.k", "cross.v") else "token"
        product = Product(name, per, columns, inner)
        if stacked and shape.experts:
            product = replace(product, copies=shape.experts.top_k, groups=shape.experts.count)
        yield product


def _pairs(shape: ModelShape, name: str, *, encoder: bool) -> Pairs:
    """Latent attention is trained unfolded: https://arxiv.org/abs/2405.04434, section 2.1."""
    heads, value = Dim("heads", shape.heads), shape.latent.v_size if shape.latent else shape.d
    if name == "cross":
        return Pairs(name, "cross_pair", heads, shape.d, value, causal=False)
    if encoder:
        return Pairs(name, "source_pair", heads, shape.d, value, causal=False)
    return Pairs(name, "pair", heads, shape.d, value, causal=shape.family != "encoder")


# -- counting ------------------------------------------------------------------


def flops(operator: Operator, of: RankSizes, *, causal: bool) -> int:
    """Operations of the forward pass on the rank `of`. `causal` leaves out masked pairs."""
    count = of.counts[operator.per]
    if isinstance(operator, Product):
        rows = count * operator.copies
        return 2 * rows * of.size(operator.columns) * of.size(operator.inner)
    half = count * of.size(operator.heads) * (operator.key + operator.value)
    return half if causal and operator.causal else 2 * half


def part_flops(shape: ModelShape, part: Part, sequence: int, *, causal: bool = True) -> int:
    """Operations of a part's forward pass over one sequence.

    The source of an encoder-decoder is as long as its target.
    """
    of = _one(shape, sequence)
    return sum(flops(operator, of, causal=causal) for operator in operators(shape, part))


def forward_flops(shape: ModelShape, sequence: int, *, causal: bool) -> float:
    """Operations of the forward pass, per token of a sequence of `sequence`.

    In an encoder-decoder that is a token of the target, with the work for one of the source.
    """
    total = sum(
        number * part_flops(shape, part, sequence, causal=causal)
        for part, number in part_kinds(shape).items()
    )
    return total / sequence


def train_flops(
    shape: ModelShape,
    sequence: int,
    *,
    causal: bool,
    recompute: Recompute = "none",
    marks: Marks = ALL,
) -> float:
    """Operations of forward, backward (twice the forward) and recomputation, per token.

    marks  what is trained: a backward pass ends at the lowest trained weight, and a product whose
           weight is frozen has one for the gradient of its input alone
    """
    of = _one(shape, sequence)
    if marks.frozen:
        return _trained_flops(shape, of, marks, causal=causal, recompute=recompute) / sequence
    again = sum(
        number * flops(operator, of, causal=causal)
        for part, number in part_kinds(shape).items()
        if part != "head"
        for operator in operators(shape, part)
        if recompute == "full" or (recompute == "selective" and isinstance(operator, Pairs))
    )
    return 3 * forward_flops(shape, sequence, causal=causal) + again / sequence


def _trained_flops(
    shape: ModelShape, of: RankSizes, marks: Marks, *, causal: bool, recompute: Recompute
) -> int:
    total = 0
    for part in parts(shape):
        for one in operators(shape, part, marks):
            once = flops(one, of, causal=causal)
            total += once
            if part in marks.still:
                continue
            again = recompute == "full" or (recompute == "selective" and isinstance(one, Pairs))
            total += once * (2 if isinstance(one, Pairs) else 1 + one.trains)
            total += once * (again and part != "head")
    return total


def _one(shape: ModelShape, sequence: int) -> RankSizes:
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


def conventions(
    shape: ModelShape, sequence: int, recompute: Recompute = "none", marks: Marks = ALL
) -> Conventions:
    """The four numbers. Times the tokens of a step or a run, they are its operations.

    N is all parameters that a token meets, the embedding among them, but only chosen experts. With
    frozen weights (`marks`) the first number is still 6·N·T; the others count what is computed.
    """
    return Conventions(
        by_parameters=6.0 * parameters(shape).active,
        model=train_flops(shape, sequence, causal=False, marks=marks),
        causal_model=train_flops(shape, sequence, causal=True, marks=marks),
        hardware=train_flops(shape, sequence, causal=True, recompute=recompute, marks=marks),
    )
