"""How each task of `howdah.pipeline` is done, with a model that is whole here or has its parts on
several ranks, which then all do the same together.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from howdah.base.errors import UserError, shown
from howdah.generate.beams import Beams, beam_search
from howdah.generate.draw import GREEDY, Draw, listed
from howdah.generate.placed import PlacedModel
from howdah.generate.rows import generate_rows
from howdah.model.islands import promoted
from howdah.model.transformer import Transformer
from howdah.tasks.chatting import joined
from howdah.tasks.labelling import classified
from howdah.tasks.opened import OpenedModel

TRANSLATION = re.compile(r"translation(_\w\w+_to_\w\w+)?")
Texts = str | Sequence[Any]  # or messages, of text-generation


@dataclass(frozen=True)
class Using:
    """A model in use for a task."""

    task: str
    opened: OpenedModel
    model: Transformer | PlacedModel

    @property
    def key(self) -> str:
        """Of a text in a result."""
        return doing(self.task).key

    def results(self, texts: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
        """The result of each text. Raises UserError."""
        return doing(self.task).run(self, texts, **settings)


class Doing(NamedTuple):
    """How a task is done.

    run       the results of texts
    families  of the models that can do it
    settings  beside those that `run` names, with their defaults
    key       of a text in a result
    labels    whether it needs a head for labels, not one for tokens
    """

    run: Callable[..., list[Any]]
    families: tuple[str, ...]
    settings: Mapping[str, Any] = MappingProxyType({})
    key: str = "generated_text"
    labels: bool = False


# -- texts ---------------------------------------------------------------------


def _generation(
    of: Using,
    texts: Sequence[str],
    *,
    do_sample: bool = True,
    return_full_text: bool = True,
    **settings: Any,
) -> list[list[dict[str, Any]]]:
    """Continuations of each text, and answers to each conversation."""
    found = _written(of, texts, do_sample=do_sample, **settings)
    return [
        [{of.key: joined(text, one, whole=return_full_text)} for one in each]
        for text, each in zip(texts, found, strict=True)
    ]


def _answers(
    of: Using,
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
    rows = [[{of.key: one} for one in each] for each in found]
    return [each[0] if len(each) == 1 else each for each in rows]


def _written(  # noqa: PLR0913  each is a setting of transformers
    of: Using,
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


def _classified(of: Using, texts: Sequence[str], *, top_k: int | str | None = "") -> list[Any]:
    """The likeliest label of each text, or a list of the `top_k` likeliest; None: of all."""
    tokens = [fitting(of.opened, text) for text in texts]
    return classified(of.model, tokens, pad=of.opened.pad, top_k=top_k)


def fitting(of: OpenedModel, text: str) -> list[int]:
    """The tokens of a text. Raises UserError when there are none, or more than the context."""
    tokens, most = of.prompt(text), of.shape.context
    if not 0 < len(tokens) <= most:
        raise UserError(
            f"the text {shown(text)} has {len(tokens)} tokens, and the model reads 1 to {most}; "
            "give another"
        )
    return tokens


def _features(of: Using, texts: Sequence[str], *, return_tensors: bool = False) -> list[Any]:
    """The last hidden states of each text."""
    found = [of.model.states(fitting(of.opened, text)) for text in texts]
    return [*found] if return_tensors else [states.tolist() for states in found]


def _filled(
    of: Using, texts: Sequence[str], *, top_k: int = 5, targets: Texts | None = None
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
        logits = model.scores(tokens, places)
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
    "text-classification": Doing(_classified, ("encoder", "decoder"), labels=True),
    "text2text-generation": Doing(_answers, PAIRED, SETTINGS),
    "summarization": Doing(_answers, PAIRED, SETTINGS, "summary_text"),
    "translation": Doing(_answers, PAIRED, SETTINGS, "translation_text"),
    "feature-extraction": Doing(_features, ("decoder", "encoder", *PAIRED)),
}


def doing(task: str) -> Doing:
    """How a task of TASKS is done, whose languages its name may have (`translation_en_to_de`)."""
    return TASKS["translation" if TRANSLATION.fullmatch(task) else task]
