"""The one table: every weight of a model by name, with its dims, its unit and its start.

    name                            dims                       unit              decay
    embedding.weight                vocab, width               embedding         yes
    positions.weight                position, width            embedding         no
    layers.7.attention_norm.weight  width                      layers.7          no
    layers.7.attention.q.weight     query, width               layers.7          yes
    layers.7.attention.o.weight     width, query               layers.7          yes
    layers.7.feedforward.up.weight  ffn, width                 layers.7          yes
    layers.8.router.weight          choice, width              layers.8          yes
    layers.8.experts.up.weight      expert, expert_ffn, width  layers.8.experts  yes
    norm.weight                     width                      head              no
    head.weight                     vocab, width               head              yes

An encoder-decoder has a second stack, `encoder.7`, and in each block of `layers` a second
attention, `layers.7.cross`, that looks at the encoder's output.

Initialisation, gradient sums, norms, checkpoints and optimizer sharding are all derived from
it, and never from attributes stuck on tensors. Names do not depend on the layout: layer 17 is
`layers.17` on whichever rank it lives. Tied weights are one weight, in a unit of its own.

A *part* is a place in the model, in forward order. A *unit* is what is reduced, and later
gathered and released, together; it is used at one part or at several (`parts_of`). A T5 of six
blocks a stack:

    parts   embedding  encoder.0 … encoder.5  target  layers.0 … layers.5  head
    units   tied ----------------------------- tied ---------------------- tied
                       encoder.0 … encoder.5          layers.0 … layers.5  head
                       relative.encoder ---           relative.decoder ---

A model of `labels` has another head, whose rows tp does not cut; an encoder's has BERT's pooler:

    pooler.weight                   width, width               head              yes
    head.weight                     label, width               head              yes

The pooler and the next-sentence head are no part of a masked language model.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt

from howdah.shapes.part import Part
from howdah.shapes.shape import Experts, Latent, ModelShape

SPREAD = 0.02  # standard deviation of fresh weights, GPT-2's
ROUTER_BIAS = "router.bias"  # of a block; its gradient is zero, and a rule moves it
FROZEN = "frozen."  # before the name of a unit: of its weights those that are not trained


@dataclass(frozen=True)
class Weight:
    """One named tensor of the model.

    dims    the meaning of each dim, slowest first
    shape   its sizes
    unit    what it is reduced with
    decay   whether weight decay applies: matrices yes; norms, biases and positions no
    mean, spread   of the normal distribution it starts from (spread 0: a constant)
    rate    what its learning rate is multiplied by; 0: it is frozen, in a unit of frozen weights
    even    whether it starts from numbers spread evenly over mean ± spread instead
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    unit: str
    decay: bool
    mean: float
    spread: float
    rate: float = 1.0
    even: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)


# -- parts and units -----------------------------------------------------------


def parts(shape: ModelShape) -> tuple[Part, ...]:
    """The parts of the model in forward order; "target" is where the decoder's tokens enter."""
    encoder = [Part("encoder", layer) for layer in range(shape.encoder_layers)]
    target = [Part("target")] if shape.family == "encoder-decoder" else []
    layers = [Part("layers", layer) for layer in range(shape.layers)]
    return (Part("embedding"), *encoder, *target, *layers, Part("head"))


def parts_of(unit: str, shape: ModelShape) -> tuple[Part, ...]:
    """The parts that use `unit`, in forward order."""
    return _users(shape).get(unit.removeprefix(FROZEN), ())


@lru_cache(16)  # called for each unit of a plan
def _users(shape: ModelShape) -> Mapping[str, tuple[Part, ...]]:
    """By unit, the parts that use it, in forward order."""
    found: dict[str, tuple[Part, ...]] = {}
    ends = {"embedding": ("embedding", "tied"), "target": ("embedding", "tied")}
    for part in parts(shape):
        of_block = (part, f"{part}.experts", relative_unit(part.stack, shape))
        for unit in of_block if part.is_block else ends.get(part, ("head", "tied")):
            found[unit] = (*found.get(unit, ()), part)
    return found


def relative_unit(stack: str, shape: ModelShape) -> str:
    """The unit with a stack's relative positions: those of an encoder look both ways."""
    looks_both_ways = stack == "encoder" or shape.family == "encoder"
    return "relative.encoder" if looks_both_ways else "relative.decoder"


# -- the table -----------------------------------------------------------------

Dim = tuple[str, int]  # name and size


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """All weights in the order in which the forward pass first uses them."""
    return tuple(weight for part in parts(shape) for weight in part_weights(shape, part))


def part_weights(shape: ModelShape, part: Part) -> Iterable[Weight]:
    """The rows of the table for one part.

    A stack's table of relative positions is with the tokens that enter the stack, and the norm
    behind the encoder with the target, so that all blocks of a kind have the same rows.
    """
    if part.is_block:
        return _block(shape, part.stack, part.layer)
    if part == "head":
        return _unit("head", _head(shape))
    return _embedding(shape) if part == "embedding" else _target(shape)


def part_kinds(shape: ModelShape) -> dict[Part, int]:
    """A part of each kind, and how many have the same rows but for their names.

    DeepSeek-V3: {"embedding": 1, "layers.0": 3, "layers.3": 58, "head": 1}.
    """
    sparse = [shape.sparse(layer) for layer in range(shape.layers)]
    kinds = dict.fromkeys(sparse)
    blocks = {Part("layers", sparse.index(kind)): sparse.count(kind) for kind in kinds}
    encoder = {Part("encoder", 0): shape.encoder_layers, Part("target"): 1}
    return {
        Part("embedding"): 1,
        **(encoder if shape.encoder_layers else {}),
        **blocks,
        Part("head"): 1,
    }


def _embedding(shape: ModelShape) -> Iterator[Weight]:
    vocab, width = ("vocab", shape.vocab), ("width", shape.width)
    tokens = "tied" if shape.tie_embeddings else "embedding"
    scaled = shape.tie_embeddings and shape.encoder_layers  # T5's head divides by √width
    # the head's bias comes with its matrix: one is asked for while the other is in use
    bias = _head_bias(shape) if shape.tie_embeddings else ()
    table = _matrix("embedding.weight", vocab, width, spread=1.0 if scaled else SPREAD)
    yield from _unit(tokens, [table, *bias])
    yield from _unit("embedding", _beside_tokens(shape))
    yield from _relative_table(shape, "encoder" if shape.encoder_layers else "layers")


def _beside_tokens(shape: ModelShape) -> Iterator[Weight]:
    width = ("width", shape.width)
    if shape.positions == "learned":
        rows = shape.context + shape.first_position
        yield _table("positions.weight", ("position", rows), width)
    if shape.token_types:
        yield _table("token_types.weight", ("token_type", shape.token_types), width)
    if shape.embedding_norm:
        yield from _norm(shape, "embedding_norm")


def _target(shape: ModelShape) -> Iterator[Weight]:
    if shape.norm_at == "before":
        yield from _unit(f"encoder.{shape.encoder_layers - 1}", _norm(shape, "encoder_norm"))
    yield from _relative_table(shape, "layers")


def _relative_table(shape: ModelShape, stack: str) -> Iterator[Weight]:
    if shape.positions == "relative":
        unit, heads = relative_unit(stack, shape), ("query", shape.heads)
        yield from _unit(
            unit, [_table(f"{unit}.weight", ("bucket", shape.relative_buckets), heads)]
        )


def _head(shape: ModelShape) -> Iterator[Weight]:
    vocab, width = ("vocab", shape.vocab), ("width", shape.width)
    if shape.norm_at == "before":
        yield from _norm(shape, "norm")
    if shape.pooler:
        yield from _linear("pooler", width, width, bias=True)
    if shape.labels:
        yield from _linear("head", ("label", shape.outputs), width, bias=shape.head_bias)
        return
    if shape.transform:
        yield from _linear("transform", width, width, bias=True)
        yield from _norm(shape, "transform_norm")
    if not shape.tie_embeddings:
        yield _matrix("head.weight", vocab, width)
        yield from _head_bias(shape)


def _head_bias(shape: ModelShape) -> Iterator[Weight]:
    if shape.transform:
        yield _vector("head.bias", ("vocab", shape.vocab), 0.0)


def _unit(unit: str, rows: Iterable[Weight], prefix: str = "") -> Iterator[Weight]:
    """The rows with their unit, and their names complete."""
    return (
        Weight(prefix + row.name, row.dims, row.shape, unit, row.decay, row.mean, row.spread)
        for row in rows
    )


# -- a block -------------------------------------------------------------------


def _block(shape: ModelShape, stack: str, layer: int) -> Iterator[Weight]:
    crossing = stack == "layers" and shape.family == "encoder-decoder"
    layers = shape.layers if stack == "layers" else shape.encoder_layers
    # so that the residual stream does not grow with what is added to it; behind norms it does not
    added = (3 if crossing else 2) * layers
    out = SPREAD if shape.norm_at == "after" else SPREAD / sqrt(added)
    experts = shape.experts if stack == "layers" and shape.sparse(layer) else None
    unit = f"{stack}.{layer}"
    yield from _unit(unit, _dense(shape, out, experts, crossing=crossing), f"{unit}.")
    if experts is not None:
        yield from _unit(f"{unit}.experts", _experts(shape, experts, out), f"{unit}.")


def _dense(
    shape: ModelShape, out: float, experts: Experts | None, *, crossing: bool
) -> Iterator[Weight]:
    """All but the routed experts. `out` is the spread of what writes to the residual stream."""
    yield from _norm(shape, "attention_norm")
    if shape.latent is None:
        yield from _attention(shape, "attention", out)
    else:
        yield from _latent(shape, shape.latent, out)
    if crossing:
        yield from _norm(shape, "cross_norm")
        yield from _attention(shape, "cross", out)
    yield from _norm(shape, "feedforward_norm")
    if experts is None:
        yield from _feedforward(shape, "feedforward", shape.ffn_size, out)
        return
    choice, width = ("choice", experts.count), ("width", shape.width)
    yield _matrix("router.weight", choice, width)
    if experts.bias:
        yield _vector(ROUTER_BIAS, choice, 0.0)
    if experts.shared:
        yield from _feedforward(shape, "shared", experts.shared, out)
    if experts.shared_gate:
        yield _matrix("shared_gate.weight", ("choice", 1), width)


def _attention(shape: ModelShape, name: str, out: float) -> Iterator[Weight]:
    width = ("width", shape.width)
    query, key = ("query", shape.heads * shape.d), ("key", shape.k * shape.d)
    bias = shape.bias or shape.qkv_bias
    yield from _linear(f"{name}.q", query, width, bias=bias)
    yield from _linear(f"{name}.k", key, width, bias=bias)
    yield from _linear(f"{name}.v", key, width, bias=bias)
    if shape.qk_norm:
        yield _vector(f"{name}.q_norm.weight", ("head", shape.d), 1.0)
        yield _vector(f"{name}.k_norm.weight", ("head", shape.d), 1.0)
    yield from _linear(f"{name}.o", width, query, bias=shape.bias, spread=out)


def _latent(shape: ModelShape, latent: Latent, out: float) -> Iterator[Weight]:
    """Down to the ranks, a norm there, and up to the heads; `kv_down` makes the rotary key too."""
    width, query = ("width", shape.width), ("query", shape.heads * shape.d)
    if latent.query_rank:
        rank = ("rank", latent.query_rank)
        yield _matrix("attention.q_down.weight", rank, width)
        yield _vector("attention.q_norm.weight", rank, 1.0)
        yield _matrix("attention.q_up.weight", query, rank)
    else:
        yield _matrix("attention.q.weight", query, width)
    rank = ("rank", latent.kv_rank)
    unfolded = ("query", shape.heads * (latent.qk_nope_size + latent.v_size))
    values = ("query", shape.heads * latent.v_size)
    yield _matrix("attention.kv_down.weight", ("rank", latent.kv_rank + latent.qk_rope_size), width)
    yield _vector("attention.kv_norm.weight", rank, 1.0)
    yield _matrix("attention.kv_up.weight", unfolded, rank)
    yield _matrix("attention.o.weight", width, values, spread=out)


def _feedforward(shape: ModelShape, name: str, ffn: int, out: float) -> Iterator[Weight]:
    width, inner = ("width", shape.width), ("ffn", ffn)
    if shape.gated:
        yield from _linear(f"{name}.gate", inner, width, bias=shape.bias)
    yield from _linear(f"{name}.up", inner, width, bias=shape.bias)
    yield from _linear(f"{name}.down", width, inner, bias=shape.bias, spread=out)


def _experts(shape: ModelShape, experts: Experts, out: float) -> Iterator[Weight]:
    """The routed experts of a block, stacked: one tensor for each of their matrices."""
    expert, inner = ("expert", experts.count), ("expert_ffn", experts.ffn_size)
    width = ("width", shape.width)
    if shape.gated:
        yield _matrix("experts.gate.weight", expert, inner, width)
    yield _matrix("experts.up.weight", expert, inner, width)
    yield _matrix("experts.down.weight", expert, width, inner, spread=out)


# -- rows, whose unit is filled in by `_unit` -----------------------------------


def _linear(
    name: str, rows: Dim, columns: Dim, *, bias: bool, spread: float = SPREAD
) -> Iterator[Weight]:
    yield _matrix(f"{name}.weight", rows, columns, spread=spread)
    if bias:
        yield _vector(f"{name}.bias", rows, 0.0)


def _norm(shape: ModelShape, name: str) -> Iterator[Weight]:
    yield _vector(f"{name}.weight", ("width", shape.width), 1.0)
    if shape.norm == "layernorm":
        yield _vector(f"{name}.bias", ("width", shape.width), 0.0)


def _matrix(name: str, *dims: Dim, spread: float = SPREAD) -> Weight:
    names, sizes = zip(*dims, strict=True)
    return Weight(name, names, sizes, unit="", decay=True, mean=0.0, spread=spread)


def _table(name: str, *dims: Dim) -> Weight:
    return replace(_matrix(name, *dims), decay=False)


def _vector(name: str, dim: Dim, value: float) -> Weight:
    return Weight(name, (dim[0],), (dim[1],), unit="", decay=False, mean=value, spread=0.0)
