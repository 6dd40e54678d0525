"""The names of Hugging Face's config.json: one table, which is read and written.

    MODEL_TYPES  for each model_type the setting of every field, what all its models have in
                 common, and which settings must have one value
    SCALING      the settings of stretched rotary positions
    DEFAULTS     what transformers takes where a setting is left out, if the others take another

`huggingface.py` reads a config.json by it, `huggingface_written.py` writes one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """Where config.json has the value of one of our fields.

    name    the setting
    absent  what transformers takes where it is left out or null, or a function of the fields
            before this one; None: it must be there
    kind    the type of the value
    also    another name, read where the first is left out
    words   their words and ours, the usual one first
    """

    name: str
    absent: Any = None
    kind: type[Any] = int
    also: str = ""
    words: Mapping[str, str] = {}


@dataclass(frozen=True)
class ModelType:
    """What a model_type means.

    names    the setting of each field of ModelShape; `latent.v_size` is a field of its `latent`
    always   fields that have one value in all models of the type, named in the same way
    fixed    settings that change what is computed, with the value each must have where given
    """

    names: dict[str, Setting]
    always: dict[str, Any]
    fixed: dict[str, Any]


def _sizes(width: str, layers: str, heads: str, context: str) -> dict[str, Setting]:
    """What every family has, by its names."""
    return {
        "width": Setting(width),
        "layers": Setting(layers),
        "heads": Setting(heads),
        "vocab": Setting("vocab_size"),
        "context": Setting(context),
        "tie_embeddings": Setting("tie_word_embeddings", True, bool),
    }


USUAL = _sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
GELU = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "gelu": "gelu_exact",
}
GPT2 = _sizes("n_embd", "n_layer", "n_head", "n_positions") | {
    "ffn_size": Setting("n_inner", lambda sizes: 4 * sizes["width"]),
    "feedforward": Setting("activation_function", "gelu_new", str, words=GELU),
    "norm_eps": Setting("layer_norm_epsilon", 1e-5, float),
}
BLOOM = _sizes("n_embed", "n_layer", "n_head", "seq_length") | {
    "width": Setting("n_embed", also="hidden_size"),
    "layers": Setting("n_layer", also="num_hidden_layers"),
    "heads": Setting("n_head", also="num_attention_heads"),
    "context": Setting("seq_length", 2048),
    "norm_eps": Setting("layer_norm_epsilon", 1e-5, float),
}
OPT = USUAL | {"ffn_size": Setting("ffn_dim")}
ERF = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
BERT = USUAL | {
    "ffn_size": Setting("intermediate_size"),
    "norm_eps": Setting("layer_norm_eps", 1e-12, float),
    "token_types": Setting("type_vocab_size", 2),
    "feedforward": Setting("hidden_act", "gelu", str, words=ERF),
}
# Of its positions, two rows stand before that of the first token: `huggingface.py` subtracts them.
ROBERTA = BERT | {"feedforward": Setting("hidden_act", "gelu", str, words={"gelu": "gelu_exact"})}
GATED = {"relu": "relu", "gated-gelu": "geglu"}
T5 = (
    {"encoder_layers": Setting("num_layers")}
    | _sizes("d_model", "num_decoder_layers", "num_heads", "n_positions")
    | {
        "layers": Setting("num_decoder_layers", lambda sizes: sizes["encoder_layers"]),
        "context": Setting("n_positions", 512),
        "head_size": Setting("d_kv"),
        "ffn_size": Setting("d_ff"),
        "feedforward": Setting("feed_forward_proj", "relu", str, words=GATED),
        "norm_eps": Setting("layer_norm_epsilon", 1e-6, float),
        "relative_buckets": Setting("relative_attention_num_buckets", 32),
    }
)
LLAMA = USUAL | {
    "ffn_size": Setting("intermediate_size"),
    "kv_heads": Setting("num_key_value_heads", lambda sizes: sizes["heads"]),
    "head_size": Setting("head_dim", lambda sizes: sizes["width"] // max(sizes["heads"], 1)),
    "norm_eps": Setting("rms_norm_eps", 1e-6, float),
    "rope_theta": Setting("rope_theta", 10_000.0, float),
    "bias": Setting("attention_bias", False, bool),
    "tie_embeddings": Setting("tie_word_embeddings", False, bool),
}
MIXTRAL = LLAMA | {
    "experts.count": Setting("num_local_experts"),
    "experts.top_k": Setting("num_experts_per_tok"),
    "experts.ffn_size": Setting("intermediate_size"),
}
QWEN3_MOE = LLAMA | {
    "experts.count": Setting("num_experts", also="num_local_experts"),
    "experts.top_k": Setting("num_experts_per_tok"),
    "experts.ffn_size": Setting("moe_intermediate_size"),
    "experts.every": Setting("decoder_sparse_step", 1),
    "experts.normalise": Setting("norm_topk_prob", False, bool),
}
QWEN2_MOE = QWEN3_MOE | {"experts.shared": Setting("shared_expert_intermediate_size")}
DEEPSEEK = LLAMA | {
    "latent.kv_rank": Setting("kv_lora_rank"),
    "latent.query_rank": Setting("q_lora_rank", 0),
    "latent.qk_nope_size": Setting("qk_nope_head_dim"),
    "latent.qk_rope_size": Setting("qk_rope_head_dim"),
    "latent.v_size": Setting("v_head_dim"),
    "experts.count": Setting("n_routed_experts"),
    "experts.top_k": Setting("num_experts_per_tok"),
    "experts.ffn_size": Setting("moe_intermediate_size"),
    "experts.shared": Setting("n_shared_experts", 0),
    "experts.first_dense": Setting("first_k_dense_replace"),
    "experts.scale": Setting("routed_scaling_factor", 1.0, float),
    "experts.groups": Setting("n_group", 1),
    "experts.top_groups": Setting("topk_group", 1),
}
DEEPSEEK_V3 = DEEPSEEK | {"experts.normalise": Setting("norm_topk_prob", True, bool)}
_FACTOR = {"factor": Setting("factor", kind=float)}
SCALING = {  # by rope_type
    "llama3": _FACTOR
    | {
        "low": Setting("low_freq_factor", kind=float),
        "high": Setting("high_freq_factor", kind=float),
        "context": Setting("original_max_position_embeddings"),
    },
    "yarn": _FACTOR
    | {
        "low": Setting("beta_slow", 1.0, float),
        "high": Setting("beta_fast", 32.0, float),
        "context": Setting(
            "original_max_position_embeddings", absent=lambda sizes: sizes["context"]
        ),
        "mscale": Setting("mscale", 0.0, float),
        "mscale_all_dim": Setting("mscale_all_dim", 0.0, float),
        "attention_factor": Setting("attention_factor", 0.0, float),
        "truncate": Setting("truncate", True, bool),
    },
    "linear": _FACTOR,
    "dynamic": _FACTOR,
}

# -- model types ----------------------------------------------------------------

GPT_ALWAYS = {"norm": "layernorm", "positions": "learned", "bias": True}
SILU = {"hidden_act": "silu"}
NO_WINDOW = {"use_sliding_window": False}
NO_BIAS = {"attention_bias": False}
ENCODING = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}

MODEL_TYPES = {
    "gpt2": ModelType(
        GPT2,
        always=GPT_ALWAYS,
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "opt": ModelType(
        OPT,
        always=GPT_ALWAYS | {"feedforward": "relu"},
        fixed={
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "bloom": ModelType(
        BLOOM,
        always=GPT_ALWAYS | {"feedforward": "gelu", "positions": "alibi", "embedding_norm": True},
        fixed={"apply_residual_connection_post_layernorm": False},
    ),
    "bert": ModelType(
        BERT,
        always=GPT_ALWAYS
        | {"family": "encoder", "norm_at": "after"}
        | {"embedding_norm": True, "transform": True},
        fixed=ENCODING,
    ),
    "roberta": ModelType(
        ROBERTA,
        always=GPT_ALWAYS
        | {"family": "encoder", "norm_at": "after", "first_position": 2}
        | {"embedding_norm": True, "transform": True},
        fixed=ENCODING | {"pad_token_id": 1},
    ),
    "t5": ModelType(
        T5,
        always={"family": "encoder-decoder", "positions": "relative"},
        fixed={"relative_attention_max_distance": 128},
    ),
    "llama": ModelType(LLAMA, always={}, fixed=SILU),
    "mistral": ModelType(LLAMA, always={}, fixed=SILU),
    "mixtral": ModelType(
        MIXTRAL, always={}, fixed=SILU | {"sliding_window": None} | {"router_jitter_noise": 0.0}
    ),
    "qwen2": ModelType(LLAMA, always={"qkv_bias": True}, fixed=SILU | NO_WINDOW),
    "qwen3": ModelType(LLAMA, always={"qk_norm": True}, fixed=SILU | NO_BIAS | NO_WINDOW),
    "qwen2_moe": ModelType(
        QWEN2_MOE,
        always={"qkv_bias": True, "experts.shared_gate": True},
        fixed=SILU | NO_WINDOW | {"mlp_only_layers": [], "qkv_bias": True},
    ),
    "qwen3_moe": ModelType(
        QWEN3_MOE,
        always={"qk_norm": True},
        fixed=SILU | NO_BIAS | NO_WINDOW | {"mlp_only_layers": []},
    ),
    "deepseek_v2": ModelType(
        DEEPSEEK,
        always={"experts.normalise": False},
        fixed=SILU
        | NO_BIAS
        | {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
    ),
    "deepseek_v3": ModelType(
        DEEPSEEK_V3,
        always={"experts.scores": "sigmoid", "experts.group_best": 2, "experts.bias": True},
        fixed=SILU
        | NO_BIAS
        | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"rope_interleave": True},
    ),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
    "deepseek_v3": {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
}
