"""A config.json of Hugging Face for a model of ours, by the table that `huggingface.py` reads with.

These of transformers' classes compute exactly what a ModelShape can describe:

    LlamaForCausalLM       rotary, RMSNorm, SwiGLU; biases in every matrix or in none
    Qwen2ForCausalLM       the same, with biases of query, key and value alone
    Qwen3ForCausalLM       the same without biases, and a norm over each head of query and key
    GPT2LMHeadModel        learned positions, LayerNorm, GELU (tanh form) or ReLU, biases
    BloomForCausalLM       ALiBi, LayerNorm also behind the embedding, GELU, biases
    BertForMaskedLM        no mask of order, norms behind, token types, a transform before the head
    RobertaForMaskedLM     the same, with two rows of positions in front
    T5ForConditionalGeneration  two stacks, relative positions; ReLU and a tied head that is
                           divided by √width, or a gated GELU and a head of its own, in any pair
    MixtralForCausalLM     a Llama with experts as wide as its feed-forward would be
    Qwen2MoeForCausalLM    a Qwen2 with experts, and a shared one that is weighed by a gate
    Qwen3MoeForCausalLM    a Qwen3 with experts
    DeepseekV2ForCausalLM  latent attention, shared experts, softmax scores
    DeepseekV3ForCausalLM  the same with sigmoid scores and biases of routers

With labels they are LlamaForSequenceClassification, BertForSequenceClassification and so on.

A shape that none of them describes is refused with the name of the field: a silent difference
would only show as worse text.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial, reduce
from typing import Any

from howdah.base.errors import UserError
from howdah.shapes.huggingface import CLASSIFIER, GROUPED, ONE_LABEL
from howdah.shapes.huggingface_names import MODEL_TYPES, SCALING
from howdah.shapes.shape import Experts, ModelShape, stated

Config = dict[str, Any]

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bloom": "BloomForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# Fields that decide whether a class computes the same; sizes are free.
DECIDING = (
    *("positions", "norm", "norm_at", "feedforward", "bias", "qk_norm", "family"),
    *("qkv_bias", "embedding_norm", "token_types", "transform", "latent"),
    *("first_position", "tie_embeddings"),
)


def kind(shape: ModelShape) -> str:
    """The model type that describes `shape`, such as llama. Else raises UserError."""
    shape = _language_model(shape)
    found = _nearest(shape)
    deciding = [*DECIDING, *(f"experts.{one.name}" for one in fields(Experts) if shape.experts)]
    for field in deciding:
        allowed = _allowed(shape, found, field)
        if allowed and _value(shape, field) not in allowed:
            raise UserError(
                f"model.{field} is {_value(shape, field)!r}, but {CLASSES[found]}, the nearest "
                f"class of Hugging Face, has {' or '.join(map(repr, allowed))}: this model can "
                "be kept as a checkpoint but not exported"
            )
    if found in ("llama", "qwen2", "qwen2_moe") and shape.width % shape.heads:
        raise UserError(
            f"model.width {shape.width} is no multiple of {shape.heads} heads, which "
            f"{CLASSES[found]} demands: this model can be kept as a checkpoint but not exported"
        )
    plain = shape.k == shape.heads and shape.d * shape.heads == shape.width
    if found in ("gpt2", "bloom", "bert", "roberta") and not plain:
        raise UserError(
            f"{CLASSES[found]} has as many key-value heads as heads, and heads of width / heads "
            f"numbers, not model.kv_heads {shape.k} and model.head_size {shape.d}: this model "
            "can be kept as a checkpoint but not exported"
        )
    if found == "bloom" and shape.ffn_size != 4 * shape.width:
        raise UserError(
            f"model.ffn_size is {shape.ffn_size}, but BloomForCausalLM has 4 times the width, "
            f"{4 * shape.width}: this model can be kept as a checkpoint but not exported"
        )
    return found


def _language_model(shape: ModelShape) -> ModelShape:
    """The model with the head of its type's language model, in the place of one for labels."""
    if not shape.labels:
        return shape
    masks = shape.family == "encoder"
    return replace(shape, labels=(), tie_embeddings=masks, transform=masks)


def class_of(shape: ModelShape) -> str:
    """The class of transformers that computes what `shape` describes. Raises UserError."""
    name = CLASSES[kind(shape)]
    if not shape.labels:
        return name
    return name.removesuffix("LMHeadModel").partition("For")[0] + CLASSIFIER


def _nearest(shape: ModelShape) -> str:
    """The model type that comes closest to `shape`."""
    if shape.family == "encoder-decoder":
        return "t5"
    if shape.family == "encoder":
        return "roberta" if shape.first_position else "bert"
    if shape.positions in ("learned", "alibi"):
        return "gpt2" if shape.positions == "learned" else "bloom"
    experts = shape.experts
    if shape.latent:
        return "deepseek_v3" if experts and experts.scores == "sigmoid" else "deepseek_v2"
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else ""
    if experts:
        return f"{family}_moe" if family else "mixtral"
    return family or "llama"


def _value(shape: ModelShape, field: str) -> Any:
    """The value of a field; `experts.scale` is a field of `experts`."""
    return reduce(getattr, field.split("."), shape)


def _allowed(shape: ModelShape, found: str, field: str) -> tuple[object, ...]:
    """The values of a field that models of a type can have; empty if all."""
    of, name = MODEL_TYPES[found], field.rpartition(".")[2]
    if field == "latent" and "latent.kv_rank" in of.names:
        return ()
    each = shape.experts.ffn_size if shape.experts else 1  # as wide is a shared one of DeepSeek
    shared = shape.experts.shared // each * each if shape.experts else 0
    one = {
        "mixtral experts.ffn_size": shape.ffn_size,
        "deepseek_v2 experts.shared": shared,
        "deepseek_v3 experts.shared": shared,
    }.get(f"{found} {field}")
    if one is not None:
        return (one,)
    setting = of.names.get(field)
    if setting is None:
        default = getattr(Experts if "." in field else ModelShape, name)
        return (of.always.get(field, default),)
    sizes = setting.kind is int and not setting.words
    if ("." in field or sizes) and setting.name not in of.fixed:
        return ()
    if setting.name in of.fixed:
        return (of.fixed[setting.name],)
    return tuple(dict.fromkeys(setting.words.values())) or (False, True)


def config(
    shape: ModelShape, *, end: int, dtype: str, start: int = 0, pad: int | None = None
) -> Config:
    """The contents of config.json for `shape`, as transformers 4 and 5 read it.

    end    id of the token that stands between documents: it begins and ends a text
    start  id of the token of padding, with which a decoder behind an encoder begins
    pad    id of the token behind shorter texts, of a model with labels
    dtype  of the stored weights, such as "float32"
    """
    found = kind(shape)
    common: Config = {
        "architectures": [class_of(shape)],
        "model_type": found,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,  # transformers 5
        "torch_dtype": dtype,  # transformers 4
    }
    labels, shape = shape.labels, _language_model(shape)
    full, sizes = stated(shape), {}
    for field, setting in MODEL_TYPES[found].names.items():
        value = _value(full, field)
        if shape.latent and field in ("kv_heads", "head_size"):
            value = shape.heads if field == "kv_heads" else shape.latent.qk_rope_size
        if shape.experts and field == "experts.shared" and found.startswith("deepseek"):
            value //= shape.experts.ffn_size
        words = (word for word, ours in setting.words.items() if ours == value)
        sizes[setting.name] = next(words, value)
    beyond: dict[str, Callable[[ModelShape], Config]] = {
        "gpt2": _gpt2,
        "bloom": lambda _: {},
        "bert": _bert,
        "roberta": _bert,
        "t5": lambda _: _t5(start),
    }
    found_sizes = common | sizes | beyond.get(found, partial(_llama, found=found))(shape)
    return found_sizes | (_classifier(labels, pad) if labels else {})


def _classifier(labels: tuple[str, ...], pad: int | None) -> Config:
    """The names of labels; and the token that is not looked at for the last of a text."""
    return {
        "id2label": {str(place): label for place, label in enumerate(labels)},
        "label2id": {label: place for place, label in enumerate(labels)},
        "problem_type": ONE_LABEL,
        "pad_token_id": pad,
    }


def _gpt2(shape: ModelShape) -> Config:
    """What the table does not name: no dropout."""
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return {"n_ctx": shape.context, **dropout}


def _bert(shape: ModelShape) -> Config:
    """No dropout; and no token whose row of the embedding would not be trained."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rows = shape.context + shape.first_position
    pad = shape.first_position - 1 if shape.first_position else None
    return {"max_position_embeddings": rows, "pad_token_id": pad, **dropout}


def _t5(start: int) -> Config:
    """No dropout. transformers 5 takes a head that is not tied for one whose input is not divided
    by √width, which is so of both kinds.
    """
    tokens = {"pad_token_id": start, "decoder_start_token_id": start}
    fixed = {name: value for name, value in MODEL_TYPES["t5"].fixed.items() if value is not None}
    return {"dropout_rate": 0.0, "is_encoder_decoder": True, **tokens, **fixed}


def _llama(shape: ModelShape, found: str) -> Config:
    rope: Config = {"rope_type": "default"}
    context = shape.context
    if scaling := shape.rope_scaling:
        rope = {"rope_type": scaling.kind}
        for field, place in SCALING[scaling.kind].items():
            if (value := getattr(scaling, field)) != place.absent:
                rope[place.name] = value
        context = scaling.context if scaling.kind == "dynamic" else context
    fixed = {name: value for name, value in MODEL_TYPES[found].fixed.items() if value is not None}
    if shape.latent and shape.latent.query_rank == 0:
        fixed["q_lora_rank"] = None
    if shape.experts and found == "deepseek_v2":
        fixed["topk_method"] = GROUPED if shape.experts.groups > 1 else "greedy"
    more = fixed | {
        "rope_parameters": rope | {"rope_theta": shape.rope_theta},  # transformers 5
        "rope_scaling": rope if shape.rope_scaling else None,  # transformers 4, with rope_theta
        "max_position_embeddings": context,
    }
    return more | ({"mlp_bias": shape.bias} if found == "llama" else {})
