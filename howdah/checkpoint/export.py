"""Export: a model as a folder that Hugging Face's libraries load (weights, config, tokenizer).

    TO/
      config.json              the model's sizes, for AutoModelForCausalLM
      generation_config.json   the end token, at which generation stops
      model.safetensors        or model-00001-of-00003.safetensors ... and an index of them
      tokenizer.json           the tokenizer of the training
      tokenizer_config.json    for AutoTokenizer
      chat_template.jinja      of a run that trained on conversations

Weights are streamed: each is read, converted to Hugging Face's layout in one buffer as large as the
largest tensor, and written before the next is read. So a model may be far larger than memory.

The folder appears completely or not at all: it is written under a temporary name and renamed. An
existing folder is replaced only if every file in it is from an earlier export.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from howdah.base.atomic import sync_folder, write_text
from howdah.base.errors import UserError, shown
from howdah.checkpoint.safefile import Spec, read_header, write
from howdah.model.hub_names import HubTensor, names
from howdah.shapes.huggingface_written import config
from howdah.shapes.shape import ModelShape
from howdah.text.labelled import frame_of
from howdah.text.template import TEMPLATE, Manner
from howdah.text.tokenizer import MASKS, PADS, in_words, load, start_of

GIGABYTE = 10**9
TABLES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    TEMPLATE,
}
WRITER = {"format": "pt", "writer": "howdah"}  # transformers requires "format"
EXPORTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shard:
    """One file of weights: its name and the tensors in it."""

    file: str
    tensors: tuple[HubTensor, ...]


def export(  # noqa: PLR0913 (seven facts that have nothing in common, all by keyword)
    *,
    shape: ModelShape,
    tensor: Callable[[str], Tensor],
    tokenizer: Path,
    end: int,
    to: Path,
    dtype: torch.dtype,
    manner: Manner | None = None,
    shard_bytes: int = 5 * GIGABYTE,
) -> None:
    """Write the export folder `to`.

    shape        sizes of the model
    tensor       returns the full weight of a howdah name; it is called once for each weight
    tokenizer    path of a tokenizer.json
    end          id of the end token between documents
    dtype        dtype of the stored weights
    manner       how its tokenizer writes conversations
    shard_bytes  most bytes of tensors in one file (a larger tensor gets a file of its own)

    Raises UserError, before anything is written, when Hugging Face has no class for the shape, when
    the dtype has 8 bits, when the tokenizer does not fit, or when `to` holds other files; also when
    the disk is full.
    """
    if dtype not in EXPORTED:
        raise UserError(
            f"cannot export in {str(dtype).removeprefix('torch.')}: weights in 8 bits are read and "
            "not written, for their blocks would have to be scaled; use float32 or bfloat16"
        )
    found = names(shape)
    start = start_of(load(tokenizer), str(tokenizer)) if shape.encoder_layers else 0
    pad = frame_of(load(tokenizer), end).pad if shape.labels else None
    told = str(dtype).removeprefix("torch.")
    sizes = config(shape, end=end, start=start, dtype=told, pad=pad)
    vocabulary = _vocabulary(tokenizer, end, shape)
    if manner:  # whose template may ask whether there is a bos_token
        vocabulary = {name: vocabulary[name] for name in vocabulary if name != "bos_token"}
        vocabulary |= manner.special
    generation: dict[str, object] = {"bos_token_id": end, "eos_token_id": end}
    if shape.encoder_layers:
        generation = {"eos_token_id": end, "pad_token_id": start, "decoder_start_token_id": start}
    to = to.absolute()
    draft = to.with_name(f".{to.name}.export")
    try:
        require_free(to)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write_weights(draft, plan_shards(found, dtype, shard_bytes), tensor=tensor, dtype=dtype)
        _write_json(draft / "config.json", sizes)
        _write_json(draft / "generation_config.json", generation)
        _write_json(draft / "tokenizer_config.json", vocabulary)
        if manner and manner.template:
            write_text(draft / TEMPLATE, manner.template)
        write_text(draft / "tokenizer.json", _tokenizer(tokenizer, end, shape))
        _put(draft, to)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"cannot export to {to}: {error.strerror or error}{where}; choose another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# -- weights -------------------------------------------------------------------


def plan_shards(found: Sequence[HubTensor], dtype: torch.dtype, shard_bytes: int) -> list[Shard]:
    """Distributes the tensors over files, in order; each file holds up to `shard_bytes`."""
    groups: list[list[HubTensor]] = [[]]
    used = 0
    for theirs in found:
        size = prod(theirs.shape) * dtype.itemsize
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(theirs)
        used += size
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for i, group in enumerate(groups)
    ]


def _write_weights(
    folder: Path, shards: list[Shard], *, tensor: Callable[[str], Tensor], dtype: torch.dtype
) -> None:
    tensor = _kept_last(tensor)  # a weight that stacks many of theirs is read once
    largest = max(prod(theirs.shape) for shard in shards for theirs in shard.tensors)
    buffer = torch.empty(largest, dtype=dtype)
    total = 0
    for shard in shards:
        specs = [Spec(theirs.name, theirs.shape, dtype) for theirs in shard.tensors]
        laid = (_lay(theirs, tensor, buffer) for theirs in shard.tensors)
        write(folder / shard.file, specs, tensors=laid, metadata=WRITER)
        total += sum(spec.bytes for spec in specs)
    if len(shards) > 1:
        places = {theirs.name: shard.file for shard in shards for theirs in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _kept_last(tensor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """The function `tensor`, keeping the last result until another name is asked for."""
    kept: dict[str, Tensor] = {}

    def ask(name: str) -> Tensor:
        if name not in kept:
            kept.clear()  # first: two tensors are never held
            kept[name] = tensor(name)
        return kept[name]

    return ask


def _lay(theirs: HubTensor, tensor: Callable[[str], Tensor], buffer: Tensor) -> Tensor:
    """Fills the start of `buffer` with one Hugging Face tensor and returns it as a view. The next
    call overwrites it.
    """
    out = buffer[: prod(theirs.shape)].view(theirs.shape)
    if theirs.expert is not None:
        return out.copy_(tensor(theirs.ours[0])[theirs.expert].detach())
    ours = out.T if theirs.transposed else out
    parts = ours.split(theirs.rows)
    if theirs.heads:
        parts = ours.unflatten(0, (theirs.heads, len(theirs.ours), -1)).unbind(1)
    for name, rows in zip(theirs.ours, parts, strict=True):
        rows.copy_(tensor(name).detach().reshape(rows.shape))
    return out


# -- tokenizer -----------------------------------------------------------------


def _tokenizer(path: Path, end: int, shape: ModelShape) -> str:
    """The contents of tokenizer.json. What an encoder reads before a decoder ends with the end
    token: a tokenizer that does not put it there is told to.
    """
    text = path.read_text("utf-8")
    if not shape.encoder_layers or (tokenizer := Tokenizer.from_str(text)).encode("").ids:
        return text
    token = tokenizer.id_to_token(end)
    special = [(token, end)]
    tokenizer.post_processor = TemplateProcessing(single=["$A", token], special_tokens=special)
    return tokenizer.to_str()


def _vocabulary(path: Path, end: int, shape: ModelShape) -> dict[str, object]:
    """The contents of tokenizer_config.json. Raises UserError when the tokenizer does not fit."""
    with in_words(f"{path} is not a tokenizer", "; name a tokenizer.json"):
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    token = tokenizer.id_to_token(end)
    if token is None or end >= shape.vocab:
        raise UserError(
            f"token {end}, which ends a document, is not in {path} and in the model's vocabulary "
            f"of {shape.vocab}; export with the tokenizer of the training"
        )
    known = () if shape.causal else MASKS
    masks = [name for name in known if tokenizer.token_to_id(name) is not None]
    pad = _padding(tokenizer, path, end, shape)
    if shape.encoder_layers:
        pad = tokenizer.id_to_token(start_of(tokenizer, str(path)))
    if shape.labels and pad is None:
        pad = tokenizer.id_to_token(frame_of(tokenizer, end).pad)
    return {
        **({"pad_token": pad} if pad else {}),
        **({"mask_token": masks[0]} if masks else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token,
        "eos_token": token,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }


def _padding(tokenizer: Tokenizer, path: Path, end: int, shape: ModelShape) -> str | None:
    """The token that a RoBERTa takes for padding, which gets no position of its own; None for
    other models, and where the tokenizer has no token of this id. Raises UserError when a text, or
    what hides tokens of it, can hold the token.
    """
    place = shape.first_position - 1
    if place < 0 or (name := tokenizer.id_to_token(place)) is None:
        return None
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    if place == end or name not in PADS or name not in special:
        raise UserError(
            f"token {place} of {path} is {shown(name)}, and transformers' RoBERTa takes token "
            f"{place} for padding, which would move the positions behind it: this model can be "
            f"kept as a checkpoint but not exported; train one whose token {place} is {PADS[0]}"
        )
    return name


# -- the folder ----------------------------------------------------------------


def _write_json(path: Path, content: dict[str, object]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def require_free(to: Path) -> None:
    """Raises UserError unless `to` is missing, empty, or an earlier export and nothing more."""
    if not to.exists():
        return
    if not to.is_dir():
        raise UserError(f"{to} is a file; choose a folder to export to")
    files = {file for file in to.iterdir() if file.name not in TABLES}
    if any(to.iterdir()) and not (files and all(map(_is_export, files))):
        raise UserError(
            f"{to} is not empty and holds more than an export of howdah; choose another folder"
        )


def _is_export(file: Path) -> bool:
    """Whether a file of weights has the metadata of a howdah export."""
    try:
        return read_header(file).metadata == WRITER
    except (UserError, OSError):
        return False


def _put(draft: Path, to: Path) -> None:
    """Rename `draft` to `to`. An earlier export is renamed first, and restored on failure."""
    sync_folder(draft)
    old = to.with_name(f".{to.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if to.exists():
            to.rename(old)
        draft.rename(to)
    except BaseException:  # a stop signal, too
        if old.exists() and not to.exists():
            old.rename(to)
        raise
    sync_folder(to.parent)
    shutil.rmtree(old, ignore_errors=True)
