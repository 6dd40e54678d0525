"""Everything wrong with a plan, as sentences, all at once, before any device is touched."""

from collections.abc import Iterator
from math import inf

from howdah.plan.batch import Batch, resolve_batch
from howdah.plan.layout import Layout
from howdah.plan.method import Method, Optimizer, Rate
from howdah.plan.problems import BadInput
from howdah.plan.shapes import ModelShape, check_shape
from howdah.plan.weights import parts


def check_plan(
    shape: ModelShape, layout: Layout, batch: Batch, method: Method, *, sequence: int
) -> list[str]:
    """The problems of a run's model, layout, batch and method; empty when they fit together."""
    problems = check_shape(shape)
    if not problems:
        problems += [f"layout '{layout}': {problem}" for problem in _check_cuts(shape, layout)]
        problems += [
            f"layout '{layout}': {problem}" for problem in _check_tokens(shape, layout, sequence)
        ]
    if sequence < 1:
        problems.append(f"data.sequence is {sequence}; it must be at least 1")
    if sequence > shape.context:
        problems.append(
            f"data.sequence {sequence} is over the model's context {shape.context}; "
            f"use data.sequence={shape.context}, or a larger model.context"
        )
    try:
        resolve_batch(batch, layout)
    except BadInput as problem:
        problems.append(str(problem))
    return [*problems, *_check_method(method), *_check_rate(method.rate)]


def _check_cuts(shape: ModelShape, layout: Layout) -> Iterator[str]:
    """Whether every rank gets a part of what its axes cut."""
    stages, places = layout.pp * layout.virtual, len(parts(shape))
    if stages > places:
        each = f" with {layout.virtual} stages each" if layout.virtual > 1 else ""
        yield (
            f"pp{layout.pp}{each} makes {stages} stages, but the model has {places} parts "
            f"(embedding, blocks, head); use {_fitting_stages(layout, places)}"
        )
    blocks = sum("." in part for part in parts(shape))
    if layout.again is not None and layout.again > blocks:
        yield f"again{layout.again} is over the {blocks} blocks; use again{blocks}, or drop it"
    if problem := _head_problem(shape, layout.tp):
        yield f"tp{layout.tp} {problem}"
    elif layout.context == "all-to-all" and (
        problem := _head_problem(shape, layout.tp * layout.cp)
    ):
        yield f"tp{layout.tp} cp{layout.cp} context=all-to-all {problem}; or use context=ring"
    inner = shape.ffn if shape.experts is None else min(shape.ffn, shape.experts.ffn)
    for name, size in (("vocab", shape.vocab), ("ffn", inner)):
        if layout.tp > size:
            yield f"tp{layout.tp} is over the {size} rows of {name}; use tp{size} at most"
    experts = 1 if shape.experts is None else shape.experts.number
    if layout.ep > experts:
        has = f"{experts} experts" if shape.experts else "no experts"
        yield f"ep{layout.ep} shares out experts, but the model has {has}; use ep{experts} at most"


def _fitting_stages(layout: Layout, places: int) -> str:
    """The nearest stages that a model of so many parts can be cut into."""
    most = places // layout.pp
    if layout.schedule == "interleaved" and most > 1:
        return f"v{most}"
    most = places // layout.virtual
    if layout.virtual == 1 or most > 1:
        return f"pp{most}"
    return f"pp{min(layout.pp, places)} with one stage each, such as 1f1b"


def _head_problem(shape: ModelShape, ways: int) -> str | None:
    """Why the heads do not divide `ways` ways: key-value heads may be shared, but not cut."""
    if _heads_divide(shape, ways):
        return None
    fits = min(
        (n for n in range(1, shape.heads + 1) if _heads_divide(shape, n)),
        key=lambda n: abs(n - ways),
    )
    of = "" if shape.k == shape.heads else f" of {shape.k} key-value heads"
    return f"does not divide {shape.heads} heads{of}; {fits} ways would"


def _heads_divide(shape: ModelShape, ways: int) -> bool:
    if ways <= shape.k:
        return True
    return ways % shape.k == 0 and ways // shape.k <= shape.heads // shape.k


def _check_tokens(shape: ModelShape, layout: Layout, sequence: int) -> Iterator[str]:
    """Whether every rank gets some of the tokens."""
    if layout.cp > 1 and sequence < 2 * layout.cp:
        yield (
            f"cp{layout.cp} cuts a sequence into {2 * layout.cp} chunks, but it has {sequence} "
            f"tokens; use cp{max(sequence // 2, 1)} or a longer data.sequence"
        )
    if layout.sp and sequence // layout.cp < layout.tp:
        yield (
            f"sp cuts {sequence // layout.cp} tokens between {layout.tp} ranks; "
            f"drop sp or use data.sequence={layout.tp * layout.cp} or more"
        )
    if layout.slices > max(sequence, 1):
        yield f"slices{layout.slices} is over the {sequence} tokens; use slices{sequence} at most"
    if layout.slices > 1 and layout.cp > 1:
        yield f"token slices and cp{layout.cp} both cut the sequence; drop one of them"
    if layout.slices > 1 and shape.family != "decoder":
        yield f"token slices need a causal model, not an {shape.family}; drop slices{layout.slices}"


def _check_method(method: Method) -> list[str]:
    problems = []
    if not 0 <= method.dropout < 1:
        problems.append(f"method.dropout is {method.dropout}; it must be in [0, 1)")
    if not 0 <= method.label_smoothing < 1:
        problems.append(f"method.label_smoothing is {method.label_smoothing}; it must be in [0, 1)")
    if not 0 <= method.z_loss < inf:
        problems.append(f"method.z_loss is {method.z_loss}; it must be 0 or more, and finite")
    optimizer = method.optimizer
    betas = {f"betas[{i}]": beta for i, beta in enumerate(optimizer.betas)}
    for name, share in {**betas, "momentum": optimizer.momentum}.items():
        if not 0 <= share < 1:
            problems.append(f"method.optimizer.{name} is {share}; it must be in [0, 1)")
    return problems + _check_signs(optimizer)


def _check_signs(optimizer: Optimizer) -> list[str]:
    return [
        f"method.optimizer.{name} is {number}; it must not be negative"
        for name, number in (
            ("epsilon", optimizer.epsilon),
            ("decay", optimizer.decay),
            ("clip", optimizer.clip),
        )
        if not number >= 0
    ]


def _check_rate(rate: Rate) -> list[str]:
    problems = []
    if not 0 < rate.peak < inf:
        problems.append(f"method.rate.peak is {rate.peak}; it must be above 0, and finite")
    if not 0 <= rate.floor <= 1:
        problems.append(f"method.rate.floor is {rate.floor}; it is a share of the peak, in [0, 1]")
    for name, steps in (("warmup", rate.warmup), ("decay", rate.decay)):
        if steps < 0:
            problems.append(f"method.rate.{name} is {steps} steps; it must not be negative")
    return problems
