"""The sizes of a model, and how many parameters follow from them by arithmetic.

A `ModelShape` describes a Transformer without building it: decoder-only, encoder-only,
encoder-decoder, dense or with a mixture of experts. `weights.py` lists its tensors one by one;
this file counts them by formula, and a test holds the two and the published totals equal.

Letters: h width, a heads, k key-value heads, d head size, f feed-forward width, V vocabulary,
L layers, s sequence, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from howdah.base.bounds import out_of_bounds
from howdah.base.errors import UserError

Family = Literal["decoder", "encoder", "encoder-decoder"]
FeedForward = Literal["swiglu", "geglu", "gelu", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "relative", "alibi"]


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
class Latent:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    Keys and values of all heads are unfolded from `kv_rank` numbers per token, queries from
    `query_rank` (0: straight from the residual stream). A head's query and key have `plain`
    numbers without and `rotary` with positions; the rotary key is shared by all heads. A head's
    value has `value` numbers.
    """

    kv_rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a block's feed-forward.

    number  routed experts (E)
    chosen  experts that each token goes to (top-k)
    ffn     inner width of one expert
    shared  inner width of the expert that every token passes; 0 has none
    first   the leading blocks that keep a dense feed-forward
    every   of the others, one in so many has experts (the last of each `every`)
    """

    number: int
    chosen: int
    ffn: int
    shared: int = 0
    first: int = 0
    every: int = 1


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Transformer, in the words of the papers.

    family          decoder (causal), encoder (masked language model) or encoder-decoder
    layers          blocks; of the decoder where there are two stacks
    encoder_layers  blocks of the encoder of an encoder-decoder
    width           size of the residual stream (h)
    heads           query heads (a)
    kv_heads        key-value heads (k); None means as many as heads, multi-head attention
    head_size       d; None means width / heads
    ffn             inner width of the feed-forward (f)
    vocab           rows of the embedding (V)
    context         the longest sequence; also the number of learned positions
    feedforward     swiglu or geglu (gated, 3 matrices), gelu (tanh form) or relu (2 matrices)
    norm            rmsnorm or layernorm
    norm_at         before each sub-layer (and once at the end), or after each
    epsilon         added to the variance
    positions       rotary, learned, relative (T5's bias by distance, `buckets` of them, one table
                    for each stack) or alibi (a fixed slope for each head)
    rotary_base     θ of the rotary wavelengths
    bias            biases of the linear layers
    qkv_bias        biases of query, key and value alone (Qwen 2)
    tied            the head is the embedding
    query_key_norm  an RMSNorm over each head of query and key (Qwen 3)
    embedding_norm  a norm behind the embedding (BERT, BLOOM)
    token_types     rows of a segment embedding (BERT); 0 has none
    transform       a linear layer and a norm in front of the head, whose rows have a bias (BERT)
    latent          multi-head latent attention instead of grouped heads
    experts         a mixture of experts instead of the feed-forward
    buckets         distances that relative positions tell apart
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
    positions: Positions = "rotary"
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    bias: bool = False
    tied: bool = False
    query_key_norm: bool = False
    family: Family = "decoder"
    encoder_layers: int = 0
    qkv_bias: bool = False
    embedding_norm: bool = False
    token_types: int = 0
    transform: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    buckets: int = 32

    @property
    def k(self) -> int:
        """Key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d(self) -> int:
        """Size of a head's query and key."""
        if self.latent is not None:
            return self.latent.plain + self.latent.rotary
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a third matrix, the gate."""
        return self.feedforward in ("swiglu", "geglu")

    def sparse(self, layer: int) -> bool:
        """Whether block `layer` has experts instead of a dense feed-forward."""
        if self.experts is None or layer < self.experts.first:
            return False
        return (layer - self.experts.first + 1) % self.experts.every == 0


def stated(shape: ModelShape) -> ModelShape:
    """The shape with what it leaves to follow said out loud: equal models are equal shapes.

    Latent attention has neither key-value heads nor one head size, so there nothing follows.
    """
    if shape.latent is not None:
        return shape
    return replace(shape, kv_heads=shape.k, head_size=shape.d)


# -- what is wrong, in sentences -----------------------------------------------

LARGEST = 10**14  # parameters, ten times the most that was ever announced


def check_shape(shape: ModelShape) -> list[str]:
    """Everything that is wrong with the sizes, as sentences."""
    if problems := [*out_of_bounds(shape, "model")]:
        return problems
    problems = [*_check_heads(shape), *_check_stacks(shape), *_check_experts(shape)]
    if not problems and (count := parameters(shape).total) > LARGEST:
        problems = [f"the model has {count:.2g} parameters; at most {LARGEST:.0e} are planned for"]
    return problems


def _check_heads(shape: ModelShape) -> Iterator[str]:
    if shape.bias and shape.qkv_bias:
        yield "model.bias has the biases of model.qkv_bias already; leave model.qkv_bias out"
    if shape.latent is not None:
        yield from _check_latent(shape)
        return
    if shape.head_size is None and shape.width % shape.heads:
        fits = _nearest_divisor(shape.width, shape.heads)
        yield (
            f"model.width {shape.width} does not divide into {shape.heads} heads; "
            f"use {fits} heads, or give model.head_size"
        )
    if shape.heads % shape.k:
        fits = _nearest_divisor(shape.heads, shape.k)
        yield f"model.kv_heads {shape.k} does not divide {shape.heads} heads; use {fits}"
    scaling = shape.rotary_scaling
    if scaling is not None and scaling.low >= scaling.high:
        yield (
            f"model.rotary_scaling.low {scaling.low:g} must be below model.rotary_scaling.high "
            f"{scaling.high:g}"
        )
    if shape.positions == "rotary" and shape.d % 2:
        yield f"rotary positions turn pairs, but a head has {shape.d} numbers; make it even"


def _check_latent(shape: ModelShape) -> Iterator[str]:
    assert shape.latent is not None
    for name in ("kv_heads", "head_size", "bias", "qkv_bias", "query_key_norm"):
        if getattr(shape, name):
            yield f"model.latent is an attention without model.{name}; leave model.{name} out"
    if shape.family != "decoder" or shape.positions != "rotary":
        yield (
            f"model.latent needs family decoder and rotary positions, not {shape.family} and "
            f"{shape.positions}; leave model.latent out"
        )
    if shape.latent.rotary % 2:
        yield (
            f"rotary positions turn pairs, but model.latent.rotary is {shape.latent.rotary}; "
            "make it even"
        )


def _check_stacks(shape: ModelShape) -> Iterator[str]:
    both = shape.family == "encoder-decoder"
    if both and not shape.encoder_layers:
        yield "an encoder-decoder needs model.encoder_layers; give at least 1"
    if shape.encoder_layers and not both:
        yield (
            f"model.encoder_layers is {shape.encoder_layers}, but model.family is {shape.family}, "
            "whose blocks are model.layers; leave it out, or make the family encoder-decoder"
        )
    if both and shape.experts is not None:
        yield "model.experts is for models of one stack; leave it out of an encoder-decoder"


def _check_experts(shape: ModelShape) -> Iterator[str]:
    experts = shape.experts
    if experts is None:
        return
    if experts.chosen > experts.number:
        yield (
            f"model.experts.chosen {experts.chosen} is more than model.experts.number; "
            f"use at most {experts.number}"
        )
    if shape.layers - experts.first < experts.every:
        yield (
            f"none of {shape.layers} layers has experts with model.experts.first {experts.first} "
            f"and every {experts.every}; make one of the two smaller"
        )
    if shape.bias:
        yield "model.bias is for dense models, experts have none; leave it out"


def require_shape(shape: ModelShape) -> None:
    """Raises UserError with the first sentence of `check_shape`, if there is one."""
    for problem in check_shape(shape):
        raise UserError(problem)


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - wanted))


# -- parameters ----------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Parameters of the whole model by component; they add up to `total`.

    embedding    a row for each token; a tied head is counted here, once
    positions    learned positions, token types, tables of relative positions
    attention    all of it, cross attention and the norms inside included
    feedforward  the dense ones, and the shared experts
    router       a row for each expert
    experts      the routed experts
    norms        around the blocks, at the end, behind the embedding
    head         of its own, and the transform in front of it
    active       what one token meets: everything, but of the routed experts only the chosen
    """

    embedding: int
    positions: int
    attention: int
    feedforward: int
    router: int
    experts: int
    norms: int
    head: int
    active: int

    @property
    def total(self) -> int:
        blocks = self.attention + self.feedforward + self.router + self.experts + self.norms
        return self.embedding + self.positions + blocks + self.head


def parameters(shape: ModelShape) -> Parameters:
    """The exact number of parameters, by formula.

    Attention h(a + 2k)d + adh, feed-forward 2hf or gated 3hf, norms h (RMS) or 2h each;
    biases where the model has them; embedding Vh, and Vh again for a head of its own. A decoder
    block beside an encoder attends twice, with a norm each; a block with experts has E narrow
    feed-forwards and a router hE.
    """
    h, experts = shape.width, shape.experts
    norm = h if shape.norm == "rmsnorm" else 2 * h
    stacks = 2 if shape.family == "encoder-decoder" else 1
    blocks, crossing = shape.layers + shape.encoder_layers, shape.layers * (stacks - 1)
    inner = (3 if shape.gated else 2) * h  # for each number of a feed-forward's inside
    dense = inner * shape.ffn
    if shape.bias:
        dense += (2 if shape.gated else 1) * shape.ffn + h
    shared = router = routed = chosen = sparse = 0
    if experts is not None:
        sparse = max(0, shape.layers - experts.first) // experts.every
        shared, router = inner * experts.shared, h * experts.number
        routed, chosen = inner * experts.ffn * experts.number, inner * experts.ffn * experts.chosen
    tables = shape.token_types * h
    tables += shape.context * h if shape.positions == "learned" else 0
    tables += stacks * shape.buckets * shape.heads if shape.positions == "relative" else 0
    ends = stacks * (shape.norm_at == "before") + shape.embedding_norm
    head = 0 if shape.tied else shape.vocab * h
    head += h * h + h + norm + shape.vocab if shape.transform else 0
    found = Parameters(
        embedding=shape.vocab * h,
        positions=tables,
        attention=(blocks + crossing) * _attention(shape),
        feedforward=(blocks - sparse) * dense + sparse * shared,
        router=sparse * router,
        experts=sparse * routed,
        norms=(2 * blocks + crossing + ends) * norm,
        head=head,
        active=0,
    )
    return replace(found, active=found.total - sparse * (routed - chosen))


def _attention(shape: ModelShape) -> int:
    """Parameters of one attention."""
    h, a, k, d = shape.width, shape.heads, shape.k, shape.d
    if (latent := shape.latent) is not None:
        query = h * a * d
        if latent.query_rank:
            query = latent.query_rank * (h + 1 + a * d)
        key = h * (latent.kv_rank + latent.rotary) + latent.kv_rank
        unfold = latent.kv_rank * a * (latent.plain + latent.value)
        return query + key + unfold + a * latent.value * h
    count = h * (a + 2 * k) * d + a * d * h
    count += (a + 2 * k) * d if shape.bias or shape.qkv_bias else 0
    count += h if shape.bias else 0
    return count + (2 * d if shape.query_key_norm else 0)
