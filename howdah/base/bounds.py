"""The smallest and the largest allowed value of every number of a run, in one table.

Every number of a recipe, a config.json or a checkpoint is checked here before anything is allocated
or looped over. The upper bound of a size is far above the largest known model, so it limits no real
run. It ensures that a plan is computed in a moment and that its sums fit in 64 bits.

Keys leave out list indices: `data.sources.weight` is the bound for the weight of each source.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import isnan
from typing import NamedTuple

from howdah.base.errors import shown


class Bound(NamedTuple):
    """The allowed range of one number: least ≤ number ≤ most.

    above, below  exclude `least`, or `most`, itself
    means         for the error message: the special meaning of the value `least`, if it has one
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    means: str = ""


SIZE = Bound(1, 1 << 17)
SHARE = Bound(0, 1, below=True)
STEPS = Bound(0, 10**7)
ANY = Bound(0, 1e9)
POSITIVE = Bound(0, 1e9, above=True)

BOUNDS = {
    "seed": Bound(-(2**63), 2**63 - 1),
    "threads": Bound(0, 1024, means="which shares the cores out"),
    # Sizes: 1,000 layers are DeepNet's (https://arxiv.org/abs/2203.00555).
    "model.layers": Bound(1, 1000),
    "model.encoder_layers": Bound(0, 1000),
    "model.width": SIZE,
    "model.heads": Bound(1, 4096),
    "model.kv_heads": Bound(1, 4096),
    "model.head_size": SIZE,
    "model.ffn_size": Bound(1, 1 << 20),
    "model.vocab": Bound(1, 1 << 24),
    "model.context": Bound(1, 1 << 27),
    "model.norm_eps": Bound(0, 1),
    "model.rope_theta": POSITIVE._replace(most=1e12),
    "model.rope_scaling.factor": POSITIVE,
    "model.rope_scaling.low": POSITIVE,
    "model.rope_scaling.high": POSITIVE,
    "model.rope_scaling.context": Bound(1, 1 << 27),
    "model.token_types": Bound(0, 1 << 17),
    "model.relative_buckets": SIZE,
    "model.latent.kv_rank": SIZE,
    "model.latent.query_rank": Bound(0, 1 << 17),
    "model.latent.qk_nope_size": SIZE,
    "model.latent.qk_rope_size": SIZE,
    "model.latent.v_size": SIZE,
    "model.experts.count": Bound(1, 1 << 14),
    "model.experts.top_k": Bound(1, 1 << 14),
    "model.experts.ffn_size": Bound(1, 1 << 20),
    "model.experts.shared": Bound(0, 1 << 20),
    "model.experts.first_dense": Bound(0, 1000),
    "model.experts.every": Bound(1, 1000),
    "data.sources.weight": POSITIVE,
    "data.sequence_length": Bound(1, 1 << 27),
    "data.validation_share": Bound(0, 1, above=True, below=True),
    "batch.global_batch": Bound(1, 1 << 31),
    "batch.micro_batch": Bound(1, 1 << 31),
    "batch.ramp_from": Bound(0, 1 << 31),
    "batch.ramp_steps": STEPS,
    "method.dropout": SHARE,
    "method.label_smoothing": SHARE,
    "method.z_loss": ANY,
    "method.optimizer.betas": SHARE,
    "method.optimizer.momentum": SHARE,
    "method.optimizer.epsilon": ANY,
    "method.optimizer.weight_decay": ANY,
    "method.grad_clip": ANY,
    "method.lr.peak": POSITIVE,
    "method.lr.warmup_steps": STEPS,
    "method.lr.min_ratio": Bound(0, 1),
    "method.lr.decay_steps": STEPS,
    "train.steps": STEPS._replace(least=1),
    "train.log_every": STEPS._replace(least=1),
    "train.evaluate_every": STEPS,
    "train.evaluate_samples": Bound(0, 1 << 31),
    "train.save_every": STEPS,
    "train.keep_last": Bound(1, 10**6),
}


def out_of_bounds(value: object, path: str = "") -> Iterator[str]:
    """Yields one sentence for every number that is out of bounds in a dataclass or nested in it.

    path  the dotted name of `value`, such as "model"; empty for a complete run
    """
    if is_dataclass(value):
        for field in fields(value):
            inner = f"{path}.{field.name}" if path else field.name
            yield from out_of_bounds(getattr(value, field.name), inner)
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from out_of_bounds(item, f"{path}[{place}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _problem(value, path)


def _problem(number: float, path: str) -> Iterator[str]:
    bound = BOUNDS[re.sub(r"\[\d+\]", "", path)]
    says = f"{path} is {shown(number)}; it must be"
    if isinstance(number, float) and isnan(number):  # isnan() fails for a huge int
        yield f"{says} a number"
    elif number < bound.least or (bound.above and number == bound.least):
        means = f", {bound.means}" if bound.means else ""
        yield f"{says} {'above' if bound.above else 'at least'} {_spelled(bound.least)}{means}"
    elif number > bound.most or (bound.below and number == bound.most):
        yield f"{says} {'below' if bound.below else 'at most'} {_spelled(bound.most)}"


def _spelled(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
