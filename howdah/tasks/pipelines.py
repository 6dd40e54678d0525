"""`howdah.pipeline(task, model)`: a task in one call, with the keys and settings of transformers'
pipelines.

    write = howdah.pipeline("text-generation", "runs/laptop")
    write("def ", max_new_tokens=20)                  → [{"generated_text": "def ..."}]

    text-generation      generated_text
    text2text-generation, summarization, translation
                         generated_text, summary_text, translation_text, of an encoder-decoder
    text-classification  label, score: the likeliest label of a text, or several
    fill-mask            score, token, token_str, sequence: the likeliest words in a masked place
    feature-extraction   the last hidden states, [1][tokens][width] numbers

The model is a run folder or a Hugging Face folder. Several texts in a list give a list of results.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from howdah.base.errors import UserError, brief, named, nearest, shown
from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import GREEDY, Draw, listed
from howdah.generate.rows import generate_rows
from howdah.model.islands import promoted
from howdah.model.transformer import Transformer
from howdah.shapes.shape import ModelShape
from howdah.tasks.chatting import asked, joined
from howdah.tasks.labelling import classified
from howdah.tasks.opened import OpenedModel, open_model

TRANSLATION = re.compile(r"translation(_\w\w+_to_\w\w+)?")
OTHER_NAMES = {"sentiment-analysis": "text-classification"}
DECLINED = (
    *("audio-classification", "automatic-speech-recognition", "text-to-audio", "text-to-speech"),
    *("image-classification", "image-segmentation", "image-to-image", "image-text-to-text"),
    *("image-feature-extraction", "depth-estimation", "object-detection", "mask-generation"),
    *("keypoint-matching", "video-classification", "visual-question-answering", "any-to-any"),
    *("document-question-answering", "question-answering", "table-question-answering"),
    *("token-classification", "ner", "zero-shot-classification", "zero-shot-image-classification"),
    *("zero-shot-audio-classification", "zero-shot-object-detection"),
)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}

Texts = str | Sequence[Any]  # or messages, of text-generation


class Doing(NamedTuple):
    """How a task is done.

    run       the results of texts
    families  of the models that can do it
    settings  beside those that `run` names, with their defaults
    key       of a text in a result
    """

    run: Callable[..., list[Any]]
    families: tuple[str, ...]
    settings: Mapping[str, Any] = MappingProxyType({})
    key: str = "generated_text"


@dataclass(frozen=True)
class Pipeline:
    """A model that is ready for a task; a call runs it on a text, or on each of several."""

    task: str
    opened: OpenedModel
    model: Transformer
    does: "Doing"

    def __call__(self, inputs: Texts, **settings: Any) -> Any:
        """The result of a text, or a list of those of several. The settings are those of the task,
        by transformers' names. Raises UserError.
        """
        texts, alone = asked(self.task, inputs)
        if not texts:
            return []
        for name, value in settings.items():
            self._check(name, value)
        found = self.does.run(self, texts, **settings)
        lists = self.does.run is _classified and "top_k" not in settings  # as transformers does
        return found[0] if alone and not lists else found

    def _check(self, name: str, value: object) -> None:
        """Raises UserError for a setting that the task does not have, or of another type."""
        known = {**(self.does.run.__kwdefaults__ or {}), **self.does.settings}
        if name not in known:
            raise UserError(f"{self.task} has no setting {shown(name)}{nearest(name, known)}")
        of = type(known[name])
        kinds, wanted = KINDS.get(of, ((object,), ""))
        fits = isinstance(value, kinds) and (of is bool or not isinstance(value, bool))
        stops = name == "early_stopping"
        if not fits and not (stops and value == "never"):
            more = " or 'never'" if stops else ""
            raise UserError(f"{name} is {shown(value)}; it must be {wanted}{more}")


def pipeline(
    task: str,
    model: Path | str,
    *,
    device: str = "cpu",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
) -> Pipeline:
    """A model that is ready for a task: of a run folder, or of a Hugging Face folder.

    Raises UserError for a task that howdah does not have, or that the model cannot do.
    """
    task = OTHER_NAMES.get(str(task), str(task))
    known = "translation" if TRANSLATION.fullmatch(task) else task
    if known not in TASKS:
        raise UserError(_declined(task))
    does = TASKS[known]
    if dtype not in DTYPES:
        raise UserError(f"dtype is {shown(dtype)}; it must be one of {', '.join(DTYPES)}")
    try:
        there = torch.device(device)
        torch.empty(1, device=there).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise UserError(
            f"device is {shown(device)}, which cannot be used here ({brief(error)}); give cpu, or "
            "a device of this machine, such as cuda or cuda:1"
        ) from None
    if not isinstance(model, str | Path):
        raise UserError(f"model is {shown(model)}; name a run folder or a Hugging Face folder")
    opened = open_model(model, say=lambda line: None)
    family, labelled = opened.shape.family, bool(opened.shape.labels)
    other = (does.run is _classified) != labelled and task != "feature-extraction"
    if other and (labelled or family in does.families):
        raise UserError(f"{named(model)} {_other_head(opened.shape, task)}")
    if family not in does.families:
        instead = next(name for name, of in TASKS.items() if family in of.families)
        raise UserError(
            f"{named(model)} is {_article(family)}, and {task} needs {_article(does.families[0])}; "
            f"use {instead}"
        )
    if task == "fill-mask" and opened.mask is None:
        raise UserError(f"{named(model)} names no mask token, and fill-mask needs one")
    return Pipeline(task, opened, opened.model(DTYPES[dtype], there), does)


def _article(family: str) -> str:
    return f"{'a' if family == 'decoder' else 'an'} {family}"


def _other_head(shape: ModelShape, task: str) -> str:
    if shape.labels:
        return f"has a head for labels, and {task} needs one for tokens; use text-classification"
    return (
        f"has the head of a language model, and {task} needs one for labels; train one on rows "
        "that have them, with data.sources.label, or score labels with howdah eval, as choices"
    )


def _declined(task: str) -> str:
    if task in DECLINED or task.startswith(("image", "audio", "video")):
        return (
            f"{task} is declined: howdah's models read and write text; its tasks are "
            f"{', '.join(TASKS)}"
        )
    return f"there is no task {shown(task)}{nearest(task, TASKS)}"


# -- texts ---------------------------------------------------------------------


def _generation(
    of: Pipeline,
    texts: Sequence[str],
    *,
    do_sample: bool = True,
    return_full_text: bool = True,
    **settings: Any,
) -> list[list[dict[str, Any]]]:
    """Continuations of each text, and answers to each conversation."""
    found = _written(of, texts, do_sample=do_sample, **settings)
    return [
        [{of.does.key: joined(text, one, whole=return_full_text)} for one in each]
        for text, each in zip(texts, found, strict=True)
    ]


def _answers(
    of: Pipeline,
    texts: Sequence[str],
    *,
    do_sample: bool = False,
    prefix: str | None = None,
    **settings: Any,
) -> list[Any]:
    """What an encoder-decoder writes behind each text: one, or a list of several. In front of the
    text stands a prefix, which the model's folder may name for the task.
    """
    front = of.opened.prefixes.get(of.task, "") if prefix is None else prefix
    if not isinstance(front, str):
        raise UserError(f"prefix is {shown(front)}; give a str")
    found = _written(of, [front + text for text in texts], do_sample=do_sample, **settings)
    rows = [[{of.does.key: one} for one in each] for each in found]
    return [each[0] if len(each) == 1 else each for each in rows]


def _written(  # noqa: PLR0913  each is a setting of transformers
    of: Pipeline,
    texts: Sequence[str],
    *,
    do_sample: bool,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_return_sequences: int = 1,
    seed: int = 0,
) -> list[list[str]]:
    """Texts behind each text; those of one text that are drawn have neighbouring seeds."""
    opened, ends = of.opened, of.opened.ends
    read = [opened.prompt(text) for text in texts]
    model, prompts = opened.predictor(of.model, read), opened.texts(read)
    if num_beams < 1 or num_return_sequences < 1:
        raise UserError("num_beams and num_return_sequences must be at least 1")
    if num_beams > 1:
        if do_sample:
            raise UserError("num_beams searches and do_sample draws; set do_sample=False")
        if num_return_sequences > num_beams:
            raise UserError(
                f"num_return_sequences is {num_return_sequences}, of {num_beams} beams; ask for "
                "at most as many"
            )
        beams = Beams(num_beams, length_penalty, early_stopping, repetition_penalty)
        searched = beam_search(model, prompts, length=max_new_tokens, beams=beams, ends=ends)
        found = [[list(one.tokens) for one in each[:num_return_sequences]] for each in searched]
    else:
        if num_return_sequences > 1 and not do_sample:
            raise UserError("several texts of a prompt are drawn or searched; set do_sample=True")
        draws = [
            Draw(temperature, top_k, top_p, seed + n, repetition_penalty)
            if do_sample
            else Draw(GREEDY.temperature, repetition_penalty=repetition_penalty)
            for n in range(num_return_sequences)
        ]
        rounds = [
            listed(
                generate_rows(model, prompts, length=max_new_tokens, draw=draw, ends=ends),
                len(prompts),
            )
            for draw in draws
        ]
        found = [[each[row] for each in rounds] for row in range(len(prompts))]
    return [[opened.tokenizer.decode(tokens) for tokens in each] for each in found]


# -- encoders, and hidden states -----------------------------------------------


def _classified(of: Pipeline, texts: Sequence[str], *, top_k: int | str | None = "") -> list[Any]:
    """The likeliest label of each text, or a list of the `top_k` likeliest; None: of all."""
    tokens = [fitting(of.opened, text) for text in texts]
    return classified(of.model, tokens, pad=of.opened.pad, top_k=top_k)


@torch.no_grad()
def hidden_states(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """The last hidden states [1, s, h] of tokens: in front of the head and of its transform; of an
    encoder-decoder those of the encoder.
    """
    device = model.embedding.weight.device
    row = torch.tensor([tokens]).to(device)
    if model.shape.encoder_layers:
        return model.encode(row, None)
    positions = torch.arange(len(tokens))[None].to(device)
    x = model.embed(row, positions)
    context = model.context(x, positions, None)
    for block in model.layers.values():
        x = block(x, context)
    return model.norm(x) if model.shape.norm_at == "before" else x


def fitting(of: OpenedModel, text: str) -> list[int]:
    """The tokens of a text. Raises UserError when there are none, or more than the context."""
    tokens, most = of.prompt(text), of.shape.context
    if not 0 < len(tokens) <= most:
        raise UserError(
            f"the text {shown(text)} has {len(tokens)} tokens, and the model reads 1 to {most}; "
            "give another"
        )
    return tokens


def _features(of: Pipeline, texts: Sequence[str], *, return_tensors: bool = False) -> list[Any]:
    """The last hidden states of each text."""
    found = [hidden_states(of.model, fitting(of.opened, text)) for text in texts]
    return [*found] if return_tensors else [states.tolist() for states in found]


def _filled(
    of: Pipeline, texts: Sequence[str], *, top_k: int = 5, targets: Texts | None = None
) -> list[Any]:
    """The likeliest tokens in the masked place of each text; of several places, a list of each."""
    opened, model = of.opened, of.model
    assert opened.mask is not None
    mask, chosen = opened.tokenizer.token_to_id(opened.mask), _targets(opened, targets)
    if top_k < 1:
        raise UserError(f"top_k is {top_k}; it must be at least 1")
    found: list[Any] = []
    for text in texts:
        tokens = fitting(opened, text)
        places = [at for at, token in enumerate(tokens) if token == mask]
        if not places:
            raise UserError(
                f"{shown(text)} has no {opened.mask}, the token that hides another; write it where "
                "a word is asked for"
            )
        states = hidden_states(model, tokens)[0, places]
        with torch.no_grad():
            logits = model.logits(transformed(model, states))
        shares = logits.to(promoted(logits.dtype)).softmax(-1).cpu()
        best = shares[:, chosen].topk(min(top_k, len(chosen)))
        rows = [
            [
                _proposal(opened, tokens, place, (chosen[at], score), alone=len(places) == 1)
                for at, score in zip(*pair, strict=True)
            ]
            for place, *pair in zip(
                places, best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]
        found.append(rows[0] if len(rows) == 1 else rows)
    return found


def transformed(model: Transformer, states: Tensor) -> Tensor:
    """Hidden states [n, h] as the head takes them."""
    return states if model.shape.norm_at == "before" else model.final_norm(states)


def _targets(opened: OpenedModel, targets: Texts | None) -> list[int]:
    """The numbers of the tokens that may be proposed: the first of each target, or all."""
    if targets is None:
        return [*range(opened.shape.vocab)]
    words = [targets] if isinstance(targets, str) else [*targets]
    found = []
    for word in words:
        if not isinstance(word, str):
            raise UserError(f"targets are words, and one is {shown(word)}; give a str")
        whole = opened.tokenizer.token_to_id(word)
        ids = [whole] if whole is not None else opened.plain(word)[:1]
        if not ids:
            raise UserError(f"the target {shown(word)} has no token; give another word")
        found += ids
    if not found:
        raise UserError("targets is empty; give a word, or leave it out")
    return [*dict.fromkeys(found)]


def _proposal(
    opened: OpenedModel,
    tokens: Sequence[int],
    place: int,
    found: tuple[int, float],
    *,
    alone: bool,
) -> dict[str, Any]:
    token, score = found
    ids = [*tokens[:place], token, *tokens[place + 1 :]]
    return {
        "score": score,
        "token": token,
        "token_str": opened.tokenizer.decode([token], skip_special_tokens=False),
        "sequence": opened.tokenizer.decode(ids, skip_special_tokens=alone),
    }


SETTINGS: Mapping[str, Any] = _written.__kwdefaults__ or {}
PAIRED = ("encoder-decoder",)
TASKS: Mapping[str, Doing] = {
    "text-generation": Doing(_generation, ("decoder",), SETTINGS),
    "fill-mask": Doing(_filled, ("encoder",)),
    "text-classification": Doing(_classified, ("encoder", "decoder")),
    "text2text-generation": Doing(_answers, PAIRED, SETTINGS),
    "summarization": Doing(_answers, PAIRED, SETTINGS, "summary_text"),
    "translation": Doing(_answers, PAIRED, SETTINGS, "translation_text"),
    "feature-extraction": Doing(_features, ("decoder", "encoder", *PAIRED)),
}
