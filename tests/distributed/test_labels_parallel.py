"""Models with a head for labels, on every form of layout, equal one device to 1e-10 in float64; and
the bytes that are sent and held are those predicted.
"""

from dataclasses import replace

import pytest

from howdah.plan.method import Method
from howdah.verify.matrix import case_of
from howdah.verify.verify import report, verify

QUICK = [
    "model=classes dp2 zero3 x2",
    "model=classes tp2 sp pp2 x4",
    "model=scores dp2 tp2 zero2 x2",
    "model=scores tp2 sp inputs=gathered recompute=full x2",
]
SLOW = [
    f"model={model} {words}"
    for model in ("classes", "scores")
    for words in (
        "x3",
        "dp2 x2",
        "dp2 zero1 x2",
        "dp2 zero2 x2",
        "dp2 zero3 release=step x2",
        "dp4 zero2 shard2 x2",
        "dp2 server2 x2",
        "tp2 x2",
        "tp2 sp x2",
        "tp2 sp inputs=gathered x2",
        "cp2 context=all-to-all x2",
        "cp2 x2",
        "pp2 gpipe x4",
        "pp2 interleaved v2 x4",
        "pp2 zb-h1 x4",
        "pp2 zb-v tp2 x4",
        "dp2 zero3 tp2 sp x2",
        "recompute=full x2",
        "recompute=selective tp2 x2",
        "weights=host gradients=host optimizer=host x2",
    )
]
DROPS = Method("float64", dropout=0.2)


def prove(case, workers, **how):
    verdict = verify(case, workers, **how)
    assert verdict.proved, "\n".join(report(verdict))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", QUICK)
def test_labels_on_a_layout_equal_one_device(workers, words):
    prove(case_of(words), workers, controls=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW)
def test_labels_on_every_form_equal_one_device(workers, words):
    prove(case_of(words), workers, controls=False)


def test_mutations_are_noticed(workers):
    prove(case_of("model=classes dp2 x2"), workers)


def test_a_dropped_pooler_is_that_of_one_device(workers):
    """Under sp each rank drops its own positions."""
    prove(replace(case_of("model=classes tp2 sp x2"), method=DROPS), workers, controls=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["tp2 sp inputs=gathered x2", "dp2 zero3 x2", "pp2 1f1b x4"])
def test_a_dropped_pooler_on_other_forms(workers, words):
    prove(replace(case_of(f"model=classes {words}"), method=DROPS), workers, controls=False)


def test_more_ranks_than_labels_hold_all_of_them(workers):
    """Three labels over four ranks: rows of a vocabulary would be cut, and one rank had none."""
    case = case_of("model=scores tp2 x2")
    shape = replace(case.shape, labels=("no", "yes"), heads=4, kv_heads=4, head_size=8)
    case = replace(case, shape=shape, layout=replace(case.layout, tp=4))
    prove(case, workers, controls=False)
