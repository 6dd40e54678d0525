"""Every wait is there: no operator touches what an operation in flight uses, and late results
change no bit.

    layouts   each form of the matrix, and the pairs of forms that share a way to send
    breaks    a wait that is left out, memory that is used again too early: each is noticed

`make flight` asks all cells of the matrix. The doubles themselves: tests/test_flight.py.
"""

import re
from dataclasses import replace
from math import isnan
from unittest.mock import patch

import pytest
from flight import FlightChecker, Race
from in_flight import both, message_for_each_unit, train_under
from late import LateDouble, Spoiled
from small_runs import assert_same_bits, metrics, tensors

from howdah.comm.handle import DONE
from howdah.comm.transport import PeerLost
from howdah.parallel.executor import VERBS, StepRun
from howdah.parallel.layer_window import Window
from howdah.parallel.sums import GradientSums
from howdah.parallel.tensor_border import TpRegion
from howdah.parallel.zero import UpdatedWeights
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.schedule.lowering import Verb
from howdah.train.loop import train
from howdah.verify.matrix import AGAIN, FORMS, PIPES, SLICES, STAGES, case_of, together

# Each form, and each two kinds of forms that have tensors in flight together:
QUICK = {
    # sums of several micro-batches: one whole, or in a window whose slots are used again
    ("dp", "accumulation"): "one sum a step",
    ("zero2", "accumulation"): "a sum for each micro-batch",
    ("hybrid", "accumulation"): "sums across groups follow sums inside",
    # sums over tp are packed, copied back, and followed by sums over the replicas
    ("zero1", "tensor"): "in place",
    ("zero2", "sequence kept"): "in the window",
    # stages sum on their own, and a tied embedding's sum follows; gathers beside messages
    ("dp", "1f1b"): "whole",
    ("zero1", "zb-h1"): "shares, and weights that come in the next forward",
    ("zero2 whole", "interleaved"): "two stages on a rank",
    ("zero3", "zb-v"): "units gathered again for late weight gradients",
    # what is computed again gathers, and sends, again
    ("zero3", "recompute"): "units",
    ("zero3 kept", "one block"): "units that stay",
    ("second copy", "recompute"): "units that come from neighbours",
    ("sequence", "recompute"): "slices",
    ("gpipe", "selective"): "inside of a backward",
    ("zb-h2", "selective"): "inside of a split backward",
    ("naive", "one block"): "inside of a stage",
    # messages between stages beside those inside of a block
    ("sequence kept", "zb-h1"): "slices",
    # keys and values go round while blocks of them are used, and gradients behind them
    ("zero2", "ring"): "two messages on their way",
    # heads are traded for tokens
    ("zero1", "all-to-all"): "parts of one message",
    ("both", "recompute"): "a ring of groups that trade",
    # tokens at the experts of other ranks, and weights that come and go for them
    ("zero3", "ep"): "two units of a block",
    ("recompute", "capacity"): "sent again",
    ("zero1", "experts"): "units of their own",
    # the encoder's output passes through all stages of the decoder, and tables are on several
    ("zero1", "1f1b", "t5"): "two tensors of a boundary",
    # gradients that servers update, weights that they send back
    ("servers", "bloom"): "pushes and pulls",
    ("adding servers", "recompute"): "sums that come back",
    # what comes from home and goes there
    ("zero3", "host", "activations"): "units that come from elsewhere",
    ("zero2", "disk", "encoder"): "states that come for the update",
    ("zero1", "dropping"): "masks that are made again",
    # all of it
    ("zero3", "sequence", "selective"): "three of them",
}
MORE = {
    # sums across groups are chained on sums inside, which stay where they are
    "dp4 zero1 shard2 x2": "float64",
    # weights are not views of masters
    "dp2 zero1 x2": "bf16",
    "dp2 zero3 x2": "bf16",
}
SHARED = [("zero1", "accumulation"), ("zero2", "accumulation"), ("zero3", "recompute")]
KINDS = (STAGES, SLICES, PIPES, AGAIN)


def small(words, precision="float64"):
    """A case of the matrix with two blocks."""
    case = case_of(words)
    shape, method = replace(case.shape, layers=2), replace(case.method, precision=precision)
    return replace(case, shape=shape, method=method)


def clean(workers, case, *, apart=True):
    """Nothing in flight is touched, and late results change no bit."""
    seen = workers.run(both, case, apart, ranks=case.layout.world)
    assert [line for rank in seen for line in rank.differ] == []
    assert all(rank.started > 3 and rank.poisoned > 30_000 for rank in seen)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("forms", QUICK, ids="+".join)
def test_nothing_in_flight_is_touched_and_late_results_change_no_bit(workers, forms):
    clean(workers, small(together(forms)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("words", "precision"), MORE.items())
def test_sums_in_a_row_and_weights_of_their_own(workers, words, precision):
    clean(workers, small(words, precision))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"gather_dtype": "int8"}, {"gradient_dtype": "int4"}])
def test_messages_in_8_and_4_bits(workers, how):
    """They are restored and added when they have come, some on the threads that send."""
    case = small("dp4 zero3 hpz2 x2", "float32")
    clean(workers, replace(case, method=replace(case.method, **how)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("forms", SHARED, ids="+".join)
def test_units_that_share_a_message_are_waited_for_too(workers, forms):
    clean(workers, small(together(forms)), apart=False)


def test_the_layouts_have_each_form_and_each_two_kinds_of_forms():
    assert {form for forms in QUICK for form in forms} == set(FORMS)
    for number, kind in enumerate(KINDS):
        for other in KINDS[number + 1 :]:
            assert any(set(kind) & set(forms) and set(other) & set(forms) for forms in QUICK)


def run_under(transport, double, job):
    """For workers: a whole run."""
    with double() as watching:
        train(job, transport)
    watching.check_landed()


def test_a_run_that_evaluates_and_saves_touches_nothing_in_flight(workers, make_job):
    often = ["train.steps=4", "train.save_every=2", "train.evaluate_every=2"]
    jobs = [make_job(name, "layout=dp2 zero1", *often) for name in ("early", "late")]
    for double, job in zip((FlightChecker, LateDouble), jobs, strict=True):
        workers.run(run_under, double, job, ranks=2)
    assert_same_bits(*(tensors(job.folder, 4) for job in jobs))
    for kind in ("train", "held_out"):
        early, late = (metrics(job.folder, kind) for job in jobs)
        assert [row["loss"] for row in early.values()] == [row["loss"] for row in late.values()]


# -- breaks --------------------------------------------------------------------------


def without_wait(name):
    """The method `name` of the sums, whose results nobody waits for before they are used."""
    start = getattr(GradientSums, name)

    def start_one(self, number):
        complete = start(self, number)

        def complete_early():
            with patch.object(GradientSums, "_wait", lambda *_: None):
                complete()

        return complete_early

    return patch.object(GradientSums, name, start_one)


def slot_handed_back_early():
    """The next bucket gets a slot of the window whose gradients are being reduced."""
    start = GradientSums._start_share

    def start_one(self, number):
        memory = self._slots[number].memory
        complete = start(self, number)
        self.window.free.append(memory)

        def complete_once():
            complete()
            self.window.free.pop()  # it was handed back before

        return complete_once

    return patch.object(GradientSums, "_start_share", start_one)


def sums_not_chained():
    """What follows a sum starts without it."""
    run = GradientSums._run

    def run_at_once(self, number, flats):
        self._handles = [DONE] * len(self._handles)
        return run(self, number, flats)

    return patch.object(GradientSums, "_run", run_at_once)


def weights_used_at_once():
    return patch.object(UpdatedWeights, "wait", lambda self, *_: self.start())


def gathered_at_the_update():
    """The gathers start before the small operations that end a step."""

    def updated(self):
        self._stale = True
        self.start()

    return patch.object(UpdatedWeights, "updated", updated)


def unit_used_at_once():
    advance = ShardedWeights._advance_to

    def advance_to(self, unit):
        self._whole = {n: replace(one, handle=DONE) for n, one in self._whole.items()}
        advance(self, unit)

    return patch.object(ShardedWeights, "_advance_to", advance_to)


def gathered_onto_the_unit_in_use():
    def take(self, unit, length):
        self._places[unit] = 0, length
        return self.memory[:length]

    return patch.object(Window, "take", take)


def sent_tensor_overwritten():
    def send(self, instruction):
        StepRun.send(self, instruction)
        for x in self.moving[Verb.SEND, instruction.action].tensors.values():
            x.zero_()

    return patch.dict(VERBS, {Verb.SEND: send})


def received_tensor_read_early():
    def wait(self, instruction):
        message = instruction.started, instruction.action
        if instruction.started is Verb.RECEIVE:
            self.moving[message] = self.moving[message]._replace(handles=[])
        StepRun.wait(self, instruction)

    return patch.dict(VERBS, {Verb.WAIT: wait})


def border_without_wait():
    return patch.object(TpRegion, "_after", lambda self, started, give: give)


AT_THE_UPDATE = "weights are gathered at the update"
BREAKS = {
    # name: the break, its layout, what the checker says, what the late run comes to
    "a share's sum is not waited for": (
        lambda: without_wait("_start_share"),
        FORMS["zero2"] + " x2",
        "aten::add_ reads what reduce_scatter .* is writing",
        "NaN",
    ),
    "a packed sum is not waited for": (
        lambda: without_wait("_start_packed"),
        FORMS["sequence"] + " x2",
        "aten::copy_ reads what all_reduce .* is writing",
        "NaN",
    ),
    "a sum across groups does not follow": (
        sums_not_chained,
        "dp4 zero1 shard2 x2",
        "all_reduce .* writes what reduce_scatter .* is writing",
        "a tensor of all_reduce .* was written",
    ),
    "updated weights are not waited for": (
        weights_used_at_once,
        FORMS["zero1"] + " x2",
        r"aten::\w+ reads what all_gather .* is writing",
        "NaN",
    ),
    AT_THE_UPDATE: (
        gathered_at_the_update,
        FORMS["zero1"] + " x2",
        "all_gather .* was never waited for",
        "all_gather .* was never waited for",
    ),
    "a unit is not waited for": (
        unit_used_at_once,
        FORMS["zero3"] + " x2",
        r"aten::\w+ reads what all_gather .* is writing",
        "NaN",
    ),
    "a unit is gathered onto the one in use": (
        gathered_onto_the_unit_in_use,
        FORMS["zero3"] + " x2",
        "all_gather .* writes what all_gather .* is writing",
        "a tensor of all_gather .* was written",
    ),
    "a slot is handed back early": (
        slot_handed_back_early,
        FORMS["zero2"] + " x2",
        r"aten::\w+ writes what reduce_scatter .* is (reading|writing)",
        "a tensor of reduce_scatter .* was written",
    ),
    "what is sent is overwritten": (
        sent_tensor_overwritten,
        FORMS["1f1b"] + " x2",
        "aten::zero_ writes what send .* is reading",
        "a tensor of send .* was written",
    ),
    "what is received is read early": (
        received_tensor_read_early,
        FORMS["1f1b"] + " x2",
        r"aten::\w+ reads what receive .* is writing",
        "NaN",
    ),
    "the border of tp is not waited for": (
        border_without_wait,
        FORMS["tensor"] + " x2",
        r"aten::\w+ reads what all_reduce .* is writing",
        "NaN",
    ),
    "the border of slices is not waited for": (
        border_without_wait,
        FORMS["sequence"] + " x2",
        r"aten::\w+ reads what (all_gather|reduce_scatter) .* is writing",
        "NaN",
    ),
}


def broken(transport, case, name, double):
    """What a double says to a break on this rank."""
    with BREAKS[name][0](), message_for_each_unit():
        try:
            found = train_under(double(), transport, case, ends=name == AT_THE_UPDATE)
        except (Race, Spoiled) as noticed:
            return str(noticed)
        except PeerLost:  # the other rank has noticed it
            return ""
    return "NaN" if any(map(isnan, found.numbers.values())) else ""


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("double", [FlightChecker, LateDouble])
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_noticed(workers, name, double):
    _, words, race, late = BREAKS[name]
    case = small(words)
    told = workers.run(broken, case, name, double, ranks=case.layout.world)
    assert any(told)
    for said in filter(None, told):
        assert re.fullmatch(race if double is FlightChecker else f"{late}.*", said), said
