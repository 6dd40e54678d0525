"""Checks a plan before any device is used, and reports all its problems at once, as sentences."""

from collections.abc import Iterator
from dataclasses import replace

from howdah.base.bounds import Tokens
from howdah.base.errors import UserError, shown
from howdah.base.tables import out_of_bounds
from howdah.plan.batch import Batch, resolve_batch
from howdah.plan.chosen_blocks import missing_problem
from howdah.plan.heads import held_heads
from howdah.plan.layout import Layout, family_of
from howdah.plan.method import SENTINELS, Masking, Method, Routing, Spans
from howdah.plan.method_problems import own_problems
from howdah.plan.servers import server_problems
from howdah.plan.stage_counts import blocks_problem
from howdah.plan.storage import delay_problems
from howdah.plan.trained import train_problems
from howdah.shapes.check import check_shape
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts

LARGEST_STEP = 1 << 31  # tokens: beyond it, the bytes of a step would not fit in 64 bits


def check_plan(
    shape: ModelShape, layout: Layout, batch: Batch, method: Method, *, sequence: int
) -> list[str]:
    """A sentence for each problem of a run's model, layout, batch and method; empty if none.

    sequence  tokens per sample
    """
    problems = check_shape(shape)
    if not problems:
        problems += [f"layout '{layout}': {problem}" for problem in _check_cuts(shape, layout)]
        problems += [
            f"layout '{layout}': {problem}" for problem in _check_tokens(shape, layout, sequence)
        ]
    problems += out_of_bounds(sequence, "data.sequence_length", Tokens)
    if sequence > shape.context:
        problems.append(
            f"data.sequence_length {shown(sequence)} is over the model's context "
            f"{shown(shape.context)}; use data.sequence_length={shown(shape.context)}, or a "
            "larger model.context"
        )
    problems += _check_batch(batch, layout, sequence)
    if method.gradient_dtype != "full" and method.precision == "float64":
        problems.append(
            f"method.gradient_dtype={method.gradient_dtype} would throw away what "
            "method.precision=float64 computes; use gradient_dtype=full, or precision=float32"
        )
    problems += [f"layout '{layout}': {one}" for one in server_problems(shape, layout, method)]
    problems += [f"layout '{layout}': {one}" for one in delay_problems(layout, method)]
    problems += [f"layout '{layout}': {one}" for one in own_problems(layout, method)]
    problems += [*_check_routing(shape, method.routing), *_check_masking(shape, method.masking)]
    problems += _check_spans(shape, method.spans, sequence)
    problems += [] if problems else [*train_problems(shape, layout, method)]
    rings = layout.cp > 1 and layout.context != "all-to-all"
    if method.attention_dropout and (rings or shape.latent):
        what = "latent attention" if shape.latent else f"cp{layout.cp} as a ring"
        way = "" if shape.latent else "context=all-to-all, or "
        problems.append(
            f"method.attention_dropout drops probabilities of whole samples and heads, and {what} "
            f"has none; use {way}method.dropout, which drops behind attention"
        )
    return [*problems, *out_of_bounds(method, "method")]


def _check_routing(shape: ModelShape, routing: Routing) -> Iterator[str]:
    """The problems of balancing experts."""
    if shape.experts is None and routing != Routing():
        yield (
            "method.routing is for models with experts, and this one has none; leave it out, or "
            "give model.experts"
        )
    if shape.experts and routing.bias_rate and not shape.experts.bias:
        yield (
            "method.routing.bias_rate moves the biases of routers, and model.experts.bias is "
            "false; use model.experts.bias=true, or method.routing.balance_loss"
        )
    if shape.experts and 0 < routing.capacity < 0.5:
        yield (
            f"method.routing.capacity {routing.capacity:g} drops {1 - routing.capacity:.0%} of the "
            "choices even where all experts are equally busy; use at least 0.5, 1.25 is usual, or "
            "0 to drop none"
        )


def _check_masking(shape: ModelShape, masking: Masking) -> Iterator[str]:
    """The problems of hiding tokens."""
    if masking != Masking() and shape.family != "encoder":
        yield (
            f"method.masking hides tokens from an encoder, and model.family is {shape.family}; "
            "leave it out"
        )
    if masking.masked + masking.random > 1:
        yield (
            f"method.masking.masked {masking.masked:g} and random {masking.random:g} are more than "
            "all hidden tokens together; make their sum 1 at most"
        )


def _check_spans(shape: ModelShape, spans: Spans, sequence: int) -> Iterator[str]:
    """The problems of leaving spans out."""
    count = sequence * spans.share / spans.length
    if shape.family == "encoder-decoder" and count > SENTINELS:
        yield (
            f"method.spans leaves {count:.0f} spans out of {sequence} tokens, and {SENTINELS} have "
            f"a token of their own; use method.spans.length={count * spans.length / SENTINELS:.3g} "
            "or more, or a shorter data.sequence_length"
        )
    if spans != Spans() and shape.family != "encoder-decoder":
        yield (
            "method.spans leaves tokens out for a decoder behind an encoder, and model.family is "
            f"{shape.family}; leave it out"
        )


def _check_batch(batch: Batch, layout: Layout, sequence: int) -> list[str]:
    if problems := out_of_bounds(batch, "batch"):
        return problems
    try:
        full, _ = resolve_batch(batch, layout)
    except UserError as problem:
        return [str(problem)]
    assert full.global_batch is not None
    if full.global_batch * sequence > LARGEST_STEP:
        return [
            f"a step of {full.global_batch:,} samples of {sequence:,} tokens is too large; at most "
            f"{LARGEST_STEP:,} tokens are planned for"
        ]
    return []


def _check_cuts(shape: ModelShape, layout: Layout) -> Iterator[str]:
    """The problems where an axis cuts something into more shards than it can be cut into."""
    stages, count = layout.pp * layout.virtual, len(parts(shape))
    if stages > count:
        each = f" with {layout.virtual} stages each" if layout.virtual > 1 else ""
        yield (
            f"pp{layout.pp}{each} makes {stages} stages, but the model has {count} parts "
            f"(embedding, blocks, head); use {_fitting_stages(layout, count)}"
        )
    blocks = sum(part.is_block for part in parts(shape))
    if layout.stages and (wrong := blocks_problem(layout.stages, blocks)):
        yield wrong
    chosen = layout.recompute_blocks
    if chosen is not None and (
        missing := missing_problem(layout.recompute, chosen, list(parts(shape)))
    ):
        yield missing
    if problem := _head_problem(shape, layout.tp):
        yield f"tp{layout.tp} {problem}"
    elif layout.trading > 1:
        yield from _trade_problems(shape, layout)
    some = shape.experts
    inner = min(filter(None, (shape.ffn_size, *((some.ffn_size, some.shared) if some else ()))))
    for name, size in (("vocab", shape.vocab), ("ffn", inner)):
        if layout.tp > size:
            yield f"tp{layout.tp} is over the {size} rows of {name}; use tp{size} at most"
    experts = 1 if shape.experts is None else shape.experts.count
    if layout.ep > experts:
        has = f"{experts} experts" if shape.experts else "no experts"
        yield f"ep{layout.ep} shares out experts, but the model has {has}; use ep{experts} at most"


def _fitting_stages(layout: Layout, count: int) -> str:
    """The closest pp or v of the layout that makes at most `count` stages, as words to write."""
    most = count // layout.pp
    if family_of(layout).takes == "virtual" and most > 1:
        return f"v{most}"
    most = count // layout.virtual
    if layout.virtual == 1 or most > 1:
        return f"pp{most}"
    return f"pp{min(layout.pp, count)} with one stage each, such as 1f1b"


def _head_problem(shape: ModelShape, ways: int) -> str | None:
    """Why the heads do not divide over `ways` ranks; None if they do.

    Several ranks may hold the same key-value head, but a head is never cut.
    """
    if _heads_divide(shape, ways):
        return None
    fits = min(
        (n for n in range(1, shape.heads + 1) if _heads_divide(shape, n)),
        key=lambda n: abs(n - ways),
    )
    of = "" if shape.k == shape.heads else f" of {shape.k} key-value heads"
    return f"does not divide {shape.heads} heads{of}; {fits} ways would"


def _trade_problems(shape: ModelShape, layout: Layout) -> Iterator[str]:
    """The first tp rank whose heads cannot be traded for the sequence."""
    for index in range(layout.tp):
        queries, keys = held_heads(shape, layout.tp, index)
        held = replace(shape, heads=queries, kv_heads=keys, latent=None)
        if problem := _head_problem(held, layout.trading):
            rank = f"on tp rank {index} " if layout.tp > 1 else ""
            how = f"both:{layout.inside}" if layout.inside else layout.context
            yield f"cp{layout.cp} context={how} {rank}{problem}; or use context=ring"
            return


def _heads_divide(shape: ModelShape, ways: int) -> bool:
    if ways <= shape.k:
        return True
    return ways % shape.k == 0 and ways // shape.k <= shape.heads // shape.k


def _check_tokens(shape: ModelShape, layout: Layout, sequence: int) -> Iterator[str]:
    """The problems of cutting a sequence along its tokens: by cp, sp or token slices."""
    if layout.cp > 1 and sequence < 2 * layout.cp:
        yield (
            f"cp{layout.cp} cuts a sequence into {2 * layout.cp} chunks, but it has {sequence} "
            f"tokens; use cp{max(sequence // 2, 1)} or a longer data.sequence_length"
        )
    if layout.sp and sequence // layout.cp < layout.tp:
        yield (
            f"sp cuts {sequence // layout.cp} tokens between {layout.tp} ranks; "
            f"drop sp or use data.sequence_length={layout.tp * layout.cp} or more"
        )
    if layout.slices > max(sequence, 1):
        yield f"slices{layout.slices} is over the {sequence} tokens; use slices{sequence} at most"
    if layout.slices > 1 and layout.cp > 1:
        yield f"token slices and cp{layout.cp} both cut the sequence; drop one of them"
    if layout.slices > 1 and shape.family != "decoder":
        yield f"token slices need a causal model, not an {shape.family}; drop slices{layout.slices}"
