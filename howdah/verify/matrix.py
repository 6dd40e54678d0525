"""The parity matrix: which forms of parallelism work together, checked for every pair of them.

    form          the words of the layout that it adds          needs
    zero2         zero2                                         dp2
    tensor        tp2
    interleaved   pp2 interleaved v2                            more micro-batches
    ep            dp2 ep2                                       a model with experts

A cell is the smallest layout that has both forms. Either `verify` proves that it works, or it is
refused with a sentence before anything starts. There is no third case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from random import Random
from typing import Any

from howdah.base.errors import UserError
from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import SCHEDULES, parse_layout
from howdah.plan.method import Method, Routing
from howdah.plan.schedule.registry import SCHEDULES as REGISTERED
from howdah.plan.support import unsupported
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape, with_labels
from howdah.verify.case import Case, small_shape

SEQUENCE, MODEL = 19, "model="
LABELS = ("high", "low", "middle")
# Schedules of token slices are left out: they cannot run yet.
PIPES = tuple(name for name in SCHEDULES if REGISTERED[name].takes != "slices")
FORMS = {
    "dp": "dp2",
    "zero1": "dp2 zero1",
    "zero2": "dp2 zero2",
    "zero2 whole": "dp2 zero2 accumulate=whole",
    "zero3": "dp2 zero3",
    "zero3 kept": "dp2 zero3 release=step",
    "second copy": "dp4 zero3 hpz2",
    "hybrid": "dp4 zero2 shard2",
    "servers": "dp2 server2",
    "adding servers": "dp2 server2 update=workers",
    "tensor": "tp2",
    "sequence": "tp2 sp",
    "sequence kept": "tp2 sp inputs=gathered",
    "ring": "cp2",
    "all-to-all": "cp2 context=all-to-all",
    "both": "cp4 context=both",
    **{name: f"pp2 {name}{' v2' * (REGISTERED[name].takes == 'virtual')}" for name in PIPES},
    "recompute": "recompute=full",
    "selective": "recompute=selective",
    "one block": "recompute=full:1",
    "accumulation": "x3",
    "host": "weights=host gradients=host optimizer=host",
    "disk": "optimizer=disk",
    "activations": "activations=host",
    "experts": "model=experts",
    "ep": "model=experts dp2 ep2",
    "capacity": "model=capacity dp2 ep2",
    "bloom": "model=bloom",
    "encoder": "model=encoder",
    "dropping": "model=dropping",
    "t5": "model=t5",
}
STAGES = ("zero1", "zero2", "zero2 whole", "zero3", "zero3 kept", "second copy", "hybrid")
SERVERS = ("servers", "adding servers")
SLICES = ("tensor", "sequence", "sequence kept")
AGAIN = ("recompute", "selective", "one block")
CONTEXTS = ("ring", "all-to-all", "both")
EXPERTS = ("experts", "ep", "capacity")
FAMILIES = ("bloom", "encoder", "dropping", "t5")  # beside decoders of Llama's kind
MODELS = (*EXPERTS, *FAMILIES)
AWAY = ("host", "disk")
AXES = ("dp", "cp", "tp", "pp", "ep")
KINDS = (
    STAGES,
    SERVERS,
    SLICES,
    PIPES,
    AGAIN,
    CONTEXTS,
    MODELS,
    AWAY,
)  # of each, a layout has one at most


@dataclass(frozen=True)
class Cell:
    """Some forms, and the words of the smallest layout that has all of them."""

    forms: tuple[str, ...]
    words: str


def pairs() -> Iterator[Cell]:
    """Yields every form alone, and every pair of forms that are not choices of the same kind."""
    for one, other in combinations_with_replacement(FORMS, 2):
        forms = (one,) if one == other else (one, other)
        if not _exclude(forms):
            yield Cell(forms, together(forms))


def triples() -> Iterator[Cell]:
    """Yields every three forms of three different kinds: ZeRO, tensor parallelism, pipeline
    schedule, recomputation. Those of context parallelism and experts are drawn (`drawn`).
    """
    for forms in combinations(FORMS, 3):
        kinds = [any(form in kind for form in forms) for kind in (STAGES, SLICES, PIPES, AGAIN)]
        if sum(kinds) == len(forms) and not _exclude(forms):
            yield Cell(forms, together(forms))


def families() -> Iterator[Cell]:
    """Yields every pair of forms of a layout once more for each family of models."""
    for cell in pairs():
        if len(cell.forms) == 2 and not {*cell.forms} & {*MODELS}:
            for family in FAMILIES:
                forms = (*cell.forms, family)
                yield Cell(forms, together(forms))


def drawn_triples(count: int, *, seed: int, most: int = 8) -> list[Cell]:
    """So many triples at random with context parallelism or experts among them, on at most `most`
    ranks.
    """
    draw, names, found = Random(seed), [*FORMS], dict[tuple[str, ...], Cell]()
    while len(found) < count:
        forms = tuple(sorted(draw.sample(names, 3), key=names.index))
        if not {*forms} & {*CONTEXTS, *MODELS} or _exclude(forms):
            continue
        words = together(forms)
        try:
            world = parse_layout(split_model(words)[0]).world
        except UserError:  # which is the sentence of a pair, too
            continue
        if world <= most:
            found[forms] = Cell(forms, words)
    return [*found.values()]


def _size(word: str) -> int:
    """The number in a word; 0 if there is none."""
    return int("".join(filter(str.isdigit, word)) or 0)


def _exclude(forms: tuple[str, ...]) -> bool:
    """Whether two of the forms are choices of the same kind."""
    return any(sum(form in kind for form in forms) > 1 for kind in KINDS)


def together(forms: tuple[str, ...]) -> str:
    """The words of all forms; where forms name the same axis, the larger size.

    >>> together(("hybrid", "tensor"))
    'dp4 zero2 shard2 tp2 x2'
    """
    words: dict[str, str] = {}
    for form in forms:
        for word in FORMS[form].split():
            axis = word.rstrip("0123456789") if word[:2] in AXES else word
            words[axis] = max(words.get(axis, word), word, key=_size)
    words.setdefault("x", "x4" if "pp" in words else "x2")
    if "accumulation" in forms:
        words["x"] = words.pop("x3")
    return " ".join(sorted(words.values(), key=lambda word: not word.startswith(MODEL)))


def split_model(words: str) -> tuple[str, str]:
    """The layout's words without that of the model, and the model's name.

    >>> split_model("model=experts dp2 ep2")
    ('dp2 ep2', 'experts')
    """
    named = [word for word in words.split() if word.startswith(MODEL)]
    layout = " ".join(word for word in words.split() if word not in named)
    return layout, named[0].removeprefix(MODEL) if named else "dense"


def model_of(name: str) -> tuple[ModelShape, Method]:
    """A small model whose sizes do not divide, and how it is trained, in float64.

    dense     grouped queries, tied embeddings
    experts   DeepSeek-V3's forms: latent attention, a dense first layer, groups of experts, a
              shared one, biases; all losses of routers
    capacity  Mixtral's: five experts, of which each takes no more than its even share
    bloom     ALiBi, a norm behind the embedding
    encoder   BERT's forms: both ways, norms behind, a transform and a bias of the head
    dropping  the encoder, with dropout, of attention's probabilities too
    t5        an encoder with a decoder behind it: relative positions, spans of a text
    classes   BERT with a pooler and three labels
    scores    a decoder with grouped queries and three labels
    """
    balance = Routing(balance_loss=0.3, z_loss=0.1)
    chosen: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("laptop", {}),
        "experts": ("deepseek-v3", {"routing": replace(balance, bias_rate=0.01)}),
        "capacity": ("mixtral-8x7b", {"routing": replace(balance, capacity=1.0)}),
        "bloom": ("bloom-176b", {}),
        "encoder": ("bert-base", {}),
        "dropping": ("bert-base", {"dropout": 0.1, "attention_dropout": 0.2}),
        "t5": ("t5-base", {}),
        "classes": ("bert-base", {}),
        "scores": ("laptop", {}),
    }
    named, of = chosen[name]
    times = 1 + (name == "experts")  # ranks may trade heads of its latent attention
    shape = small_shape(preset(named), context=SEQUENCE, times=times)
    if name in ("classes", "scores"):
        shape = with_labels(shape, LABELS)
    return replace(shape, layers=4, vocab=67, ffn_size=28), Method("float64", **of)


def case_of(words: str) -> Case:
    """A case on the layout `words`, in float64; its last micro-batch is one sample short. A word
    `model=` chooses the model.

    Raises UserError when the layout is refused.
    """
    spelled, model = split_model(words)
    layout, (shape, method) = parse_layout(spelled), model_of(model)
    samples = max(2 * layout.readers * (layout.micros or 1) - 1, 2)
    batch = Batch(global_batch=samples, micro_batch=2)
    problems = check_plan(shape, layout, batch, method, sequence=SEQUENCE)
    problems += unsupported(shape, layout)
    if problems:
        raise UserError("; ".join(problems))
    return Case(
        shape=shape,
        layout=layout,
        method=method,
        samples=samples,
        micro=2,
        sequence=SEQUENCE,
        steps=2,
        seed=3,
    )
