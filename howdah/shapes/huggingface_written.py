"""A config.json of Hugging Face for a model of ours, by the table that `huggingface.py` reads with.

Three of transformers' classes compute exactly what a ModelShape can describe:

    LlamaForCausalLM   rotary, RMSNorm, SwiGLU; biases in every matrix or in none
    Qwen3ForCausalLM   the same without biases, and a norm over each head of query and key
    GPT2LMHeadModel    learned positions, LayerNorm, GELU (tanh form) or ReLU, biases

A shape that none of them describes is refused with the name of the field: a silent difference
would only show as worse text.
"""

from typing import Any

from howdah.base.errors import UserError
from howdah.shapes.huggingface_names import MODEL_TYPES, SCALING, ModelType
from howdah.shapes.shape import ModelShape, stated

Config = dict[str, Any]

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
# Fields that decide whether a class computes the same; sizes are free.
DECIDING = (
    *("positions", "norm", "norm_at", "feedforward", "bias", "qk_norm", "family"),
    *("qkv_bias", "embedding_norm", "token_types", "transform", "latent", "experts"),
)


def kind(shape: ModelShape) -> str:
    """The model type that describes `shape`: llama, qwen3 or gpt2. Else raises UserError."""
    found = "gpt2" if shape.positions == "learned" else "llama"
    found = "qwen3" if shape.qk_norm and found == "llama" else found
    for field in DECIDING:
        allowed = _allowed(MODEL_TYPES[found], field)
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


def _allowed(of: ModelType, field: str) -> tuple[object, ...]:
    """The values of a field that models of a type can have."""
    setting = of.names.get(field)
    if setting is None:
        return (of.always.get(field, getattr(ModelShape, field)),)
    if setting.name in of.fixed:
        return (of.fixed[setting.name],)
    return tuple(dict.fromkeys(setting.words.values())) or (False, True)


def config(shape: ModelShape, *, end: int, dtype: str) -> Config:
    """The contents of config.json for `shape`, as transformers 4 and 5 read it.

    end    id of the token that stands between documents: it begins and ends a text
    dtype  of the stored weights, such as "float32"
    """
    found = kind(shape)
    common: Config = {
        "architectures": [CLASSES[found]],
        "model_type": found,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,  # transformers 5
        "torch_dtype": dtype,  # transformers 4
    }
    full, sizes = stated(shape), {}
    for field, setting in MODEL_TYPES[found].names.items():
        value = getattr(full, field)
        words = (word for word, ours in setting.words.items() if ours == value)
        sizes[setting.name] = next(words, value)
    return common | sizes | (_gpt2(shape) if found == "gpt2" else _llama(shape, found))


def _gpt2(shape: ModelShape) -> Config:
    """What the table does not name: no dropout."""
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return {"n_ctx": shape.context, **dropout}


def _llama(shape: ModelShape, found: str) -> Config:
    rope: Config = {"rope_type": "default"}
    if scaling := shape.rope_scaling:
        sizes = {place.name: getattr(scaling, field) for field, place in SCALING.items()}
        rope = {"rope_type": "llama3", **sizes}
    more = {
        "hidden_act": "silu",
        "rope_parameters": rope | {"rope_theta": shape.rope_theta},  # transformers 5
        "rope_scaling": rope if shape.rope_scaling else None,  # transformers 4, with rope_theta
    }
    return more | ({"mlp_bias": shape.bias} if found == "llama" else {})
