"""The sizes of a model as Hugging Face's config.json says them.

    model_type                        what is read besides the usual sizes
    gpt2, opt, bloom                  positions: learned, learned, alibi
    bert                              token types, transform in front of the head
    t5                                two stacks; 1.0 with relu, 1.1 gated
    llama, mistral                    biases in all matrices (llama)
    qwen2, qwen3                      biases of query, key and value; norms of query and key
    mixtral, qwen3_moe                experts
    deepseek_v2, deepseek_v3          experts, shared experts, latent attention

A setting that would change what a ModelShape says, and that it cannot say, is refused with its
name: a silent difference would only show as worse text, or as a plan for another model. What
changes no size is not looked at in the families that are only planned: YaRN's stretching of
DeepSeek's positions, its router's scores, and whether BERT's GELU is exact.
"""

from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, named, shown
from howdah.base.files import kind_of, parse_json, read_file
from howdah.shapes.check import require_shape
from howdah.shapes.shape import Experts, FeedForward, Latent, ModelShape, RotaryScaling

Config = dict[str, Any]

LARGEST = 16 << 20  # bytes: the list of the weights of a model with 256 experts a layer has 9 MB

# Settings that change what is computed, with the value each must have where it is given.
FIXED: dict[str, Config] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "opt": {
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    "bloom": {"apply_residual_connection_post_layernorm": False},
    "bert": {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False},
    "t5": {"relative_attention_max_distance": 128},
    "llama": {"hidden_act": "silu"},
    "mistral": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu", "sliding_window": None},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "qwen3_moe": {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "mlp_only_layers": [],
    },
    "deepseek_v2": {"hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1},
    "deepseek_v3": {"hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1},
}
# What transformers takes where a setting is left out, if it is not what the others take.
DEFAULTS: dict[str, Config] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
}


def model_of(source: Path | Config) -> ModelShape:
    """The sizes that a config.json describes: the file, its folder, or what it contains.

    Raises UserError, with the name of the file and the setting, for what cannot be read.
    """
    if isinstance(source, dict):
        return shape_from_config(source)
    file = source / "config.json" if kind_of(source) == "folder" else source
    config = read_json(file)
    try:
        return shape_from_config(config)
    except UserError as problem:
        raise UserError(f"{named(file)}: {problem}") from None


def read_json(path: Path) -> Config:
    """The table that a file of a Hugging Face folder holds. Raises UserError."""
    try:
        found = parse_json(read_file(path, LARGEST))
    except OSError as error:
        raise UserError(
            f"cannot read {named(path)} ({error.strerror}); name the folder of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise UserError(f"{named(path)} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{named(path)} holds no table; download it again")
    return found


def shape_from_config(config: Config) -> ModelShape:
    """The sizes that a config.json describes.

    Raises UserError for a model type, or a setting, whose results would not be equal here.
    """
    found = config.get("model_type")
    if not isinstance(found, str) or found not in FIXED:
        raise UserError(
            f"config.json has model_type {shown(found)}; howdah reads {', '.join(FIXED)}: choose "
            "one of these models"
        )
    if found != "deepseek_v3":  # which was trained and given out in 8 bits
        _require(config, "quantization_config", None)
    for setting, value in FIXED[found].items():
        _require(config, setting, value)
    config = DEFAULTS.get(found, {}) | config
    readers = {"gpt2": _gpt2, "opt": _opt, "bloom": _bloom, "bert": _bert, "t5": _t5}
    shape = readers[found](config) if found in readers else _llama(config, found)
    require_shape(shape)
    return shape


# -- one setting ---------------------------------------------------------------


def _require(config: Config, setting: str, value: object) -> None:
    if config.get(setting, value) != value:
        raise UserError(
            f"config.json has {setting} {shown(config[setting])}, and howdah computes only "
            f"{value!r}: choose another model"
        )


def _get(config: Config, name: str, kinds: type, default: Any = None) -> Any:
    """config[name], which must be of the right kind; null means the default."""
    value = config.get(name)
    value = default if value is None else value
    if kinds is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not kinds:
        said = "has no" if value is None else f"has {shown(value)} for"
        raise UserError(f"config.json {said} {name}; give it as {kinds.__name__}")
    return value


def _tied(config: Config, *, default: bool) -> bool:
    return bool(_get(config, "tie_word_embeddings", bool, default))


# -- before Llama --------------------------------------------------------------


def _gpt2(config: Config) -> ModelShape:
    width = _get(config, "n_embd", int)
    activation = _get(config, "activation_function", str, "gelu_new")
    known: dict[str, FeedForward] = {
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "relu": "relu",
    }
    if activation not in known:
        _require(config, "activation_function", "gelu_new")
    return ModelShape(
        layers=_get(config, "n_layer", int),
        width=width,
        heads=_get(config, "n_head", int),
        ffn=_get(config, "n_inner", int, 4 * width),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "n_positions", int),
        feedforward=known[activation],
        norm="layernorm",
        epsilon=_get(config, "layer_norm_epsilon", float, 1e-5),
        positions="learned",
        bias=True,
        tied=_tied(config, default=True),
    )


def _opt(config: Config) -> ModelShape:
    width = _get(config, "hidden_size", int)
    _require(config, "word_embed_proj_dim", width)
    return ModelShape(
        layers=_get(config, "num_hidden_layers", int),
        width=width,
        heads=_get(config, "num_attention_heads", int),
        ffn=_get(config, "ffn_dim", int),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "max_position_embeddings", int) + 2,  # rows before the first token's
        feedforward="relu",
        norm="layernorm",
        positions="learned",
        bias=True,
        tied=_tied(config, default=True),
    )


def _bloom(config: Config) -> ModelShape:
    width = _get(config, "n_embed", int, config.get("hidden_size"))
    return ModelShape(
        layers=_get(config, "n_layer", int, config.get("num_hidden_layers")),
        width=width,
        heads=_get(config, "n_head", int, config.get("num_attention_heads")),
        ffn=4 * width,
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "seq_length", int, 2048),
        feedforward="gelu",
        norm="layernorm",
        epsilon=_get(config, "layer_norm_epsilon", float, 1e-5),
        positions="alibi",
        bias=True,
        tied=_tied(config, default=True),
        embedding_norm=True,
    )


def _bert(config: Config) -> ModelShape:
    return ModelShape(
        family="encoder",
        layers=_get(config, "num_hidden_layers", int),
        width=_get(config, "hidden_size", int),
        heads=_get(config, "num_attention_heads", int),
        ffn=_get(config, "intermediate_size", int),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "max_position_embeddings", int),
        feedforward="gelu",
        norm="layernorm",
        norm_at="after",
        epsilon=_get(config, "layer_norm_eps", float, 1e-12),
        positions="learned",
        bias=True,
        tied=_tied(config, default=True),
        embedding_norm=True,
        token_types=_get(config, "type_vocab_size", int),
        transform=True,
    )


def _t5(config: Config) -> ModelShape:
    activation = _get(config, "feed_forward_proj", str, "relu")
    known: dict[str, FeedForward] = {"relu": "relu", "gated-gelu": "geglu"}
    if activation not in known:
        _require(config, "feed_forward_proj", "relu")
    encoder_layers = _get(config, "num_layers", int)
    # 1.1 unties the head; transformers 5 writes that as a head whose input is not scaled
    scaled = _get(config, "scale_decoder_outputs", bool, True)
    return ModelShape(
        family="encoder-decoder",
        layers=_get(config, "num_decoder_layers", int, encoder_layers),
        encoder_layers=encoder_layers,
        width=_get(config, "d_model", int),
        heads=_get(config, "num_heads", int),
        head_size=_get(config, "d_kv", int),
        ffn=_get(config, "d_ff", int),
        vocab=_get(config, "vocab_size", int),
        context=_get(config, "n_positions", int, 512),
        feedforward=known[activation],
        epsilon=_get(config, "layer_norm_epsilon", float, 1e-6),
        positions="relative",
        buckets=_get(config, "relative_attention_num_buckets", int, 32),
        tied=_tied(config, default=True) and scaled,
    )


# -- Llama and its descendants -------------------------------------------------


def _llama(config: Config, found: str) -> ModelShape:
    if any(layer != "full_attention" for layer in _get(config, "layer_types", list, [])):
        _require(config, "layer_types", ["full_attention"])
    bias = _get(config, "attention_bias", bool, False)
    if found == "llama":
        _require({"mlp_bias": False} | config, "mlp_bias", bias)
    latent = _latent(config) if found.startswith("deepseek") else None
    base, scaling = _rotary(config, stretched="yarn" if latent else "llama3")
    width, heads = _get(config, "hidden_size", int), _get(config, "num_attention_heads", int)
    k = _get(config, "num_key_value_heads", int, heads)
    d = _get(config, "head_dim", int, width // max(heads, 1))
    context = _get(config, "max_position_embeddings", int)
    if found == "mistral":  # inside the window, its attention is full
        context = min(context, _get(config, "sliding_window", int, context))
    return ModelShape(
        layers=_get(config, "num_hidden_layers", int),
        width=width,
        heads=heads,
        kv_heads=None if k == heads or latent else k,
        head_size=None if d * heads == width or latent else d,
        ffn=_get(config, "intermediate_size", int),
        vocab=_get(config, "vocab_size", int),
        context=context,
        epsilon=_get(config, "rms_norm_eps", float, 1e-6),
        rotary_base=base,
        rotary_scaling=scaling,
        bias=bias,
        tied=_tied(config, default=False),
        qkv_bias=found == "qwen2",
        query_key_norm=found in ("qwen3", "qwen3_moe"),
        latent=latent,
        experts=_experts(config, found),
    )


def _latent(config: Config) -> Latent:
    return Latent(
        kv_rank=_get(config, "kv_lora_rank", int),
        query_rank=_get(config, "q_lora_rank", int, 0),
        plain=_get(config, "qk_nope_head_dim", int),
        rotary=_get(config, "qk_rope_head_dim", int),
        value=_get(config, "v_head_dim", int),
    )


def _experts(config: Config, found: str) -> Experts | None:
    if found not in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        return None
    chosen = _get(config, "num_experts_per_tok", int)
    if found == "mixtral":
        number, ffn = _get(config, "num_local_experts", int), _get(config, "intermediate_size", int)
        return Experts(number, chosen, ffn)
    ffn = _get(config, "moe_intermediate_size", int)
    if found == "qwen3_moe":
        number = _get(config, "num_experts", int, config.get("num_local_experts"))
        return Experts(number, chosen, ffn, every=_get(config, "decoder_sparse_step", int, 1))
    return Experts(
        _get(config, "n_routed_experts", int),
        chosen,
        ffn,
        shared=_get(config, "n_shared_experts", int, 0) * ffn,
        first=_get(config, "first_k_dense_replace", int),
    )


def _rotary(config: Config, *, stretched: str) -> tuple[float, RotaryScaling | None]:
    """θ and scaling, from transformers 5's rope_parameters or 4's rope_theta and rope_scaling.

    stretched  the one form of stretching that this model may have; yarn is passed over
    """
    stretch = _get(config, "rope_scaling", dict, {})
    rope = config | (_get(config, "rope_parameters", dict, {}) or stretch)
    _require(rope, "partial_rotary_factor", 1.0)
    base = _get(rope, "rope_theta", float, 10_000.0)
    named = rope.get("rope_type", rope.get("type", "default"))
    if named not in ("default", stretched):
        raise UserError(
            f"config.json has rope_type {shown(named)}, and howdah computes default and "
            f"{stretched}: choose another model"
        )
    if named != "llama3":
        return base, None
    return base, RotaryScaling(
        factor=_get(rope, "factor", float),
        low=_get(rope, "low_freq_factor", float),
        high=_get(rope, "high_freq_factor", float),
        context=_get(rope, "original_max_position_embeddings", int),
    )
