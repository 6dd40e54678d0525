"""A model with its tokenizer, of a run folder or of a Hugging Face folder, opened for use.

             run folder                              Hugging Face folder
weights      the newest checkpoint, or the best      model.safetensors, or several
in front     the token that ended each document      what the tokenizer's own template adds
of a text    in training; behind a text that an
             encoder-decoder reads
ends         that token                              eos_token_id of generation_config.json, or
                                                     of config.json
start        the token of padding                    decoder_start_token_id of the same
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from howdah.base.errors import UserError, named
from howdah.base.files import kind_of, no_file, parse_toml, read_text
from howdah.generate.placed import PlacedModel
from howdah.generate.predictor import BehindEncoder, OneDevice, Predictor, WholeStacks
from howdah.host.measured import left
from howdah.model.hub import read_hub
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import Fill
from howdah.shapes.huggingface import read_json
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import ModelShape
from howdah.text.labelled import frame_of
from howdah.text.template import Chat, manner_of
from howdah.text.tokenizer import FILE, LARGEST, MASKS, as_utf8, encode_one, in_words, start_of
from howdah.text.turns import checked
from howdah.train.adapted import fill_for_use
from howdah.train.console import Say
from howdah.train.finished_run import open_run
from howdah.train.resume import read_folder
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
    behind  tokens behind each text that is read, where `front` is not None
    start   the token with which a decoder behind an encoder begins; None: there is no encoder
    prefixes  what stands in front of a text that is read, by task
    pad     the token that is not looked at for the last of a text, of a decoder with labels
    """

    folder: Path
    shape: ModelShape
    fill: Fill
    tokenizer: Tokenizer
    front: tuple[int, ...] | None = None
    begin: int | None = None
    ends: tuple[int, ...] = ()
    mask: str | None = None
    behind: tuple[int, ...] = ()
    start: int | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    pad: int | None = None

    def model(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Transformer:
        """The model on one device. Raises UserError when too little memory is left there."""
        needed, there = dtype.itemsize * parameters(self.shape).total, left(device)
        if there is not None and needed > there:
            raise UserError(
                f"the model of {named(self.folder)} takes {needed / 1e9:.1f} GB of memory, and "
                f"{there / 1e9:.1f} GB are left; end other programs, or use several processes "
                'by a layout, such as "tp2"'
            )
        return loaded_model(self.fill, self.shape, dtype=dtype, device=device)

    @cached_property
    def chat(self) -> Chat:
        """What writes conversations for the model. Raises UserError."""
        manner = manner_of(str(self.folder))
        return Chat(manner, read_tokenizer(self.folder), every=True, name=named(self.folder))

    def prompt(self, text: str | Sequence[Any]) -> list[int]:
        """The tokens of a text that is to be continued, or looked at as a whole; of messages those
        that the assistant's answer follows.
        """
        if not isinstance(text, str):
            return self.chat.prompt(checked(text), "the conversation")
        if self.front is None:
            return list(encode_one(self.tokenizer, as_utf8(text), special=True).ids)
        return [*self.front, *self.plain(text), *self.behind]

    def predictor(
        self, model: Transformer | PlacedModel, prompts: Sequence[Sequence[int]]
    ) -> Predictor:
        """The model, or this rank's part of it, ready to write the text of each prompt. Raises
        UserError.
        """
        if isinstance(model, PlacedModel):
            return model if self.start is None else BehindEncoder(model, prompts)
        return (
            OneDevice(model) if self.start is None else BehindEncoder(WholeStacks(model), prompts)
        )

    def texts(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The tokens with which the text of each prompt begins: the prompt, unless an encoder reads
        it.
        """
        return [prompt if self.start is None else [self.start] for prompt in prompts]

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of tokens that were written. Behind an encoder its special tokens are shown:
        some stand for spans.
        """
        return str(self.tokenizer.decode([*tokens], skip_special_tokens=self.start is None))

    def plain(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        return list(encode_one(self.tokenizer, as_utf8(text)).ids)


def open_model(folder: Path | str, *, say: Say, best: bool = False) -> OpenedModel:
    """Opens a run folder or a Hugging Face folder. Raises UserError when it is neither.

    best  of a run, the best checkpoint instead of the newest
    """
    folder = Path(folder)
    if kind_of(folder / "config.json") == "file" and kind_of(folder / "checkpoints") != "folder":
        if best:
            raise UserError(
                f"{named(folder)} is no run and has no best checkpoint; leave --best out"
            )
        return _of_folder(folder)
    run = open_run(folder, say=say, best=best)
    causal, end, both = run.shape.causal, run.end, run.shape.encoder_layers > 0
    # a text may hold a mask or stand-ins of spans, but no other special token
    plain = causal and not both and not run.shape.labels
    tokenizer = run.tokenizer() if plain else read_tokenizer(folder)
    if run.shape.labels:  # whose texts the tokenizer has put its special tokens around
        pad, fill = frame_of(tokenizer, end).pad, fill_for_use(run.checkpoint)
        return OpenedModel(folder, run.shape, fill, tokenizer, pad=pad)
    return OpenedModel(
        folder=folder,
        shape=run.shape,
        fill=fill_for_use(run.checkpoint),
        tokenizer=tokenizer,
        front=() if both else (end,),
        behind=(end,) if both else (),
        start=start_of(tokenizer, named(folder)) if both else None,
        begin=end,
        ends=(end,),
        mask=None if causal else _mask_of_run(folder, tokenizer),
    )


def _of_folder(folder: Path) -> OpenedModel:
    shape, _ = read_hub(folder)
    tokenizer = read_tokenizer(folder)
    names = _names(folder)
    begin = names.get("bos_token") or names.get("eos_token")
    mask = names.get("mask_token")
    known = [name for name in MASKS if tokenizer.token_to_id(name) is not None]
    ends, start, pad = (_said(folder, f"{of}_token_id") for of in ("eos", "decoder_start", "pad"))
    if shape.encoder_layers and type(start) is not int:
        raise UserError(
            f"{named(folder)}: {' and '.join(SETTINGS)} name no decoder_start_token_id, with which "
            "a decoder begins; write it there"
        )
    return OpenedModel(
        folder=folder,
        shape=shape,
        fill=read_folder(folder, shape),
        tokenizer=tokenizer,
        begin=None if begin is None else tokenizer.token_to_id(begin),
        ends=tuple(one for one in (ends if isinstance(ends, list) else [ends]) if type(one) is int),
        mask=mask or (known[0] if known and not shape.causal else None),
        start=start if shape.encoder_layers else None,
        prefixes=_prefixes(folder),
        pad=pad if type(pad) is int else None,
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, whose special tokens are those of its texts, too. Raises
    UserError.
    """
    path = folder / FILE
    if why := no_file(path):
        raise UserError(
            f"{named(path)} {why}; put the model's tokenizer there, saved by the tokenizers library"
        )
    with in_words(f"{named(path)} is not a tokenizer", "; replace it"):
        tokenizer = Tokenizer.from_str(read_text(path, LARGEST))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _said(folder: Path, key: str) -> Any:
    """What the settings of a folder's generation, or else of its model, say by a key."""
    for name in SETTINGS:
        if kind_of(folder / name) == "file":
            found = read_json(folder / name).get(key)
            if found is not None:
                return found
    return None


def _prefixes(folder: Path) -> dict[str, str]:
    """What T5 was trained to read in front of a text, by task."""
    found = read_json(folder / "config.json").get("task_specific_params")
    tasks = found.items() if isinstance(found, dict) else ()
    told = {task: says.get("prefix") for task, says in tasks if isinstance(says, dict)}
    return {task: prefix for task, prefix in told.items() if isinstance(prefix, str)}


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
