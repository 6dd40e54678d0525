"""What is wrong with the sizes of a model, as sentences with a way out."""

from collections.abc import Iterator

from howdah.base.errors import UserError, shown
from howdah.base.tables import out_of_bounds
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import Experts, ModelShape

LARGEST = 10**14  # parameters, ten times the most that was ever announced


def check_shape(shape: ModelShape) -> list[str]:
    """Everything that is wrong with the sizes, as sentences."""
    if problems := out_of_bounds(shape, "model"):
        return problems
    problems = [*_check_heads(shape), *_check_stacks(shape), *_check_experts(shape)]
    problems += _check_labels(shape)
    if not problems and (count := parameters(shape).total) > LARGEST:
        problems = [f"the model has {count:.2g} parameters; at most {LARGEST:.0e} are planned for"]
    return problems


def _check_heads(shape: ModelShape) -> Iterator[str]:
    if shape.bias and shape.qkv_bias:
        yield "model.bias has the biases of model.qkv_bias already; leave model.qkv_bias out"
    if shape.latent is not None:
        yield from _check_latent(shape)
        return
    if shape.head_size is None and shape.width % shape.heads:
        fits = _nearest_divisor(shape.width, shape.heads)
        yield (
            f"model.width {shape.width} does not divide into {shape.heads} heads; "
            f"use {fits} heads, or give model.head_size"
        )
    if shape.heads % shape.k:
        fits = _nearest_divisor(shape.heads, shape.k)
        yield f"model.kv_heads {shape.k} does not divide {shape.heads} heads; use {fits}"
    scaling = shape.rope_scaling
    if scaling is not None and scaling.high is not None and scaling.low >= scaling.high:
        yield (
            f"model.rope_scaling.low {scaling.low:g} must be below model.rope_scaling.high "
            f"{scaling.high:g}"
        )
    if shape.positions == "rotary" and shape.d % 2:
        yield f"rotary positions turn pairs, but a head has {shape.d} numbers; make it even"


def _check_latent(shape: ModelShape) -> Iterator[str]:
    assert shape.latent is not None
    for name in ("kv_heads", "head_size", "bias", "qkv_bias", "qk_norm"):
        if getattr(shape, name):
            yield f"model.latent is an attention without model.{name}; leave model.{name} out"
    if shape.family != "decoder" or shape.positions != "rotary":
        yield (
            f"model.latent needs family decoder and rotary positions, not {shape.family} and "
            f"{shape.positions}; leave model.latent out"
        )
    if shape.latent.qk_rope_size % 2:
        yield (
            "rotary positions turn pairs, but model.latent.qk_rope_size is "
            f"{shape.latent.qk_rope_size}; make it even"
        )


def _check_stacks(shape: ModelShape) -> Iterator[str]:
    both = shape.family == "encoder-decoder"
    if both and not shape.encoder_layers:
        yield "an encoder-decoder needs model.encoder_layers; give at least 1"
    if shape.encoder_layers and not both:
        yield (
            f"model.encoder_layers is {shape.encoder_layers}, but model.family is {shape.family}, "
            "whose blocks are model.layers; leave it out, or make the family encoder-decoder"
        )
    if both and shape.experts is not None:
        yield "model.experts is for models of one stack; leave it out of an encoder-decoder"


def _check_experts(shape: ModelShape) -> Iterator[str]:
    experts = shape.experts
    if experts is None:
        return
    if experts.top_k > experts.count:
        yield (
            f"model.experts.top_k {experts.top_k} is more than model.experts.count; "
            f"use at most {experts.count}"
        )
    if shape.layers - experts.first_dense < experts.every:
        yield (
            f"none of {shape.layers} layers has experts with model.experts.first_dense "
            f"{experts.first_dense} and every {experts.every}; make one of the two smaller"
        )
    if shape.bias:
        yield "model.bias is for dense models, experts have none; leave it out"
    if experts.shared_gate and not experts.shared:
        yield (
            "model.experts.shared_gate weighs the shared expert, and model.experts.shared is 0; "
            "leave it out"
        )
    if experts.top_k <= experts.count:
        yield from _check_groups(experts)


def _check_labels(shape: ModelShape) -> Iterator[str]:
    labels = shape.labels
    if not labels:
        return
    twice = [label for place, label in enumerate(labels) if label in labels[:place]]
    if len(labels) == 1:
        yield f"model.labels has {shown(labels[0])} alone; two at least can be told apart"
    elif twice or "" in labels:
        what = f"{shown(twice[0])} twice" if twice else "an empty name"
        yield f"model.labels has {what}; give each label a name of its own"
    if shape.family == "encoder-decoder":
        yield (
            "model.labels is for models of one stack, and model.family is encoder-decoder; leave "
            "it out: a T5 writes its labels, as the targets of pairs"
        )
    for name in ("tie_embeddings", "transform"):
        if getattr(shape, name):
            yield f"model.labels has a head of its own; use model.{name}=false"


def _check_groups(experts: Experts) -> Iterator[str]:
    size, rest = divmod(experts.count, experts.groups)
    if rest:
        fits = _nearest_divisor(experts.count, experts.groups)
        yield (
            f"model.experts.groups {experts.groups} does not divide {experts.count} experts; "
            f"use {fits}"
        )
    elif experts.top_groups > experts.groups:
        yield (
            f"model.experts.top_groups {experts.top_groups} is more than model.experts.groups; "
            f"use at most {experts.groups}"
        )
    elif experts.top_groups * size < experts.top_k:
        yield (
            f"{experts.top_groups} groups of {size} experts have fewer than model.experts.top_k "
            f"{experts.top_k}; use model.experts.top_groups={-(-experts.top_k // size)} or more"
        )
    elif experts.group_best > size:
        yield (
            f"model.experts.group_best {experts.group_best} is more than the {size} experts of a "
            f"group; use at most {size}"
        )


def require_shape(shape: ModelShape) -> None:
    """Raises UserError with the first sentence of `check_shape`, if there is one."""
    for problem in check_shape(shape):
        raise UserError(problem)


def _nearest_divisor(total: int, wanted: int) -> int:
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - wanted))
