"""Random layouts and plans: what the property tests of the deciding floors draw from."""

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st
from random_shapes import shapes

from howdah.base.errors import UserError
from howdah.plan.batch import Batch
from howdah.plan.layout import SCHEDULES, Layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.part import Part

small = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
home = st.sampled_from(["device", "device", "host", "disk"])
CONTEXTS = "ring", "all-to-all", "both"
known = [Part("encoder", 0), *(Part("layers", layer) for layer in range(3))]
named = st.sets(st.sampled_from(known), min_size=1).map(lambda some: tuple(sorted(some)))
blocks = st.none() | st.integers(1, 3) | named


def counts(stages):
    """Numbers of blocks of so many stages."""
    return st.lists(st.integers(1, 3), min_size=stages, max_size=stages).map(tuple)


@st.composite
def layouts(draw, *, star=True):
    """Any layout that contradicts itself nowhere; `star` allows dp*."""
    pp, cp, tp = (draw(small) for _ in range(3))
    sp = draw(st.booleans()) and tp > 1
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    dp = draw(st.sampled_from([None, 1, 2, 6])) if star else draw(small)
    zero, divisors = draw(st.integers(0, 3)), _divisors((dp or 1) * cp)
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else None
    virtual = {"interleaved": draw(st.integers(2, 3)), "zb-v": 2}.get(schedule, 1)
    return Layout(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=draw(st.sampled_from(divisors)),
        zero=zero,
        shard=draw(st.sampled_from([None, *divisors])) if zero else None,
        sp=sp,
        schedule=schedule,
        virtual=virtual,
        micros=draw(st.none() | st.integers(1, 9)) if star else draw(st.integers(1, 9)),
        slices=draw(st.integers(2, 4)) if schedule == "terapipe" else 1,
        stages=draw(st.none() | counts(pp * virtual)) if pp > 1 else None,
        accumulate=draw(st.sampled_from([None, "whole", "shard"])) if zero >= 2 else None,
        recompute=recompute,
        recompute_blocks=draw(blocks) if recompute != "none" else None,
        context=draw(st.sampled_from(CONTEXTS[: 1 + (cp > 1) + (cp == 4)])),
        inputs=draw(st.sampled_from(["sliced", "gathered"])) if sp else "sliced",
        release=draw(st.sampled_from(["use", "step"])) if zero == 3 else "use",
        weights=draw(home),
        gradients=draw(home),
        optimizer=draw(home),
        activations=draw(home),
    )


def _divisors(total):
    return [n for n in range(1, total + 1) if total % n == 0]


@st.composite
def plans(draw):
    """A plan that `make_plan` accepts: any model that it takes on any layout."""
    try:
        return make_plan(
            replace(draw(shapes()), context=64),
            draw(layouts(star=False)),
            Batch(micro_batch=draw(st.integers(1, 3))),
            sequence=draw(st.integers(8, 40)),
            method=Method(precision=draw(st.sampled_from(["float32", "bf16", "float64"]))),
        )
    except UserError:
        assume(False)
