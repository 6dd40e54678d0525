"""The weights of Hugging Face folders: names and layout of the tensors, and how to read them.

"Theirs" are Hugging Face's tensors, "ours" those of howdah. GPT-2 stores its matrices [in, out],
and query, key and value in one matrix, so the table holds more than names:

    theirs    h.0.attn.c_attn.weight [h, 3h]   =   (q over k over v) transposed
    ours      layers.0.attention.q.weight [h, h], and the same of k and of v

    theirs    model.layers.0.mlp.experts.5.up_proj.weight [f, h]   for each of E experts
    ours      layers.0.experts.up.weight [E, f, h]

Reading a folder opens each file's header, checks every name and shape, and returns a function
that reads one tensor per call. The library transformers is not imported, and pickle files are
refused: unpickling runs any code that the file names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from howdah.base.errors import UserError, brief, named, shown
from howdah.base.files import kind_of, path_problem
from howdah.shapes.huggingface import read_json, shape_from_config
from howdah.shapes.huggingface_written import CLASSES, kind
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import Weight, weights

LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.o": "self_attn.o_proj",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
MIXTRAL = LLAMA | {
    "router": "block_sparse_moe.gate",
    "experts.gate": "block_sparse_moe.experts.{}.w1",
    "experts.up": "block_sparse_moe.experts.{}.w3",
    "experts.down": "block_sparse_moe.experts.{}.w2",
}
QWEN_MOE = LLAMA | {
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_expert_gate",
    **{f"experts.{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
DEEPSEEK = QWEN_MOE | {
    "router.bias": "mlp.gate.e_score_correction_bias",
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
TABLES = {
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
}  # of other types: LLAMA
STEMS = ("model.", "transformer.")  # prefixes; missing when a model was saved without its head
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants in old files
READ = (*CLASSES, "mistral")  # up to its window, a Llama by another name
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class HubTensor:
    """One tensor of a Hugging Face model: `ours` concatenated along dim 0, then maybe transposed.

    name        of the Hugging Face tensor
    shape       of the Hugging Face tensor
    ours        names of the howdah weights in it
    rows        number of rows of each weight in `ours`
    transposed  whether the concatenation is stored transposed
    expert      the number of the one expert whose matrix it is, of a weight that stacks those of
                all; None: it is no expert's
    """

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool
    expert: int | None = None


def names(shape: ModelShape) -> tuple[HubTensor, ...]:
    """The Hugging Face tensors for all weights of `shape`, in the order of `weights(shape)`.

    Raises UserError when no Hugging Face class describes the shape.
    """
    theirs = kind(shape)
    gpt2, groups = theirs == "gpt2", dict[str, list[Weight]]()
    for weight in weights(shape):
        groups.setdefault(_their_name(weight.name, theirs), []).append(weight)
    found = []
    for name, members in groups.items():
        if members[0].dims[0] == "expert":
            (stacked,) = members
            found += [
                HubTensor(name.format(e), stacked.shape[1:], (stacked.name,), (1,), False, expert=e)
                for e in range(stacked.shape[0])
            ]
            continue
        rows = tuple(weight.shape[0] for weight in members)
        size = (sum(rows), *members[0].shape[1:])
        transposed = gpt2 and len(size) == 2 and members[0].name.startswith("layers.")
        size = size[::-1] if transposed else size
        found.append(HubTensor(name, size, tuple(w.name for w in members), rows, transposed))
    return tuple(found)


def _their_name(ours: str, theirs: str) -> str:
    """Translates a name: layers.7.attention.q.weight → model.layers.7.self_attn.q_proj.weight."""
    place, ending = ours.rsplit(".", 1)
    table = TABLES.get(theirs, LLAMA)
    layers = "transformer.h" if theirs == "gpt2" else "model.layers"
    if not place.startswith("layers."):
        return f"{table[place]}.{ending}"
    _, number, inside = place.split(".", 2)
    name = table.get(f"{inside}.{ending}") or f"{table[inside]}.{ending}"
    return f"{layers}.{number}.{name}"


# -- reading -------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: its file, and its name, shape and dtype there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_hub(folder: Path) -> tuple[ModelShape, Callable[[str], Tensor]]:
    """Returns (sizes of the model in `folder`, function from howdah names to tensors).

    The function reads one weight from disk at each call, in the stored dtype.
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
    stored = {tensor.name: tensor for file in _files(folder) for tensor in _headers(file)}
    sources: dict[str, tuple[_Stored, slice, bool]] = {}
    experts: dict[str, list[_Stored]] = {}
    for theirs in names(shape):
        found = _take(stored, theirs, folder)
        if theirs.expert is not None:
            experts.setdefault(theirs.ours[0], []).append(found)
            continue
        start = 0
        for name, rows in zip(theirs.ours, theirs.rows, strict=True):
            sources[name] = found, slice(start, start + rows), theirs.transposed
            start += rows
    _refuse_left(stored, shape, folder=folder, embedding=sources["embedding.weight"][0])

    def tensor(name: str) -> Tensor:
        if name in experts:
            return torch.stack([_read(one, slice(None), False) for one in experts[name]])
        return _read(*sources[name])

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


def _read(stored: _Stored, rows: slice, transposed: bool) -> Tensor:
    with _open(stored.file) as file:
        part = file.get_slice(stored.name)
        found: Tensor = part[:, rows].T.contiguous() if transposed else part[rows]
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
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {named(file)} ({brief(error)}); download it again") from None


def _take(stored: dict[str, _Stored], theirs: HubTensor, folder: Path) -> _Stored:
    """Removes the tensor `theirs` from `stored` and returns it.

    Raises UserError when it is missing, or has another shape or a dtype that is not a float.
    """
    name = theirs.name
    for stem in STEMS:
        name = name if name in stored else theirs.name.removeprefix(stem)
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
    if found.dtype not in FLOATS:
        raise UserError(
            f"{folder}: {name} is stored as {found.dtype}, and howdah reads "
            f"{', '.join(FLOATS)}; use the model's unquantised weights"
        )
    return found


def _refuse_left(
    left: dict[str, _Stored], shape: ModelShape, *, folder: Path, embedding: _Stored
) -> None:
    """Raises UserError when a tensor in `left` is a weight that this model does not use."""
    for name, stored in left.items():
        if name.endswith(BUFFERS) or name.startswith(f"model.layers.{shape.layers}."):
            continue  # behind DeepSeek-V3's last layer is the module that predicts a second token
        if name == "lm_head.weight" and shape.tie_embeddings:
            if _equal(stored, embedding):
                continue
            raise UserError(
                f"{folder} has a lm_head.weight of its own, but config.json ties it to the "
                "embedding; set tie_word_embeddings to false"
            )
        raise UserError(
            f"{folder} has a tensor {shown(name)}, which no {kind(shape)} model of these sizes "
            "computes with; config.json is of another model"
        )


def _equal(first: _Stored, second: _Stored) -> bool:
    everything = slice(None)
    return first.shape == second.shape and torch.equal(
        _read(first, everything, False), _read(second, everything, False)
    )
