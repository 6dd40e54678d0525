"""The sizes of a model.

A `ModelShape` describes a Transformer without building it: decoder-only, encoder-only,
encoder-decoder, dense or with a mixture of experts. `check.py` says what is wrong with the sizes,
`weights.py` lists the tensors that follow from them, and `parameters.py` counts those.

Letters: h width, a heads, k key-value heads, d head size, f feed-forward width, V vocabulary,
L layers, s sequence, E experts.
"""

from dataclasses import dataclass, replace
from math import log
from typing import Annotated, Literal

from howdah.base.bounds import Bound, Positive, Size, Tokens

Family = Literal["decoder", "encoder", "encoder-decoder"]
FeedForward = Literal["swiglu", "geglu", "gelu", "gelu_exact", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "relative", "alibi"]

Layers = Annotated[int, Bound(1, 1000)]  # DeepNet has 1,000 (https://arxiv.org/abs/2203.00555)
SomeLayers = Annotated[int, Bound(0, 1000)]
Heads = Annotated[int, Bound(1, 4096)]
InnerSize = Annotated[int, Bound(1, 1 << 20)]
ManyExperts = Annotated[int, Bound(1, 1 << 14)]

WIDER = 8  # numbers by which ALiBi makes heads wider: GPUs take multiples of 8

RENAMED = {  # keys of older recipes and checkpoints, and their names now
    "model.ffn": "model.ffn_size",
    "model.tied": "model.tie_embeddings",
    "model.epsilon": "model.norm_eps",
    "model.query_key_norm": "model.qk_norm",
    "model.rotary_base": "model.rope_theta",
    "model.rotary_scaling": "model.rope_scaling",
    "model.buckets": "model.relative_buckets",
    "model.latent.plain": "model.latent.qk_nope_size",
    "model.latent.rotary": "model.latent.qk_rope_size",
    "model.latent.value": "model.latent.v_size",
    "model.experts.number": "model.experts.count",
    "model.experts.chosen": "model.experts.top_k",
    "model.experts.ffn": "model.experts.ffn_size",
    "model.experts.first": "model.experts.first_dense",
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched, for a longer context than a model was trained with.

    kind     llama3 (https://arxiv.org/abs/2407.21783): wavelengths longer than context/low are
             stretched by `factor`, shorter than context/high are kept, those between are blended
             yarn (https://arxiv.org/abs/2309.00071): the same, blended along the head's numbers,
             and the angles' cosines and sines are multiplied by `turned`
             linear: all are stretched by `factor`
             dynamic: θ grows with a sample's length, once that is over `context`
    factor   how many times as long
    low, high  full turns in `context`; None for high: 4 in llama3, 32 in yarn
    context  the context before the stretching
    mscale, mscale_all_dim  of yarn in DeepSeek's models; 0: left out
    attention_factor  what `turned` is; 0: as factor and mscale say
    truncate  whether yarn's borders between numbers of a head are rounded
    """

    factor: Positive
    low: Positive = 1.0
    high: Positive | None = None
    context: Tokens = 8192
    kind: Literal["llama3", "yarn", "linear", "dynamic"] = "llama3"
    mscale: Annotated[float, Bound(0, 1e3)] = 0.0
    mscale_all_dim: Annotated[float, Bound(0, 1e3)] = 0.0
    attention_factor: Annotated[float, Bound(0, 1e3)] = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.high is None:
            object.__setattr__(self, "high", 32.0 if self.kind == "yarn" else 4.0)

    @property
    def turned(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn" or self.attention_factor:
            return self.attention_factor or 1.0
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    @property
    def latent_logits(self) -> float:
        """What the logits of latent attention are multiplied by, besides."""
        return self._sharper(self.mscale_all_dim) ** 2 if self.kind == "yarn" else 1.0

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * log(self.factor) + 1.0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    Keys and values of all heads are unfolded from `kv_rank` numbers per token, queries from
    `query_rank` (0: straight from the residual stream). A head's query and key have `qk_nope_size`
    numbers without and `qk_rope_size` with positions; the rotary key is shared by all heads. A
    head's value has `v_size` numbers.
    """

    kv_rank: Size
    query_rank: Annotated[int, Bound(0, 1 << 17)]
    qk_nope_size: Size
    qk_rope_size: Size
    v_size: Size


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a block's feed-forward.

    count        routed experts (E)
    top_k        experts that each token goes to (top-k)
    ffn_size     inner width of one expert
    shared       inner width of the expert that every token passes; 0 has none
    first_dense  the leading blocks that keep a dense feed-forward
    every        of the others, one in so many has experts (the last of each `every`)
    scores       what the router makes of its logits: softmax over all experts, or a sigmoid each
                 (DeepSeek-V3); input-sigmoid scales what an expert takes (Llama 4)
    normalise    the weights of the chosen experts are divided by their sum
    scale        the weights are multiplied by it
    groups       the experts are in so many groups of neighbours; a token goes to experts of
                 `top_groups` of them, those whose `group_best` best scores have the largest sum
    bias         a number for each expert, added to its score where experts are chosen; a rule moves
                 it and not a gradient (https://arxiv.org/abs/2408.15664)
    shared_gate  the output of the shared expert is weighed by a sigmoid of its own (Qwen2-MoE)
    """

    count: ManyExperts
    top_k: ManyExperts
    ffn_size: InnerSize
    shared: Annotated[int, Bound(0, 1 << 20)] = 0
    first_dense: SomeLayers = 0
    every: Layers = 1
    scores: Literal["softmax", "sigmoid", "input-sigmoid"] = "softmax"
    normalise: bool = True
    scale: Positive = 1.0
    groups: ManyExperts = 1
    top_groups: ManyExperts = 1
    group_best: ManyExperts = 1
    bias: bool = False
    shared_gate: bool = False


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
    ffn_size        inner width of the feed-forward (f)
    vocab           rows of the embedding (V)
    context         the longest sequence; also the number of learned positions
    first_position  rows of learned positions in front of that of the first token (RoBERTa: 2)
    feedforward     swiglu or geglu (gated, 3 matrices), gelu (tanh form), gelu_exact (BERT) or relu
                    (2 matrices)
    norm            rmsnorm or layernorm
    norm_at         before each sub-layer (and once at the end), or after each
    norm_eps        added to the variance
    positions       rotary, learned, relative (T5's bias by distance, of which there are
                    `relative_buckets`, one table for each stack) or alibi (a fixed slope for
                    each head)
    rope_theta      θ of the rotary wavelengths
    bias            biases of the linear layers
    qkv_bias        biases of query, key and value alone (Qwen 2)
    tie_embeddings  the head is the embedding
    qk_norm         an RMSNorm over each head of query and key (Qwen 3)
    embedding_norm  a norm behind the embedding (BERT, BLOOM)
    token_types     rows of a segment embedding (BERT); 0 has none
    transform       a linear layer and a norm in front of the head, whose rows have a bias (BERT)
    latent          multi-head latent attention instead of grouped heads
    experts         a mixture of experts instead of the feed-forward
    relative_buckets  distances that relative positions distinguish
    labels          names of what whole texts are told apart in: the head has a row for each, in the
                    place of one for each token; empty: the model predicts tokens
    """

    layers: Layers
    width: Size
    heads: Heads
    ffn_size: InnerSize
    vocab: Annotated[int, Bound(1, 1 << 24)]
    context: Tokens
    kv_heads: Heads | None = None
    head_size: Size | None = None
    feedforward: FeedForward = "swiglu"
    norm: Norm = "rmsnorm"
    norm_at: Literal["before", "after"] = "before"
    norm_eps: Annotated[float, Bound(0, 1)] = 1e-5
    positions: Positions = "rotary"
    rope_theta: Annotated[float, Bound(0, 1e12, above=True)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    bias: bool = False
    tie_embeddings: bool = False
    qk_norm: bool = False
    family: Family = "decoder"
    encoder_layers: SomeLayers = 0
    qkv_bias: bool = False
    embedding_norm: bool = False
    token_types: Annotated[int, Bound(0, 1 << 17)] = 0
    transform: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    relative_buckets: Size = 32
    first_position: Annotated[int, Bound(0, 1 << 17)] = 0
    labels: tuple[str, ...] = ()

    @property
    def k(self) -> int:
        """Key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d(self) -> int:
        """Size of a head's query and key."""
        if self.latent is not None:
            return self.latent.qk_nope_size + self.latent.qk_rope_size
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def d_taken(self) -> int:
        """Size of a head as the kernels of attention take it; under ALiBi with the bias inside."""
        return self.d + WIDER * (self.positions == "alibi")

    @property
    def causal(self) -> bool:
        """Whether a token of `layers` attends to earlier ones alone."""
        return self.family != "encoder"

    @property
    def outputs(self) -> int:
        """Rows of the head: labels or, of a language model, tokens."""
        return len(self.labels) or self.vocab

    @property
    def pooler(self) -> bool:
        """Whether a linear layer and a tanh stand in front of the rows for labels (BERT)."""
        return bool(self.labels) and self.family == "encoder"

    @property
    def head_bias(self) -> bool:
        """Whether the rows of the head have a bias."""
        return self.pooler or self.transform

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a third matrix, the gate."""
        return self.feedforward in ("swiglu", "geglu")

    def sparse(self, layer: int) -> bool:
        """Whether block `layer` has experts instead of a dense feed-forward."""
        if self.experts is None or layer < self.experts.first_dense:
            return False
        return (layer - self.experts.first_dense + 1) % self.experts.every == 0


def with_labels(shape: ModelShape, labels: tuple[str, ...]) -> ModelShape:
    """The model with a head for these labels, in the place of the one that it has."""
    return replace(shape, labels=labels, tie_embeddings=False, transform=False)


def stated(shape: ModelShape) -> ModelShape:
    """The shape with its defaults filled in: equal models are equal shapes.

    Latent attention has neither key-value heads nor one head size, so there nothing follows.
    """
    if shape.latent is not None:
        return shape
    return replace(shape, kv_heads=shape.k, head_size=shape.d)
