"""Reading the weights of Hugging Face folders; `hub_names.py` has the names and the layout.

Reading a folder opens each file's header, checks every name and shape, and returns a function
that reads one tensor per call. The library transformers is not imported, and pickle files are
refused: unpickling runs any code that the file names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from howdah.base.errors import UserError, brief, named, shown
from howdah.base.files import kind_of, path_problem
from howdah.model.hub_fp8 import EIGHT_BITS, SCALE_TYPES, SCALES, Block, block_of, grid, widened
from howdah.model.hub_names import HubTensor, names
from howdah.shapes.huggingface import read_json, shape_from_config
from howdah.shapes.huggingface_written import CLASSES, kind
from howdah.shapes.shape import ModelShape, with_labels

# prefixes; missing when a model was saved without its head
STEMS = ("model.", "transformer.", "bert.", "roberta.")
OLDER = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))  # of BERT
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids")  # old files'
# what a masked language model does not compute with: for a sentence as a whole
BESIDE = (
    "EncDecAttention.relative_attention_bias.weight",  # in old files of T5, which never used it
    *("pooler.dense.weight", "pooler.dense.bias"),
    *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
)
TIED = ("lm_head.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of T5's embedding
TIED_BIAS = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")
READ = (*CLASSES, "mistral")  # up to its window, a Llama by another name
FLOATS = ("F64", "F32", "F16", "BF16")
OF_LABELS = ("pooler.", "head.")  # howdah's names
OF_TOKENS = ("lm_head.", "cls.")  # their heads of language models
EVERY = slice(None)  # rows


class Tensors(Protocol):
    """Reads a tensor, or some rows of it."""

    def __call__(self, name: str, rows: slice = EVERY) -> Tensor: ...


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: its file, and its name, shape and dtype there.

    scales  of one in 8 bits, the numbers of its blocks
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: "tuple[_Stored, Block] | None" = None


def read_hub(
    folder: Path,
    *,
    labels: tuple[str, ...] = (),
    fresh: Callable[[str], Tensor] | None = None,
) -> tuple[ModelShape, Tensors]:
    """Returns (sizes of the model in `folder`, function from howdah names to tensors).

    labels  of a model that is to tell texts apart. If that in the folder is a language model, its
            head is left out, and `fresh` returns the weights of one for labels, but a pooler that
            is in the folder is used

    The function reads one weight from disk at each call, in the stored dtype; it may be asked for
    some rows, and then reads no other experts.
    Raises UserError when the folder has no safetensors files, or when they do not contain exactly
    the weights of a model that howdah runs.
    """
    if problem := _no_model(folder):
        raise UserError(f"{named(folder)} {problem}")
    config = read_json(folder / "config.json")
    found_type = config.get("model_type")
    if not isinstance(found_type, str) or found_type not in READ:
        raise UserError(
            f"{named(folder)} holds a model of type {shown(found_type)}, which howdah does not "
            f"run; it runs {', '.join(READ)}"
        )
    shape = shape_from_config(config)
    begins = bool(labels) and not shape.labels
    shape = with_labels(shape, labels) if begins else shape
    stored = {tensor.name: tensor for file in _files(folder) for tensor in _headers(file)}
    _pair_scales(stored, block_of(config), folder)
    sources: dict[str, tuple[_Stored, slice, HubTensor]] = {}
    experts: dict[str, list[_Stored]] = {}
    drawn = set[str]()
    for theirs in names(shape):
        if begins and theirs.ours[0].startswith(OF_LABELS) and not _has(stored, theirs):
            drawn.update(theirs.ours)
            continue
        found = _take(stored, theirs, folder)
        if theirs.expert is not None:
            experts.setdefault(theirs.ours[0], []).append(found)
            continue
        start = 0
        for name, rows in zip(theirs.ours, theirs.rows, strict=True):
            sources[name] = found, slice(start, start + rows), theirs
            start += rows
    if begins:
        stored = {name: one for name, one in stored.items() if not name.startswith(OF_TOKENS)}
    _refuse_left(
        stored, shape, folder=folder, used={n: found for n, (found, *_) in sources.items()}
    )

    def tensor(name: str, rows: slice = EVERY) -> Tensor:
        if name in experts:
            return torch.stack([_read(one, EVERY) for one in experts[name][rows]])
        if name in drawn:
            assert fresh, "a head for labels begins with fresh weights"
            return fresh(name)[rows]
        return _read(*sources[name])[rows]

    return shape, tensor


def _no_model(folder: Path) -> str:
    """Why a path is no Hugging Face folder, and how to get one; empty if it may be one."""
    kind, there = kind_of(folder), kind_of(folder.parent) != "does not exist"
    if kind == "folder" and kind_of(folder / "run.toml") == "file":
        return f"is a run folder; export it first: howdah export {named(folder)} --to DIR"
    if kind == "folder":
        return ""
    if kind == "does not exist" and not there:
        name = named("/".join(folder.parts[-2:]))
        return (
            "does not exist; if it is a model of the Hugging Face hub, download it first: "
            f"hf download {name} --local-dir DIR, then init_from=DIR"
        )
    return (
        f"{'is a file' if kind == 'file' else kind}; init_from names the folder of a Hugging Face "
        "model: `hf download OWNER/NAME --local-dir DIR` fetches one, `howdah export RUN --to DIR` "
        "writes one"
    )


def _read(stored: _Stored, rows: slice, theirs: HubTensor | None = None) -> Tensor:
    """The rows of one of our weights in a stored tensor; `theirs` says how they lie there."""
    if stored.scales is not None:
        numbers, block = stored.scales
        found = widened(_read(replace(stored, scales=None), EVERY), _read(numbers, EVERY), block)
        return found[rows]
    with _open(stored.file) as file:
        part = file.get_slice(stored.name)
        if theirs is not None and theirs.heads:
            size = rows.stop - rows.start
            by_head: Tensor = part[:].unflatten(0, (theirs.heads, len(theirs.ours), -1))
            return by_head[:, rows.start // size].flatten(0, 1)
        transposed = theirs is not None and theirs.transposed
        found = part[:, rows].T.contiguous() if transposed else part[rows]
    return found


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: model.safetensors, or those that its index names."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if kind_of(one) == "file":
        return [one]
    if kind_of(index) == "file":
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(map(_is_name, table.values())):
            raise UserError(f"{index} has no weight_map of file names; download the folder again")
        return [folder / name for name in sorted(set(table.values()))]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UserError(
            f"{folder} holds its weights as pickle, which can run any code when it is read; "
            "save the model as safetensors with transformers' save_pretrained first"
        )
    raise UserError(f"{folder} has no model.safetensors; name the folder of a model")


def _is_name(name: object) -> bool:
    """Whether `name` is a plain file name, in the same folder as the index."""
    if not isinstance(name, str) or not name or path_problem(name):
        return False
    return name == Path(name).name and name.isprintable()


def _headers(file: Path) -> list[_Stored]:
    found = []
    with _open(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (the library's object is not a dict)
            part = opened.get_slice(name)
            found.append(_Stored(file, name, tuple(part.get_shape()), part.get_dtype()))
    return found


def _open(file: Path) -> Any:
    if (kind := kind_of(file)) != "file":
        raise UserError(
            f"{named(file)} {kind if kind != 'folder' else 'is a folder'}; download it again"
        )
    try:
        file.open("rb").close()  # the library calls what may not be read missing
        return safe_open(file, "pt")
    except PermissionError as error:
        raise UserError(f"cannot read {named(file)} ({error.strerror}); make it readable") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {named(file)} ({brief(error)}); download it again") from None


def _pair_scales(stored: dict[str, _Stored], block: Block | None, folder: Path) -> None:
    """Puts the numbers of blocks beside the matrices in 8 bits that they belong to.

    Raises UserError where one has none, or of other sizes.
    """
    eight = [one for one in stored.values() if one.dtype == EIGHT_BITS] if block else []
    for one in eight:
        assert block is not None
        wanted = grid(one.shape, block) if len(one.shape) == 2 else ()
        numbers = stored.pop(one.name + SCALES, None)
        if numbers is None or numbers.shape != wanted or numbers.dtype not in SCALE_TYPES:
            there = "is not there"
            if numbers is not None:
                there = f"is {numbers.dtype} {list(numbers.shape)}"
            raise UserError(
                f"{folder}: {one.name} is in 8 bits with blocks of {block[0]} x {block[1]}, and "
                f"{one.name}{SCALES} {there}, not F32 {list(wanted)}; download the folder again"
            )
        stored[one.name] = replace(one, scales=(numbers, block))


def _has(stored: Mapping[str, _Stored], theirs: HubTensor) -> bool:
    return any(theirs.name.removeprefix(stem) in stored for stem in ("", *STEMS))


def _take(stored: dict[str, _Stored], theirs: HubTensor, folder: Path) -> _Stored:
    """Removes the tensor `theirs` from `stored` and returns it.

    Raises UserError when it is missing, or has another shape or a dtype that is not a float.
    """
    name = theirs.name
    for stem in STEMS:
        name = name if name in stored else theirs.name.removeprefix(stem)
    for now, then in OLDER:
        name = name if name in stored else name.replace(now, then)
    if name not in stored:
        raise UserError(
            f"{folder} has no tensor {theirs.name}; the files are not all there, or config.json "
            "is of another model"
        )
    found = stored.pop(name)
    if found.shape != theirs.shape:
        raise UserError(
            f"{folder}: {name} is {list(found.shape)}, and config.json says "
            f"{list(theirs.shape)}; one of the two is of another model"
        )
    if found.dtype not in FLOATS and found.scales is None:
        raise UserError(
            f"{folder}: {name} is stored as {found.dtype}, and howdah reads "
            f"{', '.join(FLOATS)}; use the model's unquantised weights"
        )
    return found


def _refuse_left(
    left: dict[str, _Stored], shape: ModelShape, *, folder: Path, used: Mapping[str, _Stored]
) -> None:
    """Raises UserError when a tensor in `left` is a weight that this model does not use."""
    for name, stored in left.items():
        if name.endswith((*BUFFERS, *BESIDE)) or name.startswith(f"model.layers.{shape.layers}."):
            continue  # behind DeepSeek-V3's last layer is the module that predicts a second token
        if name in COPIES and _equal(stored, used["embedding.weight"]):
            continue
        if name in (*TIED, *TIED_BIAS) and shape.tie_embeddings:
            if _equal(stored, used["embedding.weight" if name in TIED else "head.bias"]):
                continue
            raise UserError(
                f"{folder} has a {name} of its own, but config.json ties it to the "
                "embedding; set tie_word_embeddings to false"
            )
        raise UserError(
            f"{folder} has a tensor {shown(name)}, which no {kind(shape)} model of these sizes "
            "computes with; config.json is of another model"
        )


def _equal(first: _Stored, second: _Stored) -> bool:
    everything = slice(None)
    return first.shape == second.shape and torch.equal(
        _read(first, everything), _read(second, everything)
    )
