"""The one table: every weight of a model by name, with its dims, its unit and its start.

    name                         dims              unit       decay  start
    embedding.weight             vocab, width      embedding  yes    N(0, 0.02)
    positions.weight             position, width   embedding  no     N(0, 0.02)
    layers.7.attention.q.weight  query, width      layers.7   yes    N(0, 0.02)
    layers.7.attention.o.weight  width, query      layers.7   yes    N(0, 0.02/√2L)
    layers.7.attention_norm.weight  width          layers.7   no     1
    norm.weight                  width             head       no     1
    head.weight                  vocab, width      head       yes    N(0, 0.02)

Initialisation, gradient sums, norms, checkpoints and optimizer sharding are all derived from
it, and never from attributes stuck on tensors. Names do not depend on the layout: layer 17 is
`layers.17` wherever it lives. Tied weights are one weight, in a unit of its own.

A *unit* is what is reduced, and later gathered and released, together: a block, the
embedding, the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

from howdah.plan.boxes import Box, whole
from howdah.plan.layout import Layout
from howdah.plan.shapes import ModelShape

SPREAD = 0.02  # standard deviation of fresh weights, GPT-2's


@dataclass(frozen=True)
class Weight:
    """One named tensor of the model.

    dims    the meaning of each dim, slowest first
    shape   its sizes
    unit    what it is reduced with
    decay   whether weight decay applies: matrices yes; norms, biases and positions no
    mean, spread   of the normal distribution it starts from (spread 0: a constant)
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    unit: str
    decay: bool
    mean: float
    spread: float

    @property
    def elements(self) -> int:
        return prod(self.shape)


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """All weights in the order in which the forward pass first uses them."""
    return tuple(_walk(shape))


def _walk(shape: ModelShape) -> Iterator[Weight]:
    first = "tied" if shape.tied else "embedding"
    yield _matrix("embedding.weight", first, ("vocab", shape.vocab), ("width", shape.width))
    if shape.positions == "learned":
        yield Weight(
            "positions.weight",
            ("position", "width"),
            (shape.context, shape.width),
            "embedding",
            decay=False,
            mean=0.0,
            spread=SPREAD,
        )
    for layer in range(shape.layers):
        yield from _block(shape, f"layers.{layer}")
    if shape.norm_at == "before":
        yield from _norm(shape, "norm", "head")
    if not shape.tied:
        yield _matrix("head.weight", "head", ("vocab", shape.vocab), ("width", shape.width))


def _block(shape: ModelShape, unit: str) -> Iterator[Weight]:
    width = ("width", shape.width)
    query = ("query", shape.heads * shape.d)
    key = ("key", shape.k * shape.d)
    inner = ("ffn", shape.ffn)
    out = SPREAD / sqrt(2 * shape.layers)  # so that the residual stream does not grow with depth

    def linear(
        name: str, rows: tuple[str, int], columns: tuple[str, int], spread: float
    ) -> Iterator[Weight]:
        yield _matrix(f"{unit}.{name}.weight", unit, rows, columns, spread)
        if shape.bias:
            yield _vector(f"{unit}.{name}.bias", unit, rows, 0.0)

    yield from _norm(shape, f"{unit}.attention_norm", unit)
    yield from linear("attention.q", query, width, SPREAD)
    yield from linear("attention.k", key, width, SPREAD)
    yield from linear("attention.v", key, width, SPREAD)
    if shape.query_key_norm:
        yield _vector(f"{unit}.attention.q_norm.weight", unit, ("head", shape.d), 1.0)
        yield _vector(f"{unit}.attention.k_norm.weight", unit, ("head", shape.d), 1.0)
    yield from linear("attention.o", width, query, out)
    yield from _norm(shape, f"{unit}.feedforward_norm", unit)
    if shape.feedforward == "swiglu":
        yield from linear("feedforward.gate", inner, width, SPREAD)
    yield from linear("feedforward.up", inner, width, SPREAD)
    yield from linear("feedforward.down", width, inner, out)


def _norm(shape: ModelShape, name: str, unit: str) -> Iterator[Weight]:
    yield _vector(f"{name}.weight", unit, ("width", shape.width), 1.0)
    if shape.norm == "layernorm":
        yield _vector(f"{name}.bias", unit, ("width", shape.width), 0.0)


def _matrix(
    name: str, unit: str, rows: tuple[str, int], columns: tuple[str, int], spread: float = SPREAD
) -> Weight:
    dims, sizes = (rows[0], columns[0]), (rows[1], columns[1])
    return Weight(name, dims, sizes, unit, decay=True, mean=0.0, spread=spread)


def _vector(name: str, unit: str, dim: tuple[str, int], value: float) -> Weight:
    return Weight(name, (dim[0],), (dim[1],), unit, decay=False, mean=value, spread=0.0)


# -- who holds what ------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """What one rank holds of a weight.

    box      the part of the tensor
    holders  the ranks that hold this same box. Each saw other tokens, so its gradient is a
             partial sum: the true gradient is the sum over `holders`.
    """

    box: Box
    holders: tuple[int, ...]


def placement(weight: Weight, layout: Layout, rank: int) -> Placement:
    """Where `weight` lives on `rank`: with data parallelism alone, whole on every rank."""
    return Placement(whole(weight.shape), tuple(range(layout.world)))
