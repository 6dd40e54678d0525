"""A model with its tokenizer, of a run folder or of a Hugging Face folder, opened for use.

             run folder                              Hugging Face folder
weights      the newest checkpoint, or the best      model.safetensors, or several
in front     the token that ended each document      what the tokenizer's own template adds
of a text    in training
ends         that token                              eos_token_id of generation_config.json, or
                                                     of config.json
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from howdah.base.errors import UserError, brief, named
from howdah.base.files import kind_of, parse_toml, read_text
from howdah.host.measured import left
from howdah.model.hub import read_hub
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import Fill
from howdah.shapes.huggingface import read_json
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import ModelShape
from howdah.text.tokenizer import FILE, LARGEST, MASKS, as_utf8
from howdah.train.console import Say
from howdah.train.finished_run import open_run
from howdah.train.resume import read_folder, read_weights
from howdah.train.whole_model import loaded_model

CPU = torch.device("cpu")
SETTINGS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class OpenedModel:
    """A model that can be used.

    folder  the folder that was named
    fill    writes each piece of weight
    front   tokens in front of each text; None: what the tokenizer's own template adds
    begin   the token with which a text begins that has none before it; None: there is none
    ends    tokens that end a text
    mask    the token that hides others; None: there is none
    """

    folder: Path
    shape: ModelShape
    fill: Fill
    tokenizer: Tokenizer
    front: tuple[int, ...] | None = None
    begin: int | None = None
    ends: tuple[int, ...] = ()
    mask: str | None = None

    def model(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Transformer:
        """The model on one device. Raises UserError when too little memory is left there."""
        needed, there = dtype.itemsize * parameters(self.shape).total, left(device)
        if there is not None and needed > there:
            raise UserError(
                f"the model of {named(self.folder)} takes {needed / 1e9:.1f} GB of memory, and "
                f"{there / 1e9:.1f} GB are left; end other programs, or decode it on several "
                "processes with --layout"
            )
        return loaded_model(self.fill, self.shape, dtype=dtype, device=device)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that is to be continued, or looked at as a whole."""
        if self.front is None:
            return list(self.tokenizer.encode(as_utf8(text)).ids)
        return [*self.front, *self.plain(text)]

    def plain(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        return list(self.tokenizer.encode(as_utf8(text), add_special_tokens=False).ids)


def open_model(folder: Path | str, *, say: Say, best: bool = False) -> OpenedModel:
    """Opens a run folder or a Hugging Face folder. Raises UserError when it is neither.

    best  of a run, the best checkpoint instead of the newest
    """
    folder = Path(folder)
    if kind_of(folder / "config.json") == "file" and kind_of(folder / "checkpoints") != "folder":
        return _of_folder(folder)
    run = open_run(folder, say=say, best=best)
    causal, end = run.shape.causal, run.end  # a text may hold a mask, but no other special token
    tokenizer = run.tokenizer() if causal else read_tokenizer(folder)
    return OpenedModel(
        folder=folder,
        shape=run.shape,
        fill=read_weights(run.checkpoint),
        tokenizer=tokenizer,
        front=(end,),
        begin=end,
        ends=(end,),
        mask=None if causal else _mask_of_run(folder, tokenizer),
    )


def _of_folder(folder: Path) -> OpenedModel:
    shape, _ = read_hub(folder)
    tokenizer, said = read_tokenizer(folder), _said(folder)
    names = _names(folder)
    begin = names.get("bos_token") or names.get("eos_token")
    mask = names.get("mask_token")
    known = [name for name in MASKS if tokenizer.token_to_id(name) is not None]
    ends = said.get("eos_token_id")
    return OpenedModel(
        folder=folder,
        shape=shape,
        fill=read_folder(folder, shape),
        tokenizer=tokenizer,
        begin=None if begin is None else tokenizer.token_to_id(begin),
        ends=tuple(one for one in (ends if isinstance(ends, list) else [ends]) if type(one) is int),
        mask=mask or (known[0] if known and not shape.causal else None),
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, whose special tokens are those of its texts, too. Raises
    UserError.
    """
    path = folder / FILE
    if (kind := kind_of(path)) != "file":
        raise UserError(
            f"{named(path)} {kind}; put the model's tokenizer there, saved by the tokenizers "
            "library"
        )
    try:
        tokenizer = Tokenizer.from_str(read_text(path, LARGEST))
    except Exception as error:  # the library raises bare Exception for a file it cannot use
        raise UserError(f"{named(path)} is not a tokenizer ({brief(error)}); replace it") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _said(folder: Path) -> Mapping[str, Any]:
    """The settings of a folder's generation, or else of its model, that name an end."""
    for name in SETTINGS:
        if kind_of(folder / name) == "file":
            found = read_json(folder / name)
            if found.get("eos_token_id") is not None:
                return found
    return {}


def _names(folder: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    found = read_json(path) if kind_of(path) == "file" else {}
    named_so = {}
    for name, token in found.items():
        word = token.get("content") if isinstance(token, dict) else token
        if isinstance(word, str):
            named_so[name] = word
    return named_so


def _mask_of_run(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The token that hid others in the training of a run."""
    try:
        data = parse_toml(read_text(folder / "run.toml")).get("data")
    except (OSError, ValueError):
        data = None
    mask = data.get("mask_token") if isinstance(data, dict) else None
    known = [name for name in (mask, *MASKS) if name and tokenizer.token_to_id(name) is not None]
    return known[0] if known else None
