"""Parallel equals single: weights that are shared out, and activations that are made again,
against plain PyTorch on one device, in float64. The bytes of every gather are predicted.

    zero3        2 to 4 ranks, gradients as shares or whole, copies of the shares, three transports
    recompute    full and selective, alone and with every stage of zero
    forms        biases, tied or not, norms, positions
    breaks       of the gathering itself, each of which has to be noticed
"""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from broken_workers import Broken
from small_cases import FORMS, case_of, prove
from small_runs import copy_until, losses, metrics, opened, train_on

from howdah.comm.handle import DONE
from howdah.parallel import apply as applying
from howdah.parallel.layer_window import Window
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.comm import Algorithms, Comm
from howdah.sim.traffic import step_traffic
from howdah.verify.verify import verify


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["zero3", "zero3 accumulate=whole"])
@pytest.mark.parametrize("ranks", ["dp2 x1", "dp3 x3", "dp4 x2"])
def test_shared_out_weights_equal_one_device(workers, ranks, words):
    prove(case_of(f"{ranks} {words}"), workers, controls=ranks == "dp3 x3")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout", ["dp3 zero3 gather=broadcast x2", "dp2 tp2 zero3 gather=broadcast x1"]
)
def test_weights_that_are_broadcast_by_their_owners_equal_one_device(workers, layout):
    case = case_of(layout)
    prove(case, workers)
    sent = step_traffic(case.plan, 0)
    direct = step_traffic(case_of(layout.replace(" gather=broadcast", "")).plan, 0)
    assert sum(sent.values()) == sum(direct.values())
    assert {row.operation for row in sent} - {row.operation for row in direct} == {"broadcast"}
    chosen = Comm(Algorithms(broadcast="binomial to 1 kB, ring"))
    prove(replace(case, comm=chosen), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["", "accumulate=whole", "recompute=full"])
def test_groups_with_copies_of_the_shares_equal_one_device(workers, words):
    prove(case_of(f"dp4 zero3 shard2 x2 {words}"), workers)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    "layout", ["x2", "dp2 x3", "dp3 zero1 x1", "dp2 zero2 x2", "dp2 zero3 x3", "dp3 zero3 x1"]
)
def test_what_is_made_again_equals_one_device(workers, layout, kind):
    prove(case_of(f"{layout} recompute={kind}"), workers, controls=layout == "dp2 x3")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "layout", ["dp3 zero3 recompute=selective x1", "dp2 zero3 recompute=full x2"]
)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "laptop"])
def test_every_form_equals_one_device(workers, form, layout):
    prove(case_of(layout, form=form), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero3 x2", "dp2 zero3 recompute=full x2"])
def test_gloo_carries_shares(workers, layout):
    prove(case_of(layout), workers, transport="torch")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["zero3", "zero3 recompute=full", "zero3 recompute=selective"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, precision, words):
    prove(case_of(f"dp2 {words} x3", precision=precision), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("form", ["laptop", "gpt2"])
def test_dropout_drops_the_same_when_it_is_made_again(workers, form, kind):
    prove(case_of(f"dp2 zero3 x2 recompute={kind}", form=form, dropout=0.1), workers)


# -- breaks --------------------------------------------------------------------------


class Skipping(ShardedWeights):
    """Does not gather layers.1 in backward: what lies in its place is taken for it."""

    def _gather(self, unit):
        gathered = [seen for seen in self._seen if seen == "layers.1"]
        if unit != "layers.1" or len(gathered) % 2 == 0:
            return super()._gather(unit)
        with patch.object(self._group, "all_gather", lambda *_, **__: DONE):
            return super()._gather(unit)


class Early(ShardedWeights):
    """Releases a unit while it is in use: the next one takes its place."""

    def _advance_to(self, unit):
        super()._advance_to(unit)
        for one in self._whole.values():
            one.handle.result()

    def _gather(self, unit):
        self._places = Window(self.window)
        return super()._gather(unit)

    def _release(self, stay):
        self._whole = {unit: one for unit, one in self._whole.items() if unit in stay}
        self._here = {}


class Stale(ShardedWeights):
    """Takes the first unit of a step for what it was in the step before."""

    def begin(self, kind):
        kept = self.window.clone()
        super().begin(kind)
        for one in self._whole.values():
            one.handle.result()
            self.window.copy_(kept)


class Unpublished(ShardedWeights):
    """Gathers shares as they were before the first update."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        bundles = self._bundles.items()
        self._bundles = {name: [*map(_frozen, some)] for name, some in bundles}


def _frozen(unit):
    return replace(unit, weights=unit.weights.clone())


def gathering(kind):
    """With another class of gathering."""
    return patch.object(applying, "ShardedWeights", kind)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [Skipping, Early, Stale, Unpublished])
def test_a_break_of_the_gathering_is_noticed(workers, kind):
    broken = Broken(workers, partial(gathering, kind))
    verdict = verify(case_of("dp2 zero3 x2"), broken, controls=False)
    assert not verdict.proved
    assert any(difference.used > 1 for difference in verdict.differences)


# -- checkpoints ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_shared_out_weights(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=dp3 zero3"))
    never_changed = losses(tmp_path / "a")
    held_out = {step: row["loss"] for step, row in metrics(tmp_path / "a", "held_out").items()}
    for layout in ("single", "dp2 zero1", "dp4 zero3", "dp2 zero3 recompute=full"):
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}"))
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)
        found = {step: row["loss"] for step, row in metrics(folder, "held_out").items()}
        assert found == pytest.approx(held_out, rel=1e-6)
        assert opened(folder, 20).samples == opened(tmp_path / "a", 20).samples


def test_a_run_on_shares_ends_with_the_bytes_that_were_predicted(workers, make_job, tmp_path):
    """Evaluations and the forward pass that measures memory gather too, and do not count."""
    job = make_job("a", "layout=dp2 zero3", "train.evaluate_every=7", "method.dropout=0.1")
    train_on(workers, job)
    told = (tmp_path / "a" / "log.txt").read_text()
    assert "bytes, counted" in told and ": equal" in told
    memory = next(line for line in told.splitlines() if line.startswith("memory "))
    for part in memory.split(": ", 1)[1].split(", "):
        found, predicted = part.rstrip(")").split(" (predicted ")
        assert found.split()[-1] == predicted, part
