"""The sizes of a model as Hugging Face's config.json says them, and back.

Three of transformers' classes compute exactly what a ModelShape can describe:

    LlamaForCausalLM   rotary, RMSNorm, SwiGLU; biases in every matrix or in none
    Qwen3ForCausalLM   the same without biases, and a norm over each head of query and key
    GPT2LMHeadModel    learned positions, LayerNorm, GELU (tanh form) or ReLU, biases

A shape that none of them describes, and a config.json with a setting that is not computed here,
are refused with the name of the field: a silent difference would only show as worse text.
"""

from typing import Any

from howdah.plan.problems import BadInput
from howdah.plan.shapes import ModelShape, RotaryScaling, require_shape

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


def kind(shape: ModelShape) -> str:
    """The model type that describes `shape`: llama, qwen3 or gpt2. Raises BadInput if none does."""
    found = "gpt2" if shape.positions == "learned" else "llama"
    found = "qwen3" if shape.query_key_norm and found == "llama" else found
    for field, allowed in NEEDS[found].items():
        if getattr(shape, field) not in allowed:
            raise BadInput(
                f"model.{field} is {getattr(shape, field)!r}, but {CLASSES[found]}, the nearest "
                f"class of Hugging Face, has {' or '.join(map(repr, allowed))}: this model can "
                "be kept as a checkpoint but not exported"
            )
    if found == "llama" and shape.width % shape.heads:
        raise BadInput(
            f"model.width {shape.width} is no multiple of {shape.heads} heads, which "
            "LlamaForCausalLM demands: this model can be kept as a checkpoint but not exported"
        )
    if found == "gpt2" and (shape.k != shape.heads or shape.d * shape.heads != shape.width):
        raise BadInput(
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


# -- config.json to sizes ------------------------------------------------------

# Settings that change what is computed, with the value each must have where it is given.
FIXED: dict[str, Config] = {
    "llama": {"hidden_act": "silu", "quantization_config": None},
    "qwen3": {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    },
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
}


def shape_from_config(config: Config) -> ModelShape:
    """The sizes that a config.json describes.

    Raises BadInput for a model type, or a setting, whose results would not be equal here.
    """
    found = config.get("model_type")
    if found not in FIXED:
        raise BadInput(
            f"config.json has model_type {found!r}; howdah reads {', '.join(FIXED)}: choose one "
            "of these models"
        )
    for setting, value in FIXED[found].items():
        _require(config, setting, value)
    shape = _from_gpt2(config) if found == "gpt2" else _from_llama(config, found)
    require_shape(shape)
    return shape


def _require(config: Config, setting: str, value: object) -> None:
    if config.get(setting, value) != value:
        raise BadInput(
            f"config.json has {setting} {config[setting]!r}, and howdah computes only "
            f"{value!r}: choose another model"
        )


def _get(config: Config, name: str, kinds: type, default: Any = None) -> Any:
    """config[name] as a number or string of the right kind; null means the default."""
    value = config.get(name)
    value = default if value is None else value
    if kinds is float and type(value) is int:
        return float(value)
    if type(value) is not kinds:
        said = "has no" if value is None else f"has {value!r} for"
        raise BadInput(f"config.json {said} {name}; give it as {kinds.__name__}")
    return value


def _from_gpt2(config: Config) -> ModelShape:
    width = _get(config, "n_embd", int)
    activation = _get(config, "activation_function", str, "gelu_new")
    known = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
    if activation not in known:
        _require(config, "activation_function", "gelu_new")
    return ModelShape(
        layers=_get(config, "n_layer", int),
        width=width,
        heads=_get(config, "n_head", int),
        ffn=_get(config, "n_inner", int, 4 * width),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "n_positions", int),
        feedforward="relu" if known[activation] == "relu" else "gelu",
        norm="layernorm",
        epsilon=_get(config, "layer_norm_epsilon", float, 1e-5),
        positions="learned",
        bias=True,
        tied=_get(config, "tie_word_embeddings", bool, True),
    )


def _from_llama(config: Config, found: str) -> ModelShape:
    if any(layer != "full_attention" for layer in config.get("layer_types") or ()):
        _require(config, "layer_types", ["full_attention"])
    bias = _get(config, "attention_bias", bool, False)
    if found == "llama":
        _require({"mlp_bias": False} | config, "mlp_bias", bias)
    base, scaling = _rotary(config)
    width, heads = _get(config, "hidden_size", int), _get(config, "num_attention_heads", int)
    k = _get(config, "num_key_value_heads", int, heads)
    d = _get(config, "head_dim", int, 128 if found == "qwen3" else width // max(heads, 1))
    return ModelShape(
        layers=_get(config, "num_hidden_layers", int),
        width=width,
        heads=heads,
        kv_heads=None if k == heads else k,
        head_size=None if d * heads == width else d,
        ffn=_get(config, "intermediate_size", int),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "max_position_embeddings", int),
        epsilon=_get(config, "rms_norm_eps", float, 1e-6),
        rotary_base=base,
        rotary_scaling=scaling,
        bias=bias,
        tied=_get(config, "tie_word_embeddings", bool, False),
        query_key_norm=found == "qwen3",
    )


def _rotary(config: Config) -> tuple[float, RotaryScaling | None]:
    """θ and scaling, from transformers 5's rope_parameters or 4's rope_theta and rope_scaling."""
    rope = config | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    _require(rope, "partial_rotary_factor", 1.0)
    base = _get(rope, "rope_theta", float, 10_000.0)
    named = rope.get("rope_type", rope.get("type", "default"))
    if named == "default":
        return base, None
    if named != "llama3":
        raise BadInput(
            f"config.json has rope_type {named!r}, and howdah computes default and llama3: "
            "choose another model"
        )
    return base, RotaryScaling(
        factor=_get(rope, "factor", float),
        low=_get(rope, "low_freq_factor", float),
        high=_get(rope, "high_freq_factor", float),
        context=_get(rope, "original_max_position_embeddings", int),
    )
