"""Parallel equals single where a part is trained of models with experts, with latent attention, and
with an encoder in front of a decoder: frozen weights, rates, and adapters.

As in test_trained_parallel.py: losses, norms, gradients and weights of plain PyTorch on one device,
and predicted bytes.
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

from howdah.plan.check import check_plan
from howdah.plan.method import Adapter, Routing
from howdah.plan.support import unsupported
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape

SLOW = pytest.mark.slow
SHAPES = {
    "mixtral": small_shape(preset("mixtral-8x7b"), context=16),
    "deepseek": small_shape(preset("deepseek-v3"), context=16),
    "t5": replace(small_shape(preset("t5-small"), context=16), vocab=67),
    "flan": small_shape(preset("flan-t5-base"), context=16),
}
LATENT = ("q_down", "q_up", "kv_down", "kv_up", "o", "layers.0.feedforward.down.weight")
DENSE = Adapter(rank=3, targets=("q", "k", "v", "o", "up", "down"))
LOW = {
    "mixtral": Adapter(rank=3, targets=("q", "k", "v", "o")),
    "deepseek": Adapter(rank=3, targets=LATENT),
    "t5": DENSE,
    "flan": DENSE,
}
BEHIND = Adapter(rank=2, targets=("layers.*.cross.v.weight", "layers.1.attention.q.weight"))
PARTS = {
    "mixtral": [
        ("layers.1.experts.down.weight", "layers.0.attention.q.weight=3"),
        ("layers.1.router.weight", "layers.1.attention.o.weight"),
    ],
    "deepseek": [
        ("layers.1.*", "layers.1.router.bias=0", "norm.*=0.5"),
        ("layers.0.attention.kv_up.weight", "layers.1.shared.*", "layers.1.router.*"),
    ],
    "t5": [
        ("encoder.1.*", "layers.1.cross.k.weight=2"),
        ("layers.1.*", "norm.*=0.5"),
        ("relative.*", "layers.0.feedforward.*"),
    ],
}


def trained(layout, form, train=(), adapter=None):
    case = case_of(layout)
    method = replace(case.method, train=train, adapter=adapter)
    if experts := SHAPES[form].experts:
        method = replace(method, routing=Routing(balance_loss=0.01, bias_rate=0.01 * experts.bias))
    case = replace(case, shape=SHAPES[form], method=method)
    assert not unsupported(case.shape, case.layout)
    batch, sequence = case.plan.batch, case.sequence
    assert not check_plan(case.shape, case.layout, batch, method, sequence=sequence)
    return case


QUICK_LOW = [("mixtral", "dp2 zero3 x2"), ("deepseek", "tp2 sp"), ("t5", "pp2 1f1b x3")]
QUICK_PARTS = [("mixtral", "tp2 sp", 0), ("t5", "dp2 zero3 x2", 0)]
LAYOUTS = (
    *("single", "dp2 x2", "dp2 zero1 x2", "dp2 zero2 x2", "dp2 zero3 x2", "tp2", "tp2 sp"),
    *("dp2 recompute=full x2", "tp2 sp recompute=full", "tp2 recompute=selective"),
    *("pp2 1f1b x3", "pp2 zb-h1 x3", "pp2 tp2 sp x2", "dp2 zero3 release=step"),
)


def layouts_of(form):
    return (*LAYOUTS, "dp2 ep2 x2", "dp4 ep2 zero2") if SHAPES[form].experts else LAYOUTS


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        *QUICK_LOW,
        *(
            pytest.param(form, layout, marks=SLOW)
            for form in SHAPES
            for layout in layouts_of(form)
            if (form, layout) not in QUICK_LOW
        ),
    ],
)
def test_adapters_of_all_families_are_trained_alike(workers, form, layout):
    prove(trained(layout, form, adapter=LOW[form]), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("form", "layout", "which"),
    [
        *QUICK_PARTS,
        *(
            pytest.param(form, layout, which, marks=SLOW)
            for form, every in PARTS.items()
            for which in range(len(every))
            for layout in layouts_of(form)
            if (form, layout, which) not in QUICK_PARTS
        ),
    ],
)
def test_parts_of_all_families_are_trained_alike(workers, form, layout, which):
    prove(trained(layout, form, PARTS[form][which]), workers)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("t5", "tp2 sp"),
        *(
            pytest.param(*p, marks=SLOW)
            for p in (
                ("t5", "pp2 1f1b x3"),
                ("t5", "tp2"),
                ("flan", "dp2 zero3 recompute=full x2"),
                ("mixtral", "tp2 sp"),
            )
        ),
    ],
)
def test_lengths_of_rows_are_trained_alike_in_all_families(workers, form, layout):
    prove(trained(layout, form, adapter=replace(LOW[form], kind="dora")), workers)


@pytest.mark.parametrize(
    "layout", ["pp2 1f1b x3", *(pytest.param(one, marks=SLOW) for one in LAYOUTS[:8])]
)
def test_a_decoder_alone_has_adapters_behind_a_frozen_encoder(workers, layout):
    """The encoder's output needs a gradient for the adapters of cross attention alone."""
    prove(trained(layout, "t5", ("norm.*",), BEHIND), workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "layout"),
    [("t5", "pp2 1f1b x3"), ("t5", "tp2 sp"), ("deepseek", "tp2 sp"), ("mixtral", "dp2 zero3 x2")],
)
def test_breaks_of_these_families_are_noticed(workers, form, layout):
    verdict = prove(trained(layout, form, adapter=LOW[form]), workers, controls=True)
    assert len(verdict.controls) >= 3 and all(failing for _, failing in verdict.controls)
