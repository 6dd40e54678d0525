"""Second copies of weights (hpz) and gathers in 8 bits, on real ranks: bits, bytes, memory.

hpz     bits of plain zero3; proved against one device; bytes by link on two made-up machines
int8    proved against one device that rounds its weights alike
breaks  of copies and of rounding, each of which has to be noticed
"""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from broken_workers import Broken
from small_cases import case_of, prove
from small_runs import copy_until, losses, train_on
from test_machines import gather_on

from howdah.comm.spawn import Workers
from howdah.parallel import unit_messages
from howdah.parallel.unit_messages import Messages
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.method import Adapter, Method
from howdah.plan.plan import for_gpus
from howdah.plan.recording import Traffic
from howdah.sim.traffic import step_traffic
from howdah.verify.case import Case, miniature
from howdah.verify.compare import compare
from howdah.verify.evidence import gather
from howdah.verify.reference import reference
from howdah.verify.verify import verify

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def eight():
    """Eight processes."""
    with Workers(8) as workers:
        yield workers


def in_eight_bits(words, *, precision="float64", **how):
    case = case_of(words, precision=precision)
    return replace(case, method=replace(case.method, gather_dtype="int8", **how))


# -- a second copy ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["x2", pytest.param("recompute=full gather=broadcast x3", marks=SLOW)]
)
def test_a_second_copy_gives_the_bits_of_zero3(workers, words):
    plain, copied = (
        workers.run(gather, case_of(f"dp4 zero3 {more}{words}", precision="float32"), ranks=4)
        for more in ("", "hpz2 ")
    )
    for one, other in zip(plain, copied, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert one.checksums == other.checksums
        assert "copies" not in one.held and other.held["copies"] > 0
        assert sum(one.sent.values()) > sum(other.sent.values())


@pytest.mark.parametrize(
    "words",
    [
        "dp4 zero3 hpz2 x2",
        *(
            pytest.param(words, marks=SLOW)
            for words in (
                "dp4 zero3 hpz2 accumulate=whole x3",
                "dp4 zero3 hpz2 recompute=full x2",
                "dp4 zero3 hpz2 gather=broadcast x2",
                "dp4 zero3 hpz2 optimizer=host gradients=host x2",
                "dp2 cp2 zero3 hpz2 x2",
            )
        ),
    ],
)
def test_a_second_copy_equals_one_device(workers, words):
    prove(case_of(words), workers, controls=words == "dp4 zero3 hpz2 x2")


@SLOW
@pytest.mark.parametrize(
    "words",
    [
        "dp8 zero3 shard4 hpz2 x2",
        "dp4 tp2 sp zero3 hpz2 x2",
        "pp2 dp4 zero3 hpz2 1f1b x4",
        "pp2 dp4 zero3 hpz2 interleaved v2 x4",
    ],
)
def test_eight_ranks_with_second_copies_equal_one_device(eight, words):
    prove(case_of(words), eight)


@SLOW
@pytest.mark.parametrize("method", [{"train": ("layers.1.*",)}, {"adapter": Adapter(rank=2)}])
@pytest.mark.parametrize("gather_dtype", ["full", "int8"])
def test_frozen_weights_have_second_copies_too(workers, method, gather_dtype):
    case = case_of("dp4 zero3 hpz2 x2")
    method = replace(case.method, gather_dtype=gather_dtype, **method)
    prove(replace(case, method=method), workers)


def test_a_unit_crosses_machines_once_in_a_step(workers):
    """Two made-up machines of two ranks: all four send over tcp, neighbours share memory."""
    case = case_of("dp4 zero3 hpz2 x3", steps=1)
    ranks = workers.run(gather_on, case, "aabb", ranks=4)
    plain = step_traffic(case_of("dp4 zero3 x3").plan, 0, ranks[0].wires)
    across, near = Traffic("dp", "all_gather", "tcp"), Traffic("dp", "all_gather", "shared")
    for rank, evidence in enumerate(ranks):
        predicted = step_traffic(case.plan, rank, evidence.wires)
        assert {row: count for row, count in evidence.sent.items() if count} == predicted
    assert 0 < 3 * ranks[0].sent[across] < plain[across]
    assert ranks[0].sent[near] > 0
    assert all(d.used <= 1 for d in compare(case, ranks[0], reference(case), None))


@pytest.mark.parametrize(
    ("layout", "small"),
    [
        ("dp8 zero3 hpz4", "dp4 zero3 hpz2 x1"),
        ("dp8 zero3 shard4 hpz2", "dp8 zero3 shard4 hpz2 x1"),
        ("dp9 zero3 hpz3", "dp9 zero3 hpz3 x1"),
        ("dp4 cp2 zero3 hpz2", "dp2 cp2 zero3 hpz2 x1"),
    ],
)
def test_a_miniature_keeps_first_and_second_copies_apart(make_job, layout, small):
    job = make_job("a", f"layout={layout}", "batch.global_batch=72")
    assert str(miniature(job, precision="float64", steps=1).layout) == small


# -- 8 bits ----------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("dp3 zero3 x2", "float64"),
        ("dp4 zero3 hpz2 x2", "float64"),
        ("dp2 zero3 x1", "bf16"),
        *(
            pytest.param(*both, marks=SLOW)
            for both in (
                ("dp2 zero3 x2", "float32"),
                ("dp4 zero3 shard2 x2", "float64"),
                ("dp2 zero3 release=step x2", "float64"),
                ("dp2 zero3 gather=broadcast recompute=full x2", "float64"),
                ("dp2 zero3 optimizer=host gradients=host x2", "float64"),
                ("dp2 zero3 recompute=selective activations=host x2", "float64"),
                ("dp1 cp2 zero3 x2", "float64"),
                ("pp2 dp2 zero3 1f1b x4", "float64"),
                ("pp2 dp2 zero3 interleaved v2 x4", "float32"),
            )
        ),
    ],
)
def test_rounded_weights_equal_one_device_that_rounds_alike(workers, words, precision):
    prove(in_eight_bits(words, precision=precision), workers, controls=words == "dp3 zero3 x2")


def test_one_device_that_does_not_round_computes_something_else(workers):
    """The proof above would be empty if nothing was rounded, or both sides were not."""
    case = in_eight_bits("dp2 zero3 x1")
    (mine, other) = workers.run(gather, case, ranks=2)
    assert mine.checksums == other.checksums
    plain = replace(case, method=replace(case.method, gather_dtype="full"))
    differences = compare(plain, mine, reference(plain), None)
    assert sum(one.used > 1 for one in differences) > 0.9 * len(differences)
    assert mine.losses == pytest.approx(reference(plain).losses, rel=1e-3)
    assert mine.losses != pytest.approx(reference(plain).losses, rel=1e-9)


@SLOW
@pytest.mark.parametrize("transport", [None, "torch"])
def test_bytes_travel_by_chosen_algorithms_and_over_gloo(workers, transport):
    case = in_eight_bits("dp4 zero3 hpz2 x2")
    comm = Comm(Algorithms(all_gather="ring")) if transport is None else Comm()
    prove(replace(case, comm=comm), workers, transport=transport)


class Padded(Case):
    """A case on a plan for GPUs, whose shares are padded."""

    @property
    def plan(self):
        return for_gpus(super().plan)


@SLOW
def test_shares_that_are_padded_for_gpus_are_cut_between_blocks(workers):
    case = in_eight_bits("dp3 zero3 x2")
    prove(Padded(**vars(case)), workers)


def test_a_run_in_eight_bits_sends_what_was_predicted_and_learns(workers, make_job, tmp_path):
    words = "layout=dp4 zero3 hpz2", "batch.global_batch=8"
    job = make_job("narrow", *words, "method.gather_dtype=int8", "train.evaluate_every=7")
    train_on(workers, job)
    told = (tmp_path / "narrow" / "log.txt").read_text()
    assert "bytes, counted" in told and ": equal" in told
    memory = next(line for line in told.splitlines() if line.startswith("memory "))
    parts = memory.split(": ", 1)[1].split(", ")
    assert any(part.startswith("copies") for part in parts)
    for part in parts:
        found, predicted = part.rstrip(")").split(" (predicted ")
        assert found.split()[-1] == predicted, part
    found = losses(tmp_path / "narrow")
    assert found[20] < found[1] - 0.5


@SLOW
def test_a_run_in_eight_bits_goes_on_on_other_ranks_and_in_full(workers, make_job, tmp_path):
    """Checkpoints hold masters, which were never rounded."""
    train_on(workers, make_job("a", "layout=dp3 zero3", "method.gather_dtype=int8"))
    never_changed = losses(tmp_path / "a")
    train_on(workers, make_job("plain", "layout=dp3 zero3"))
    plain = losses(tmp_path / "plain")
    assert plain != never_changed and plain == pytest.approx(never_changed, rel=0.02)
    for layout, dtype, near in (("dp4 zero3 hpz2", "int8", 1e-6), ("single", "full", 0.02)):
        folder = copy_until(tmp_path / "a", tmp_path / layout, 10)
        train_on(workers, make_job(layout, f"layout={layout}", f"method.gather_dtype={dtype}"))
        assert losses(folder) == pytest.approx(never_changed, rel=near)


# -- breaks ----------------------------------------------------------------------------


class Stale(Messages):
    """Keeps second copies over the update."""

    def end(self):
        pass


class Unkept(Messages):
    """Does not keep what has come, so that neighbours gather what was there before."""

    def _arrived(self, unit, flat, shares):
        for copy in self.copies.values():
            copy.zero_()
        super()._arrived(unit, flat, shares)


class Unrounded(Messages):
    """The owner of a share computes with what it had, not with what it sent."""

    def _arrived(self, unit, flat, shares):
        super()._arrived(unit, flat, shares)
        flat[unit.start : unit.stop].copy_(unit.weights)


class Mixed(Messages):
    """Restores each block by the scale of the next."""

    def _arrived(self, unit, flat, shares):
        rows = self._message(flat).view(shares, -1)
        scales = rows[:, len(flat) // shares :].view(torch.float32)
        scales.copy_(scales.roll(1, 1).clone())
        super()._arrived(unit, flat, shares)


def sending(kind):
    """With messages of this kind."""
    return patch.object(unit_messages, "Messages", kind)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "words", "method"),
    [
        (Stale, "dp4 zero3 hpz2 x1", Method("float64")),
        (Unkept, "dp4 zero3 hpz2 x1", Method("float64")),
        (Unrounded, "dp2 zero3 x1", Method("float64", gather_dtype="int8")),
        (Mixed, "dp2 zero3 x1", Method("float64", gather_dtype="int8")),
    ],
)
def test_a_break_of_the_messages_is_noticed(workers, kind, words, method):
    case = replace(case_of(words), method=method)
    verdict = verify(case, Broken(workers, partial(sending, kind)), controls=False)
    assert not verdict.proved
    assert any(difference.used > 1 for difference in verdict.differences)
