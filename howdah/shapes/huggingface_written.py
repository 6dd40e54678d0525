"""A config.json of Hugging Face for a model of ours; `shapes/huggingface.py` reads them.

Three of transformers' classes compute exactly what a ModelShape can describe:

    LlamaForCausalLM   rotary, RMSNorm, SwiGLU; biases in every matrix or in none
    Qwen3ForCausalLM   the same without biases, and a norm over each head of query and key
    GPT2LMHeadModel    learned positions, LayerNorm, GELU (tanh form) or ReLU, biases

A shape that none of them describes is refused with the name of the field: a silent difference
would only show as worse text.
"""

from typing import Any

from howdah.base.errors import UserError
from howdah.shapes.shape import ModelShape

Config = dict[str, Any]

# What a shape must say for each class; a tuple lists what is allowed.
NEEDS: dict[str, dict[str, tuple[object, ...]]] = {
    "llama": {
        "positions": ("rotary",),
        "norm": ("rmsnorm",),
        "norm_at": ("before",),
        "feedforward": ("swiglu",),
        "query_key_norm": (False,),
    },
    "qwen3": {
        "positions": ("rotary",),
        "norm": ("rmsnorm",),
        "norm_at": ("before",),
        "feedforward": ("swiglu",),
        "bias": (False,),
    },
    "gpt2": {
        "norm": ("layernorm",),
        "norm_at": ("before",),
        "feedforward": ("gelu", "relu"),
        "bias": (True,),
        "query_key_norm": (False,),
    },
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


# What none of them has: forms that the planner knows and the model does not build yet.
PLAIN: dict[str, tuple[object, ...]] = {
    "family": ("decoder",),
    "qkv_bias": (False,),
    "embedding_norm": (False,),
    "token_types": (0,),
    "transform": (False,),
    "latent": (None,),
    "experts": (None,),
}


def kind(shape: ModelShape) -> str:
    """The model type that describes `shape`: llama, qwen3 or gpt2. Else raises UserError."""
    found = "gpt2" if shape.positions == "learned" else "llama"
    found = "qwen3" if shape.query_key_norm and found == "llama" else found
    for field, allowed in (NEEDS[found] | PLAIN).items():
        if getattr(shape, field) not in allowed:
            raise UserError(
                f"model.{field} is {getattr(shape, field)!r}, but {CLASSES[found]}, the nearest "
                f"class of Hugging Face, has {' or '.join(map(repr, allowed))}: this model can "
                "be kept as a checkpoint but not exported"
            )
    if found == "llama" and shape.width % shape.heads:
        raise UserError(
            f"model.width {shape.width} is no multiple of {shape.heads} heads, which "
            "LlamaForCausalLM demands: this model can be kept as a checkpoint but not exported"
        )
    if found == "gpt2" and (shape.k != shape.heads or shape.d * shape.heads != shape.width):
        raise UserError(
            "GPT2LMHeadModel has as many key-value heads as heads, and heads of width / heads "
            f"numbers, not model.kv_heads {shape.k} and model.head_size {shape.d}: this model "
            "can be kept as a checkpoint but not exported"
        )
    return found


# -- sizes to config.json ------------------------------------------------------


def config(shape: ModelShape, *, end: int, dtype: str) -> Config:
    """The contents of config.json for `shape`, as transformers 4 and 5 read it.

    end    id of the token that stands between documents: it begins and ends a text
    dtype  of the stored weights, such as "float32"
    """
    found = kind(shape)
    common: Config = {
        "architectures": [CLASSES[found]],
        "model_type": found,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,  # transformers 5
        "torch_dtype": dtype,  # transformers 4
    }
    return common | (_gpt2_sizes(shape) if found == "gpt2" else _llama_sizes(shape, found))


def _gpt2_sizes(shape: ModelShape) -> Config:
    return {
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "activation_function": {"gelu": "gelu_new"}.get(shape.feedforward, shape.feedforward),
        "layer_norm_epsilon": shape.epsilon,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _llama_sizes(shape: ModelShape, found: str) -> Config:
    rope: Config = {"rope_type": "default"}
    if scaling := shape.rotary_scaling:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.context,
        }
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.k,
        "head_dim": shape.d,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": shape.epsilon,
        "attention_bias": shape.bias,
        "rope_parameters": rope | {"rope_theta": shape.rotary_base},  # transformers 5
        "rope_theta": shape.rotary_base,  # transformers 4, and the next line
        "rope_scaling": rope if shape.rotary_scaling else None,
    }
    if found == "llama":
        sizes["mlp_bias"] = shape.bias
    return sizes
