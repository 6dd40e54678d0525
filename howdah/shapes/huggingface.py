"""The sizes of a model as Hugging Face's config.json says them.

    model_type                        what is read besides the usual sizes
    gpt2, opt, bloom                  positions: learned, learned, alibi
    bert, roberta                     token types, transform in front of the head
    t5                                two stacks; 1.0 with relu, 1.1 gated
    llama, mistral                    biases in all matrices (llama)
    qwen2, qwen3                      biases of query, key and value; norms of query and key
    mixtral, qwen3_moe                experts
    deepseek_v2, deepseek_v3          experts, shared experts, latent attention

A setting that would change what a ModelShape says, and that it cannot say, is refused with its
name: a silent difference would only show as worse text, or as a plan for another model. What
changes no size is not looked at in the families that are only planned.

`huggingface_names.py` has the names; here is how they are read, and what no name alone says.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from howdah.base.errors import UserError, named, shown
from howdah.base.files import kind_of, parse_json, read_file
from howdah.shapes.check import require_shape
from howdah.shapes.huggingface_names import DEFAULTS, LLAMA, MODEL_TYPES, SCALING, Setting
from howdah.shapes.shape import Experts, Latent, ModelShape, RopeScaling, with_labels

Config = dict[str, Any]
T = TypeVar("T")

CLASSIFIER = "ForSequenceClassification"  # how the classes end that have a head for labels
ONE_LABEL = "single_label_classification"  # for each text; others have several, or a number
GROUPED = "group_limited_greedy"  # DeepSeek-V2's name for a choice among groups of experts
LARGEST = 16 << 20  # bytes: the list of the weights of a model with 256 experts a layer has 9 MB


def model_of(source: Path | Config) -> ModelShape:
    """The sizes that a config.json describes: the file, its folder, or what it contains.

    Raises UserError, with the name of the file and the setting, for what cannot be read.
    """
    if isinstance(source, dict):
        return shape_from_config(source)
    return _of_file(source, shape_from_config)


def sizes_of(source: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """The sizes for a plan, and a note for each setting that changes no size and is left out.

    For a model type that is not read, the error names a plan of a Llama of these sizes.
    """
    return _of_file(source, _planned)


def _of_file(source: Path, read: Callable[[Config], T]) -> T:
    file = source / "config.json" if kind_of(source) == "folder" else source
    config = read_json(file)
    try:
        return read(config)
    except UserError as problem:
        raise UserError(f"{named(file)}: {problem}") from None


def _planned(config: Config) -> tuple[ModelShape, tuple[str, ...]]:
    if str(config.get("model_type")) not in MODEL_TYPES:
        raise UserError(f"{_unknown(config)}{_as_llama(config)}")
    stretched = _rope_type(_with_rope(config))
    if stretched in ("default", *SCALING):
        return shape_from_config(config), ()
    rope = _get(config, Setting("rope_parameters", {}, dict), {})
    kept = {name: value for name, value in rope.items() if name == "rope_theta"}
    plain = {**config, "rope_scaling": None, "rope_parameters": kept}
    note = f"rope_type {shown(stretched)} of config.json changes no size; the plan leaves it out"
    return shape_from_config(plain), (note,)


def _unknown(config: Config) -> str:
    return (
        f"config.json has model_type {shown(config.get('model_type'))}; howdah reads "
        f"{', '.join(MODEL_TYPES)}"
    )


def _as_llama(config: Config) -> str:
    """How sizes with the usual names can be planned; empty if some have other names."""
    sizes = {name: config.get(place.name) for name, place in LLAMA.items() if place.kind is int}
    given = {name: size for name, size in sizes.items() if type(size) is int}
    if not {"layers", "width", "heads", "ffn_size", "vocab"} <= given.keys():
        return ": choose one of these models"
    keys = " ".join(f"model.{name}={size}" for name, size in given.items())
    if config.get("tie_word_embeddings") is True:  # the preset's head is a matrix of its own
        keys += " model.tie_embeddings=true"
    return f"; to plan a Llama of its sizes, give them to a preset: howdah plan llama2-7b {keys}"


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
    if not isinstance(found, str) or found not in MODEL_TYPES:
        raise UserError(f"{_unknown(config)}: choose one of these models")
    _require_plain(config)
    family = MODEL_TYPES[found]
    for setting, value in family.fixed.items():
        _require(config, setting, value)
    config = DEFAULTS.get(found, {}) | config
    if "rope_theta" in family.names:
        config = _with_rope(config)
    sizes: Config = {}
    for field, place in family.names.items():
        group, _, name = field.rpartition(".")  # such as "latent"
        inside = sizes.setdefault(group, {}) if group else sizes
        inside[name] = _get(config, place, sizes)
    for field, value in family.always.items():
        group, _, name = field.rpartition(".")
        (sizes.setdefault(group, {}) if group else sizes)[name] = value
    shape = ModelShape(**sizes | _beyond_names(config, sizes, found))
    if labels := _labels(config):
        shape = with_labels(shape, labels)
    require_shape(shape)
    return shape


def _labels(config: Config) -> tuple[str, ...]:
    """The names of the labels of a ...ForSequenceClassification; empty for other classes."""
    classes = _get(config, Setting("architectures", [], list), {})
    if not any(str(one).endswith(CLASSIFIER) for one in classes):
        return ()
    kind = config.get("problem_type")
    _require({"problem_type": kind or ONE_LABEL}, "problem_type", ONE_LABEL)
    number = _get(config, Setting("num_labels", 2), {})
    usual = {str(place): f"LABEL_{place}" for place in range(number)}
    found = _get(config, Setting("id2label", usual, dict), {})
    names = [found.get(str(place)) for place in range(len(found))]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"config.json has id2label {shown(found)}; name labels 0, 1 and so on")
    return tuple(map(str, names))


# -- one setting ---------------------------------------------------------------


def _require_plain(config: Config) -> None:
    """Weights as they are, or in 8 bits with a number for each block (`model/hub_fp8.py`)."""
    given = config.get("quantization_config")
    if given is None or (isinstance(given, dict) and given.get("quant_method") == "fp8"):
        return
    method = given.get("quant_method") if isinstance(given, dict) else given
    raise UserError(
        f"config.json has a quantization_config of {shown(method)}, and howdah reads plain weights "
        "and fp8 alone: choose another model, or its unquantised weights"
    )


def _require(config: Config, setting: str, value: object) -> None:
    if config.get(setting, value) != value:
        raise UserError(
            f"config.json has {setting} {shown(config[setting])}, and howdah computes only "
            f"{value!r}: choose another model"
        )


def _get(config: Config, setting: Setting, sizes: Config) -> Any:
    """The value of a setting, which must be of its kind, in our words.

    sizes  those that were read before, for a setting that follows from them where it is absent
    """
    name, kind, absent = setting.name, setting.kind, setting.absent
    given = [config[one] for one in (name, setting.also) if config.get(one) is not None]
    value = given[0] if given else absent(sizes) if callable(absent) else absent
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not kind:
        said = "has no" if value is None else f"has {shown(value)} for"
        raise UserError(f"config.json {said} {name}; give it as {kind.__name__}")
    if not setting.words:
        return value
    if value not in setting.words:
        _require(config, name, absent)
    return setting.words[value]


# -- what a name alone does not say --------------------------------------------


def _beyond_names(config: Config, sizes: Config, found: str) -> Config:
    """Fields that follow from several settings, or from none."""
    if "rope_theta" in sizes:
        return _llama(config, sizes, found)
    if found == "opt":
        _require(config, "word_embed_proj_dim", sizes["width"])
        return {"context": sizes["context"] + 2}  # rows before the first token's
    if found == "bloom":
        return {"ffn_size": 4 * sizes["width"]}
    if found == "roberta":
        return {"context": sizes["context"] - sizes["first_position"]}
    if found == "t5":
        # 1.1 unties the head; transformers 5 writes that as a head whose input is not scaled
        scaled = _get(config, Setting("scale_decoder_outputs", True, bool), sizes)
        return {"tie_embeddings": sizes["tie_embeddings"] and scaled}
    return {}


def _llama(config: Config, sizes: Config, found: str) -> Config:
    """Llama and its descendants. Key-value heads and a head's size are given where they differ
    from what follows, and latent attention has neither.
    """
    layers = _get(config, Setting("layer_types", [], list), sizes)
    if any(layer != "full_attention" for layer in layers):
        _require(config, "layer_types", ["full_attention"])
    if found == "llama":
        _require({"mlp_bias": False} | config, "mlp_bias", sizes["bias"])
    latent, experts = sizes.get("latent"), sizes.get("experts")
    fields: Config = {"rope_scaling": _scaling(config, sizes)}
    if _rope_type(config) == "dynamic":  # its setting is the context before the stretching
        fields["context"] = round(fields["rope_scaling"].factor * sizes["context"])
    if latent or sizes["kv_heads"] == sizes["heads"]:
        fields["kv_heads"] = None
    if latent or sizes["head_size"] * sizes["heads"] == sizes["width"]:
        fields["head_size"] = None
    if latent:
        fields["latent"] = Latent(**latent)
    if experts and found in ("deepseek_v2", "deepseek_v3"):
        # the shared ones are counted in config.json, and each is as wide as the others
        experts["shared"] *= experts["ffn_size"]
        greedy = Setting("topk_method", "greedy", str, words={"greedy": "", GROUPED: "groups"})
        if found == "deepseek_v2" and not _get(config, greedy, sizes):
            experts["groups"] = experts["top_groups"] = 1
    if experts:
        fields["experts"] = Experts(**experts)
    if found == "mistral":  # inside the window, its attention is full
        window = _get(config, Setting("sliding_window", sizes["context"]), sizes)
        fields["context"] = min(sizes["context"], window)
    return fields


def _with_rope(config: Config) -> Config:
    """Settings of rotary positions beside the others, from where transformers 5 or 4 has them."""
    older = _get(config, Setting("rope_scaling", {}, dict), {})
    newer = _get(config, Setting("rope_parameters", {}, dict), {})
    return {**config, **(newer or older)}


def _rope_type(config: Config) -> object:
    return config.get("rope_type", config.get("type", "default"))


def _scaling(config: Config, sizes: Config) -> RopeScaling | None:
    """How rotary positions are stretched."""
    _require(config, "partial_rotary_factor", 1.0)
    form = _rope_type(config)
    if form == "default":
        return None
    if form not in (*SCALING,):
        raise UserError(
            f"config.json has rope_type {shown(form)}, and howdah computes default, "
            f"{', '.join(SCALING)}: choose another model"
        )
    found = {field: _get(config, place, sizes) for field, place in SCALING[str(form)].items()}
    if form == "dynamic":
        found["context"] = sizes["context"]
    return RopeScaling(**found | {"kind": form})
