"""Small models of which a measurement times steps: on one rank, or shared by all.

What ranks lose where they wait for each other is the difference of two: a model's steps on all
ranks, and those that each rank alone makes of the same model.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from howdah.bench.fitting import StepsOfModel
from howdah.bench.probes import Seconds, name_of
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.shapes.shape import ModelShape

# Models that ranks share, of (width, heads, kv_heads, ffn, vocab), on rows of so many tokens: one
# of short steps, in which messages show, and one whose steps are as long as those of a run. What
# ranks lose in a step that is shorter than a slice of a processor's time is no share of it.
SHARED = ((256, 4, 4, 640, 1024, 1, 128), (256, 4, 4, 640, 4096, 2, 256))


def model_of(precision: str, sizes: Sequence[int], *, layers: int = 1, micros: int = 1) -> Plan:
    """The plan of a small model on one rank."""
    width, heads, kv_heads, ffn, vocab, rows, tokens = sizes
    shape = ModelShape(layers, width, heads, ffn, kv_heads=kv_heads, vocab=vocab, context=tokens)
    shape = replace(shape, tie_embeddings=True)
    method = Method(precision=precision)  # type: ignore[arg-type]
    layout, batch = Layout(micros=micros), Batch(micro_batch=rows)
    return make_plan(shape, layout, batch, sequence=tokens, method=method)


def shared_models(precision: str, ranks: int) -> list[tuple[Plan, Plan]]:
    """Small models on several ranks, which wait for each other seldom or often, and on one."""
    parts = gcd(ranks, 4)
    rest = f"dp{ranks // parts} " if ranks > parts else ""
    layouts = [f"dp{ranks} x2", f"dp{ranks} zero3 x2"] if ranks > 1 else []
    layouts += [f"{rest}tp{parts} sp", f"{rest}pp{parts} x4"] if parts > 1 else []
    found = []
    for sizes in SHARED if layouts else ():
        alone = model_of(precision, sizes, layers=max(parts, 2), micros=2)
        shape, batch, method = alone.shape, Batch(micro_batch=sizes[5]), alone.method
        for layout in map(parse_layout, layouts):
            plan = make_plan(shape, layout, batch, sequence=sizes[6], method=method)
            found.append((plan, alone))
    return found


def shared_steps(
    precision: str, ranks: int, found: Seconds
) -> list[tuple[StepsOfModel, StepsOfModel]]:
    """The steps of models on all ranks, and those of the same models on one."""
    models = shared_models(precision, ranks)
    singles = list(dict.fromkeys(alone for _, alone in models))
    alike = {one: found[name_of("alone", number)][0] for number, one in enumerate(singles)}
    return [
        (StepsOfModel(plan, found[name_of("together", n)][0]), StepsOfModel(one, alike[one]))
        for n, (plan, one) in enumerate(models)
    ]
