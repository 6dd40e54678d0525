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
With `layout="pp2 tp2"` its parts are on several processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from howdah.base.errors import UserError, brief, named, nearest, shown
from howdah.generate.placed import decoding_plan
from howdah.plan.layout import Layout, parse_layout
from howdah.shapes.shape import ModelShape
from howdah.tasks.chatting import asked
from howdah.tasks.doing import TASKS, TRANSLATION, Texts, Using, doing
from howdah.tasks.opened import OpenedModel, open_model
from howdah.tasks.several import Placing, Ranks

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


@dataclass(frozen=True)
class Pipeline:
    """A model that is ready for a task; a call runs it on a text, or on each of several.

    results  of texts, with settings: of a model here, or on several processes
    """

    task: str
    opened: OpenedModel
    results: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]

    def __call__(self, inputs: Texts, **settings: Any) -> Any:
        """The result of a text, or a list of those of several. The settings are those of the task,
        by transformers' names. Raises UserError.
        """
        texts, alone = asked(self.task, inputs)
        if not texts:
            return []
        for name, value in settings.items():
            self._check(name, value)
        found = self.results(texts, settings)
        lists = doing(self.task).labels and "top_k" not in settings  # as transformers does
        return found[0] if alone and not lists else found

    def close(self) -> None:
        """Ends the processes of a layout, which otherwise end with the program."""
        if isinstance(self.results, Ranks):
            self.results.close()

    def _check(self, name: str, value: object) -> None:
        """Raises UserError for a setting that the task does not have, or of another type."""
        does = doing(self.task)
        known = {**(does.run.__kwdefaults__ or {}), **does.settings}
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
    layout: Layout | str = "single",
) -> Pipeline:
    """A model that is ready for a task: of a run folder, or of a Hugging Face folder.

    layout  of tp and pp, for a model that one device does not hold: its parts are on so many
            processes of this machine, which are started here

    Raises UserError for a task that howdah does not have, or that the model cannot do.
    """
    task = OTHER_NAMES.get(str(task), str(task))
    if task not in TASKS and not TRANSLATION.fullmatch(task):
        raise UserError(_declined(task))
    if dtype not in DTYPES:
        raise UserError(f"dtype is {shown(dtype)}; it must be one of {', '.join(DTYPES)}")
    there = _device(device)
    if not isinstance(model, str | Path):
        raise UserError(f"model is {shown(model)}; name a run folder or a Hugging Face folder")
    opened = open_model(model, say=lambda line: None)
    _check_model(task, opened, named(model))
    wanted = parse_layout(layout) if isinstance(layout, str) else layout
    plan = decoding_plan(opened.shape, wanted)
    if plan.layout.world == 1:
        here = Using(task, opened, opened.model(DTYPES[dtype], there))
        return Pipeline(task, opened, here.results)
    if device not in ("cpu", "cuda"):
        raise UserError(f"device is {shown(device)}, and ranks choose theirs; give cpu or cuda")
    placing = Placing(task, Path(model).absolute(), plan.layout, DTYPES[dtype], device)
    return Pipeline(task, opened, Ranks(placing))


def _device(device: str) -> torch.device:
    try:
        there = torch.device(device)
        torch.empty(1, device=there).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise UserError(
            f"device is {shown(device)}, which cannot be used here ({brief(error)}); give cpu, or "
            "a device of this machine, such as cuda or cuda:1"
        ) from None
    return there


def _check_model(task: str, opened: OpenedModel, name: str) -> None:
    """Raises UserError for a task that a model cannot do."""
    does, family, labelled = doing(task), opened.shape.family, bool(opened.shape.labels)
    other = does.labels != labelled and task != "feature-extraction"
    if other and (labelled or family in does.families):
        raise UserError(f"{name} {_other_head(opened.shape, task)}")
    if family not in does.families:
        instead = next(name for name, of in TASKS.items() if family in of.families)
        raise UserError(
            f"{name} is {_article(family)}, and {task} needs {_article(does.families[0])}; "
            f"use {instead}"
        )
    if task == "fill-mask" and opened.mask is None:
        raise UserError(f"{name} names no mask token, and fill-mask needs one")


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
