"""Parallel equals single: data parallelism against plain PyTorch on one device, in float64.

Every case has documents of different length and a last micro-batch that is one sample short, and
runs its controls: a verification that would not notice a break fails here.

    layouts   dp 1 to 8, zero 0 to 2, hybrid shards, three transports     one form of model
    forms     biases, tied or not, norms, positions        two layouts
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from broken_workers import Broken
from small_cases import FORMS, case_of, prove
from typer.testing import CliRunner

from howdah.cli.commands import app
from howdah.comm.spawn import Workers
from howdah.parallel.sums import GradientSums
from howdah.plan import sums
from howdah.verify.evidence import gather
from howdah.verify.verify import verify

CONTROLS = ["a sum skipped", "a wrong count", "a norm counted twice", "a shifted micro-batch"]


def prove_noticed(case, workers):
    """Raises if the layout is not proved, or the controls are others."""
    verdict = prove(case, workers, controls=True)
    expected = CONTROLS if case.layout.world > 1 else CONTROLS[1:]
    expected = expected + ["a sum across groups skipped"] * (case.layout.shard is not None)
    assert [name for name, failing in verdict.controls if failing] == expected


SLOW = pytest.mark.slow  # cases beside quick ones that prove the same on other sizes


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        *("dp1 x3", "dp2 x3", "dp3 x1", "dp3 x3", "dp4 x1"),
        *(pytest.param(layout, marks=SLOW) for layout in ("dp1 x1", "dp2 x1", "dp4 x3")),
    ],
)
def test_every_layout_equals_one_device(workers, layout):
    prove_noticed(case_of(layout), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", ["dp2 x3", "dp3 x1", pytest.param("dp4 x2", marks=SLOW)])
@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero2 accumulate=whole"])
def test_every_stage_of_zero_equals_one_device(workers, zero, ranks):
    prove_noticed(case_of(f"{ranks} {zero}"), workers)


@pytest.mark.parametrize(
    "zero",
    ["zero2", *(pytest.param(z, marks=SLOW) for z in ("zero1", "zero2 accumulate=whole"))],
)
def test_groups_with_copies_of_the_shares_equal_one_device(workers, zero):
    prove_noticed(case_of(f"dp4 {zero} shard2 x2"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        *("dp3 zero1 x1", "dp2 zero2 x2"),
        *(pytest.param(layout, marks=SLOW) for layout in ("dp2 x2", "dp4 zero2 shard2 x2")),
    ],
)
def test_gloo_carries_every_stage(workers, layout):
    prove(case_of(layout), workers, transport="torch")


@pytest.fixture(scope="module")
def eight():
    """Eight processes."""
    with Workers(8) as workers:
        yield workers


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["dp7 x1", "dp8 zero1 x1", "dp8 zero2 x2", "dp8 zero2 shard4 x2"]
)
def test_eight_ranks_equal_one_device(eight, layout):
    prove(case_of(layout), eight)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("precision", "zero"),
    [
        *(("float32", "zero1"), ("bf16", "zero2")),
        *(pytest.param(*both, marks=SLOW) for both in (("float32", "zero2"), ("bf16", "zero1"))),
    ],
)
def test_stages_in_lower_precisions_equal_one_device(workers, zero, precision):
    prove_noticed(case_of(f"dp2 {zero} x3", precision=precision), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout", ["dp3 zero2 x2", *(pytest.param(one, marks=SLOW) for one in ("dp2 x3", "dp3 x1"))]
)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "laptop"])
def test_every_form_equals_one_device(workers, form, layout):
    prove_noticed(case_of(layout, form=form), workers)


@pytest.mark.parametrize("form", [pytest.param("laptop", marks=SLOW), "gpt2"])
def test_dropout_drops_the_same_on_every_layout(workers, form):
    prove_noticed(case_of("dp2 x3", form=form, dropout=0.1), workers)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=SLOW), "bf16"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, precision):
    prove_noticed(case_of("dp2 x3", precision=precision), workers)


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(one, marks=SLOW) for one in ("sgd", "rmsprop"))]
)
def test_every_optimizer_equals_one_device(workers, optimizer):
    case = case_of("dp2 x3", steps=3)
    settings = replace(case.method.optimizer, name=optimizer)
    prove_noticed(replace(case, method=replace(case.method, optimizer=settings)), workers)


def test_the_same_run_twice_gives_the_same_bits(workers):
    first, second = (workers.run(gather, case_of("dp3 x3"), ranks=3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms, one.checksums) == (
            other.losses,
            other.norms,
            other.checksums,
        )
    assert len({tuple(rank.checksums.items()) for rank in first}) == 1


# -- sums, changed inside the workers


def small():
    """A sum for each unit: a miniature would otherwise need only one."""
    return patch.object(sums, "BUCKET_BYTES", 1)


class Forgetful(GradientSums):
    """The sum of layers.1 is made, but without the unit's gradients."""

    def _gradient(self, span):
        gradient = super()._gradient(span)
        return gradient.clone() if span.unit == "layers.1" else gradient


@contextmanager
def forgetful():
    with small(), patch("howdah.parallel.sums.GradientSums", Forgetful):
        yield


def test_many_buckets_equal_one_device(workers):
    prove_noticed(case_of("dp3 x3"), Broken(workers, small))


def test_a_sum_that_forgets_a_unit_is_caught_and_the_weight_is_named(workers):
    verdict = verify(case_of("dp2 x3"), Broken(workers, forgetful), controls=False)
    assert not verdict.proved
    differs, bits = verdict.problems
    assert differs.endswith("gradient of layers.1.feedforward.down.weight")
    assert bits == "rank 1 holds other weights than rank 0 after the last step"
    gradients = {d.what: d.used for d in verdict.differences if d.what.startswith("gradient of")}
    assert {name for name, used in gradients.items() if used > 1} == {
        name for name in gradients if name.startswith("gradient of layers.1.")
    }


def test_the_command_says_so_and_exits_with_1(workers, recipe, cache, monkeypatch):
    arguments = ["verify", str(recipe), "layout=dp2 x3", "batch.micro_batch=1", "--steps", "2"]
    environment = {"HOWDAH_CACHE": str(cache.parent)}
    for kind, code, last in (
        (
            small,
            0,
            "equal: bytes sent and held, bits of all ranks, and every gradient within its bound",
        ),
        (forgetful, 1, "problem: rank 1 holds other weights than rank 0 after the last step"),
    ):
        monkeypatch.setattr(
            "howdah.comm.spawn.Workers", lambda size, kind=kind, **_: Broken(workers, kind)
        )
        told = CliRunner().invoke(app, arguments, env=environment)
        assert told.exit_code == code, told.output
        assert told.output.splitlines()[-1] == last
    assert "gradient of layers.1.feedforward.down.weight" in told.output
