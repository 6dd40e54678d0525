"""Names and layout of the tensors in Hugging Face folders, for each type of model.

"Theirs" are Hugging Face's tensors, "ours" those of howdah. GPT-2 stores its matrices [in, out],
and query, key and value in one matrix, so the table holds more than names:

    theirs    h.0.attn.c_attn.weight [h, 3h]   =   (q over k over v) transposed
    ours      layers.0.attention.q.weight [h, h], and the same of k and of v

    theirs    h.0.self_attention.query_key_value.weight [3h, h]    BLOOM's, head by head:
                                                                   q0 k0 v0 q1 k1 v1 …

    theirs    model.layers.0.mlp.experts.5.up_proj.weight [f, h]   for each of E experts
    ours      layers.0.experts.up.weight [E, f, h]
"""

from dataclasses import dataclass

from howdah.shapes.huggingface_written import kind
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import Weight, weights

LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.o": "self_attn.o_proj",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
MIXTRAL = LLAMA | {
    "router": "block_sparse_moe.gate",
    "experts.gate": "block_sparse_moe.experts.{}.w1",
    "experts.up": "block_sparse_moe.experts.{}.w3",
    "experts.down": "block_sparse_moe.experts.{}.w2",
}
QWEN_MOE = LLAMA | {
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_expert_gate",
    **{f"experts.{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
DEEPSEEK = QWEN_MOE | {
    "router.bias": "mlp.gate.e_score_correction_bias",
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
BLOOM = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attention.query_key_value",
    "attention.k": "self_attention.query_key_value",
    "attention.v": "self_attention.query_key_value",
    "attention.o": "self_attention.dense",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
BERT = {
    "embedding": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "output.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "pooler": "bert.pooler.dense",
    "head": "cls.predictions",
}
ROBERTA = {ours: theirs.replace("bert.", "roberta.") for ours, theirs in BERT.items()} | {
    "transform": "lm_head.dense",
    "transform_norm": "lm_head.layer_norm",
    "pooler": "classifier.dense",
    "head": "lm_head",
}
LABELS = {"bert": "classifier", "roberta": "classifier.out_proj"}  # heads; of other types: score
T5 = {
    "embedding": "shared",
    "relative.encoder": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "relative.decoder": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "attention_norm": "layer.0.layer_norm",
    **{f"attention.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "encoder_norm": "encoder.final_layer_norm",
    "norm": "decoder.final_layer_norm",
    "head": "lm_head",
}


def _t5_inside(stack: str, inside: str, gated: bool) -> str:
    """The place in a block of T5, whose feed-forward is behind two attentions in a decoder."""
    last = 2 if stack == "layers" else 1
    up = "wi_1" if gated else "wi"
    return {
        **T5,
        "cross_norm": "layer.1.layer_norm",
        **{f"cross.{name}": f"layer.1.EncDecAttention.{name}" for name in "qkvo"},
        "feedforward_norm": f"layer.{last}.layer_norm",
        "feedforward.gate": f"layer.{last}.DenseReluDense.wi_0",
        "feedforward.up": f"layer.{last}.DenseReluDense.{up}",
        "feedforward.down": f"layer.{last}.DenseReluDense.wo",
    }[inside]


BLOCKS = {  # of other types: model.layers
    "gpt2": "transformer.h",
    "bloom": "transformer.h",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
}
TABLES = {
    "gpt2": GPT2,
    "bert": BERT,
    "roberta": ROBERTA,
    "bloom": BLOOM,
    "t5": T5,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
}  # of other types: LLAMA


@dataclass(frozen=True)
class HubTensor:
    """One tensor of a Hugging Face model: `ours` concatenated along dim 0, then maybe transposed;
    or their rows in turn, head by head.

    name        of the Hugging Face tensor
    shape       of the Hugging Face tensor
    ours        names of the howdah weights in it
    rows        number of rows of each weight in `ours`
    transposed  whether the concatenation is stored transposed
    expert      the number of the one expert whose matrix it is, of a weight that stacks those of
                all; None: it is no expert's
    heads       the number of heads whose rows of each of `ours` stand together; 0: `ours` are whole
    """

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool
    expert: int | None = None
    heads: int = 0


def names(shape: ModelShape) -> tuple[HubTensor, ...]:
    """The Hugging Face tensors for all weights of `shape`, in the order of `weights(shape)`.

    Raises UserError when no Hugging Face class describes the shape.
    """
    theirs = kind(shape)
    gpt2, groups = theirs == "gpt2", dict[str, list[Weight]]()
    for weight in weights(shape):
        name = _their_name(weight, theirs, shape.gated)
        if shape.labels and weight.name.startswith("head."):
            name = f"{LABELS.get(theirs, 'score')}.{weight.name.removeprefix('head.')}"
        groups.setdefault(name, []).append(weight)
    found = []
    for name, members in groups.items():
        if members[0].dims[0] == "expert":
            (stacked,) = members
            found += [
                HubTensor(name.format(e), stacked.shape[1:], (stacked.name,), (1,), False, expert=e)
                for e in range(stacked.shape[0])
            ]
            continue
        rows = tuple(weight.shape[0] for weight in members)
        size = (sum(rows), *members[0].shape[1:])
        transposed = gpt2 and len(size) == 2 and members[0].name.startswith("layers.")
        size = size[::-1] if transposed else size
        heads = shape.heads if theirs == "bloom" and len(members) > 1 else 0
        ours = tuple(weight.name for weight in members)
        found.append(HubTensor(name, size, ours, rows, transposed, heads=heads))
    return tuple(found)


def _their_name(ours: Weight, theirs: str, gated: bool) -> str:
    """Translates a name: layers.7.attention.q.weight → model.layers.7.self_attn.q_proj.weight."""
    place, ending = ours.name.rsplit(".", 1)
    table = TABLES.get(theirs, LLAMA)
    layers = BLOCKS.get(theirs, "model.layers")
    if place in table:
        return f"{table[place]}.{ending}"
    stack, number, inside = place.split(".", 2)
    if theirs == "t5":
        stack_of = {"encoder": "encoder.block", "layers": "decoder.block"}[stack]
        return f"{stack_of}.{number}.{_t5_inside(stack, inside, gated)}.{ending}"
    name = table.get(f"{inside}.{ending}") or f"{table[inside]}.{ending}"
    return f"{layers}.{number}.{name}"
