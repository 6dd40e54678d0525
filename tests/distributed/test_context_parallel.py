"""Parallel equals single: sequences shared by the ranks of cp, in a ring and by all-to-all.

layouts   cp 2 to 4, beside dp, tp with sp, pp, every ZeRO stage and recomputation
forms     grouped heads, more ranks than key-value heads, norms of heads, biases, positions
uneven    chunks, heads, the last micro-batch
controls  those of every layout, and those of sequences that are shared
"""

from dataclasses import replace

import pytest
from small_cases import FORMS, case_of, prove
from small_runs import losses, samples_of, train_watched

from howdah.comm.spawn import Workers
from howdah.verify.evidence import gather
from howdah.verify.mutations import mutations
from howdah.verify.verify import report, verify

BREAKS = ["a loss scaled by cp", "a chunk out of order", "a document across its border"]
TRADE, BOTH = "context=all-to-all", "context=both"
slow = pytest.mark.slow


def uneven(layout, **sizes):
    """Chunks of 5, 5, 5 and 4 positions under cp2; other sizes of the model as given."""
    case = case_of(layout)
    shape = replace(FORMS["laptop"], context=19, **sizes)
    return replace(case, sequence=19, shape=shape)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "breaks"),
    [
        ("cp2 x2", [*BREAKS, "a wrong merge"]),
        (f"cp2 x2 {TRADE}", BREAKS),
        (f"cp4 x2 {BOTH}", [*BREAKS, "a wrong merge"]),
        # x2: the one sample of x1 has one document, and no border that could be crossed
        pytest.param("cp2 tp2 sp x2", [*BREAKS, "a wrong merge"], marks=slow),
        pytest.param(f"dp2 cp2 zero2 recompute=full x1 {TRADE}", BREAKS, marks=slow),
        pytest.param("cp2 pp2 recompute=selective x2", [*BREAKS, "a wrong merge"], marks=slow),
    ],
)
def test_every_break_is_noticed(workers, layout, breaks):
    case = case_of(layout)
    assert [mutation.name for mutation in mutations(case.plan)][-len(breaks) :] == breaks
    verdict = verify(case, workers)
    assert verdict.proved, "\n".join(report(verdict))
    assert [name for name, failing in verdict.controls[-len(breaks) :] if failing] == breaks
    assert all(failing.used > 1e4 for _, failing in verdict.controls)


@pytest.mark.parametrize("form", [pytest.param(form, marks=slow) for form in FORMS])
@pytest.mark.parametrize("layout", ["cp2 x2", f"cp2 x2 {TRADE}"])
def test_every_form_equals_one_device(workers, layout, form):
    prove(case_of(layout, form=form), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["cp3 x1", f"cp3 x2 {TRADE}", f"cp4 x1 {BOTH}"])
def test_nothing_needs_to_divide(workers, layout):
    """Neither tokens nor, between the ranks, heads: 19 positions, 8 heads of 4 key-value heads."""
    prove(uneven(layout, heads=8, kv_heads=4, width=40, head_size=8), workers)


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads"),
    [
        (f"cp2 {TRADE}", 3, 1),  # one has two query heads, the other one
        (f"cp4 {BOTH}", 3, 1),
        pytest.param(f"cp4 {TRADE}", 8, 2, marks=slow),
        pytest.param(f"cp2 tp2 {TRADE}", 6, 3, marks=slow),  # tp ranks with two and one of them
        pytest.param(f"cp2 tp2 sp {TRADE}", 4, 1, marks=slow),
    ],
)
def test_key_value_heads_are_shared_by_more_ranks_than_there_are_heads(
    workers, layout, heads, kv_heads
):
    prove(uneven(f"{layout} x1", heads=heads, kv_heads=kv_heads, width=24), workers)


@slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", ["cp2 x2", "cp4 x1", f"cp2 tp2 sp x2 {TRADE}", f"cp4 x2 {BOTH}"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, layout, precision):
    prove(case_of(layout, form="qwen3", precision=precision), workers)


@pytest.mark.parametrize("layout", ["cp2 x2", pytest.param(f"cp2 tp2 sp x2 {TRADE}", marks=slow)])
def test_dropout_of_a_chunk_drops_what_one_device_drops(workers, layout):
    prove(case_of(layout, dropout=0.1), workers)


@slow
@pytest.mark.parametrize("layout", ["cp2 x2", f"cp2 x2 {TRADE}"])
def test_gloo_carries_it(workers, layout):
    prove(case_of(layout), workers, transport="torch")


@slow
@pytest.mark.parametrize("layout", ["dp2 cp2 zero1 x2", f"cp2 tp2 x2 {TRADE}"])
def test_the_same_run_twice_gives_the_same_bits(workers, layout):
    case = case_of(layout, form="qwen3")
    first, second = (workers.run(gather, case, ranks=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms, one.checksums) == (
            other.losses,
            other.norms,
            other.checksums,
        )


def test_a_run_on_any_layout_goes_on_as_one_device_would(workers, make_job, tmp_path):
    """It reads the samples of the single run, and its held-out losses are those of that."""
    settings = ["batch.global_batch=6", "batch.micro_batch=3", "method.lr.schedule=constant"]
    never = make_job("never", "train.steps=4", *settings)
    read = samples_of(workers.run(train_watched, [never], ranks=1))
    changing = {}
    for steps, layout in ((2, "cp2"), (3, f"cp2 zero3 {TRADE}"), (4, "single")):
        job = make_job("always", f"layout={layout}", f"train.steps={steps}", *settings)
        changing |= samples_of(workers.run(train_watched, [job], ranks=job.layout.world))
    assert changing == read
    assert losses(tmp_path / "always") == pytest.approx(losses(tmp_path / "never"), rel=1e-6)


@pytest.fixture(scope="module")
def eight():
    found = Workers(8)
    yield found
    found.close(kill=True)


@slow
@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads"),
    [
        (f"cp4 tp2 sp x1 {BOTH}", 8, 4),
        (f"dp2 cp4 zero3 recompute=full x1 {BOTH}", 6, 2),
        (f"cp4 pp2 1f1b recompute=selective x2 {BOTH}", 6, 2),
        (f"cp8 x1 {BOTH}", 4, 4),  # two groups of four
        (f"cp8 x1 {BOTH}:2", 4, 2),
        (f"cp6 x1 {BOTH}:2", 4, 2),
    ],
)
def test_groups_that_trade_in_a_ring(eight, layout, heads, kv_heads):
    prove(uneven(layout, heads=heads, kv_heads=kv_heads, width=8 * heads), eight)
