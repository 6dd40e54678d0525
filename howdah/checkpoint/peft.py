"""Adapters in PEFT's files (https://github.com/huggingface/peft, 0.21), written and read.

    TO/
      adapter_config.json         rank, alpha, targets, the folder of the base
      adapter_model.safetensors   base_model.model.<their matrix>.lora_A.weight [r, in], … lora_B,
                                  with use_dora … lora_magnitude_vector [out]

Where transformers keeps several of our matrices as one (GPT-2's q, k and v), PEFT has one adapter
for all of them, which ours are not: then only merged weights can be exported. PEFT's files do not
say which weights an adapter belongs to; ours do, in the header of the safetensors file.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, brief, named, several, shown
from howdah.base.files import kind_of, parse_json, read_file
from howdah.checkpoint.safefile import Spec, read_header, write
from howdah.model.hub_names import HubTensor, names
from howdah.plan.method import Adapter
from howdah.plan.trained import MAGNITUDE, base_of, is_magnitude
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "howdah_base_crc32"  # in the header of a safetensors file
FIXED: Mapping[str, Any] = {  # what changes the result, with the value that ours have
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
OTHERS = (  # forms of an adapter that are computed in another way, where they are set
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"),
    *("monteclora_config", "use_bdlora", "use_qalora"),
)
BESIDE_ITS_BASE = (True, False, None, "eva", "gaussian", "orthogonal")  # PEFT's others change it
TASKS = {"decoder": "CAUSAL_LM", "encoder": None, "encoder-decoder": "SEQ_2_SEQ_LM"}


def write_peft(
    to: Path,
    *,
    shape: ModelShape,
    adapter: Adapter,
    targets: Sequence[str],
    base: tuple[str, int],
    tensor: Callable[[str], Tensor],
) -> None:
    """Writes the folder `to`, which must be free.

    targets  our names of the matrices with an adapter
    base     the folder of the base, and its checksum
    tensor   returns one of our weights

    Raises UserError where PEFT has no such adapter, and when it cannot be written.
    """
    theirs = _theirs(shape, targets)
    if kind_of(to) != "does not exist" and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{named(to)} is not empty; choose another folder to export to")
    config = {
        **FIXED,
        "use_dora": adapter.measures,
        "task_type": "SEQ_CLS" if shape.labels else TASKS.get(shape.family),
        "base_model_name_or_path": base[0],
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": _modules(theirs.values(), names(shape)),
        "fan_in_fan_out": any(one.transposed for one in theirs.values()),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    found = {stored: tensor(ours) for stored, ours in _stored(theirs, adapter).items()}
    specs = [Spec(name, tuple(x.shape), x.dtype) for name, x in found.items()]
    header = {"format": "pt", BASE: str(base[1])}
    try:
        to.mkdir(parents=True, exist_ok=True)
        write(to / WEIGHTS, specs, tensors=iter(found.values()), metadata=header)
        write_text(to / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        shutil.rmtree(to, ignore_errors=True)
        raise UserError(
            f"cannot export to {named(to)}: {error.strerror or error}; choose another folder"
        ) from error


def read_peft(
    folder: Path,
    *,
    shape: ModelShape,
    adapter: Adapter,
    targets: Sequence[str],
    base: Callable[[], int],
) -> Callable[[str], Tensor]:
    """A function from our names to the matrices of an adapter in PEFT's files.

    base  returns the checksum of the base that it is to stand beside; called where files have one

    Raises UserError when it is not of `adapter` and `targets`, or of another base.
    """
    _refuse_other(folder, adapter)
    path = folder / WEIGHTS
    if kind_of(path) != "file":
        raise UserError(f"init_adapter: {named(path)} is missing; name a folder that PEFT wrote")
    header = read_header(path)
    of = (header.metadata or {}).get(BASE, "")
    if of and of != str(base()):
        raise UserError(
            f"init_adapter: the adapter in {named(folder)} was trained beside another base than "
            "init_from names: their checksums differ; name its own base by init_from"
        )
    theirs = _theirs(shape, targets)
    wanted = _stored(theirs, adapter)
    if missing := sorted({*wanted} ^ {*header.entries}):
        has, other = ("lacks", "has") if missing[0] in wanted else ("has", "lacks")
        raise UserError(
            f"init_adapter: {named(path)} {has} {missing[0]}, which method.adapter.targets "
            f"{other}; give the targets of the folder"
        )
    there = {ours: name for name, ours in wanted.items()}

    def tensor(name: str) -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(there[name])
        except (SafetensorError, OSError) as error:
            raise UserError(f"init_adapter: cannot read {named(path)}: {brief(error)}") from error
        return found

    _refuse_sizes(path, shape, adapter, there, tensor)
    return tensor


def _refuse_other(folder: Path, adapter: Adapter) -> None:
    """Refuses files whose settings are not those of `adapter`."""
    config = _config(folder)
    problems = [*_other_settings(config)]
    for key, mine, word in (
        ("r", adapter.rank, "rank"),
        ("lora_alpha", adapter.alpha, "alpha"),
    ):
        if config.get(key) != mine:
            said = shown(config.get(key))
            problems.append(f"{key} {said}, and method.adapter.{word} is {mine:g}")
    problems += [f"{key}, which howdah has not" for key in OTHERS if config.get(key)]
    if (begun := config.get("init_lora_weights")) not in BESIDE_ITS_BASE:
        problems.append(
            f"init_lora_weights {shown(begun)}, which changes the base too; let PEFT save it with "
            "path_initial_model_for_weight_conversion"
        )
    if bool(config.get("use_dora")) != adapter.measures:
        said = shown(bool(config.get("use_dora")))
        problems.append(f"use_dora {said}, and method.adapter.kind is {adapter.kind}")
    if problems:
        raise UserError(f"init_adapter: {named(folder / CONFIG)} has {several(problems)}")


def _refuse_sizes(
    path: Path,
    shape: ModelShape,
    adapter: Adapter,
    there: Mapping[str, str],
    tensor: Callable[[str], Tensor],
) -> None:
    """Refuses matrices that do not fit beside the model, and numbers that are not finite."""
    sizes = {row.name: row.shape for row in weights(shape)}
    for name, stored in there.items():
        found = tensor(name)
        out, inner = sizes[base_of(name)]
        size: tuple[int, ...] = (out,) if is_magnitude(name) else (out, adapter.rank)
        if ".lora_a." in name:
            size = adapter.rank, inner
        if found.shape != size:
            raise UserError(
                f"init_adapter: {stored} in {named(path)} is {list(found.shape)}, and one of "
                f"{list(size)} fits beside this model; name an adapter of its size"
            )
        if not found.isfinite().all():
            raise UserError(
                f"init_adapter: {stored} in {named(path)} is not finite; name another folder"
            )


def _other_settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is set otherwise than ours is."""
    for key, value in FIXED.items():
        if config.get(key, value) == value or not (config.get(key) or value):
            continue
        if key == "modules_to_save":
            yield (
                f"modules_to_save {shown(config[key])}, whole weights that are not read here; "
                "merge the adapter in PEFT, and name the merged model by init_from"
            )
        else:
            yield f"{key} {shown(config[key])}, and howdah has {shown(value)}"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if kind_of(path) != "file":
        raise UserError(
            f"init_adapter: {named(folder)} has no {CONFIG}; name a folder that PEFT or howdah "
            "export --adapter wrote"
        )
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UserError(f"init_adapter: cannot read {named(path)}: {brief(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"init_adapter: {named(path)} is no table of settings")
    return found


def _theirs(shape: ModelShape, targets: Sequence[str]) -> dict[str, HubTensor]:
    """Their tensor of each target."""
    of = {ours: theirs for theirs in names(shape) for ours in theirs.ours}
    for target in targets:
        if len(of[target].ours) > 1:
            fused = of[target].name.removesuffix(".weight")
            raise UserError(
                f"transformers keeps {target} inside of {fused}, for which PEFT has one adapter: "
                "export the merged weights instead, without --adapter"
            )
    return {target: of[target] for target in targets}


def _module(one: HubTensor) -> str:
    return one.name.removesuffix(".weight")


def _stored(theirs: Mapping[str, HubTensor], adapter: Adapter) -> dict[str, str]:
    """PEFT's names of the matrices of an adapter, with ours."""
    found = {}
    for target, one in theirs.items():
        path, module = target.removesuffix(".weight"), f"{PREFIX}{_module(one)}"
        for side in "AB":
            found[f"{module}.lora_{side}.weight"] = f"{path}.lora_{side.lower()}.weight"
        if adapter.measures:
            found[f"{module}.lora_magnitude_vector"] = f"{path}{MAGNITUDE}"
    return found


def _modules(some: Iterable[HubTensor], every: Sequence[HubTensor]) -> list[str]:
    """What PEFT is to look for: the last words of the matrices, where all that end so are meant;
    or else their whole names.
    """
    mine = {_module(one) for one in some}
    leaves = {name.rpartition(".")[2] for name in mine}
    alike = {_module(one) for one in every if _module(one).rpartition(".")[2] in leaves}
    weights = {name for name in alike if not name.endswith(("bias", "norm"))}
    return sorted(leaves if weights == mine else mine)
