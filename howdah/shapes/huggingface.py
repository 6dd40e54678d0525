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
from howdah.shapes.huggingface_names import FAMILIES, SCALING, Setting
from howdah.shapes.shape import Experts, Latent, ModelShape, RotaryScaling

Config = dict[str, Any]

LARGEST = 16 << 20  # bytes: the list of the weights of a model with 256 experts a layer has 9 MB


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
    if not isinstance(found, str) or found not in FAMILIES:
        raise UserError(
            f"config.json has model_type {shown(found)}; howdah reads {', '.join(FAMILIES)}: choose "
            "one of these models"
        )
    if found != "deepseek_v3":  # which was trained and given out in 8 bits
        _require(config, "quantization_config", None)
    for setting, value in FAMILIES[found].fixed.items():
        _require(config, setting, value)
    rules = {"opt": _opt, "bloom": _bloom, "t5": _t5}
    if found in rules or found in ("gpt2", "bert"):
    ...


# -- one setting ---------------------------------------------------------------


def _require(config: Config, setting: str, value: object) -> None:
    if config.get(setting, value) != value:
        raise UserError(
            f"config.json has {setting} {shown(config[setting])}, and howdah computes only "
            f"{value!r}: choose another model"
        )

