"""Parallel equals single: pipelines against plain PyTorch on one device, in float64.

    schedules   all that flush, on 2, 3 and 4 ranks, with more and with fewer micro-batches
    stages      uneven, of an embedding or a head alone, several on a rank
    with        replicas, shares of states and gradients; other forms cross with these elsewhere
    breaks      of the pipeline itself, each of which has to be noticed

Bytes are compared too: every message, and the sum of a tied embedding's gradient over its stages.
"""

import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from broken_workers import Broken
from small_cases import FORMS, case_of, prove
from small_runs import copy_until, losses, metrics, train_on

from howdah.base.errors import UserError
from howdah.parallel.executor import KINDS, VERBS, DeferredGrads, StepRun
from howdah.plan.schedule.actions import Kind, Value
from howdah.plan.schedule.lowering import Verb
from howdah.plan.schedule.registry import build
from howdah.plan.schedule.text import format_schedule, parse_schedule
from howdah.plan.sum_order import SumOrder
from howdah.train.finished_run import open_run
from howdah.verify.case import miniature
from howdah.verify.evidence import gather
from howdah.verify.verify import verify

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved v2", "zb-h1", "zb-h2", "zb-v")
DP = ("zero0", "zero1", "zero2", "zero2 accumulate=whole")


def pipeline_case(layout, *, layers=3, **settings):
    case = case_of(layout, **settings)
    return replace(case, shape=replace(case.shape, layers=layers))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_device(workers, schedule):
    prove(pipeline_case(f"pp2 {schedule} x3"), workers, controls=schedule in ("1f1b", "zb-h1"))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("micros", [1, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved v2", "zb-h2", "zb-v"])
def test_stages_on_three_ranks(workers, schedule, micros):
    """Six layers and two ends on three or six stages: uneven ones."""
    prove(pipeline_case(f"pp3 {schedule} x{micros}", layers=6, steps=1), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_an_embedding_or_a_head_may_be_a_stage_alone(workers, schedule):
    case = pipeline_case(f"pp4 {schedule} x3", layers=2)
    ends = case.plan.stages.parts[0], case.plan.stages.parts[-1]
    assert ends == (("embedding",), ("head",))
    prove(case, workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("pp3 1f1b x3 stages=1,4,1", (1, 4, 1)),
        ("dp2 pp2 zb-v x2 zero2 stages=0,1,5,0 recompute=full:1", (0, 1, 5, 0)),
    ],
)
def test_stages_of_chosen_blocks_equal_one_device(workers, layout, counts):
    case = pipeline_case(layout, layers=6, steps=1)
    blocks = (sum(part.is_block for part in parts) for parts in case.plan.stages.parts)
    assert tuple(blocks) == counts
    prove(case, workers)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("zero", DP)
def test_replicas_of_a_pipeline_equal_one_device(workers, zero, schedule):
    words = zero.replace("zero0", "")
    prove(pipeline_case(f"dp2 pp2 {words} {schedule} x3"), workers, controls=zero == "zero2")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2"])
def test_replicas_of_untied_stages_that_alternate(workers, zero):
    words = zero.replace("zero0", "")
    prove(pipeline_case(f"dp2 pp2 {words} interleaved v2 x3", form="untied"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "laptop"])
def test_every_form_equals_one_device(workers, form):
    prove(pipeline_case("pp2 zb-h1 x3", form=form), workers)


def test_dropout_drops_the_same_on_every_stage(workers):
    prove(pipeline_case("pp2 interleaved v2 x3", dropout=0.1), workers)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, precision):
    prove(pipeline_case("pp2 zb-h1 x3", precision=precision), workers)


def test_gloo_carries_the_stages(workers):
    prove(pipeline_case("pp3 zb-v x4", layers=4, steps=1), workers, transport="torch")


def test_the_same_run_twice_gives_the_same_bits(workers):
    case = pipeline_case("dp2 pp2 zb-v x3")
    first, second = (workers.run(gather, case, ranks=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms, one.checksums) == (
            *(other.losses, other.norms),
            other.checksums,
        )


OWN = """mine stages 4 micros 2 slices 1
rank 0: 1F0 2F0 1F1 2F1 2I1 1I1 1W1 2W1 2B0 1B0
rank 1: 0F0 0F1 3F0 3F1 3B1 3I0 3W0 0B1 0B0
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["pp2 interleaved v2 x2", "dp2 pp2 zero2 interleaved v2 x2"])
def test_a_schedule_of_ones_own_equals_one_device(workers, layout):
    """Neighbouring stages on one rank, whole and halved backwards, the last micro-batch first."""
    own = replace(pipeline_case(layout, layers=4), schedule=parse_schedule(OWN))
    assert own.plan.stages.where == (1, 0, 0, 1)
    prove(own, workers)


# -- breaks of the pipeline itself -------------------------------------------------


def skip_the_tie(self):
    """Each stage keeps its own part of the embedding's gradient."""


def send_another_micro(self, instruction):
    """In place of the second micro-batch's activation, the first's goes out once more."""
    kind, stage, micro, _ = instruction.action
    if kind is Kind.FORWARD and micro == 0:
        self.first = {"hidden": self.values[Value("activation", stage, 0)]["hidden"].clone()}
    if kind is Kind.FORWARD and micro == 1:
        self.values[Value("activation", stage, 1)] = self.first
    StepRun.send(self, instruction)


def run_w_twice(self, action):
    """One micro-batch adds its weight gradients twice."""
    if action.micro == 1:
        queue, uses = self.late[action.stage, action.micro]
        self.late[action.stage, action.micro] = DeferredGrads([*queue, *queue], uses + uses)
    StepRun.weight_half(self, action)


def lose_a_gradient(self, action):
    """What comes back for the last micro-batch is nothing."""
    value = Value("gradient", action.stage + 1, action.micro)
    if action.micro == 2 and value in self.values:
        self.values[value]["hidden"].zero_()
    StepRun.backward(self, action)


def sum_too_early(self, stage):
    """The sums over the replicas are made before the stage's last gradients, all of them."""
    self._armed.add(stage)
    for number in self._of_stage[stage]:
        self._start(number)
        [*self._running.values()][-1].complete()  # or it might come late enough to be right


BREAKS = {
    "the tie is not summed": (
        lambda: patch.object(SumOrder, "begin_tied", skip_the_tie),
        "pp2 x3",
    ),
    "another micro-batch is sent": (
        lambda: patch.dict(VERBS, {Verb.SEND: send_another_micro}),
        "pp2 x3",
    ),
    "weight gradients are added twice": (
        lambda: patch.dict(KINDS, {Kind.WEIGHT: run_w_twice}),
        "pp2 zb-h1 x3",
    ),
    "a gradient is lost": (
        lambda: patch.dict(KINDS, {Kind.BACKWARD: lose_a_gradient}),
        "pp2 gpipe x3",
    ),
    "sums begin too early": (
        lambda: patch.object(SumOrder, "arm", sum_too_early),
        "dp2 pp2 x3",
    ),
}


def breaking(name):
    """The context of a break."""
    return BREAKS[name][0]()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_noticed(workers, name):
    case = pipeline_case(BREAKS[name][1], steps=1)
    verdict = verify(case, Broken(workers, partial(breaking, name)), controls=False)
    assert any("comparisons differ" in problem for problem in verdict.problems), verdict.problems


# -- whole runs --------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_stages(workers, make_job, tmp_path):
    """From two replicas to two stages and back; the held-out loss is that of one device, too."""
    often = ["train.steps=12", "train.save_every=4", "train.evaluate_every=4", "train.keep_last=5"]
    settings = ["batch.global_batch=6", "batch.micro_batch=1", *often]
    train_on(workers, make_job("never", "layout=dp2", *settings))
    never_changed = losses(tmp_path / "never")
    held_out = metrics(tmp_path / "never", "held_out")
    before = tmp_path / "never"
    for layout, at in (("pp2", 4), ("dp2 zero1", 8), ("dp2 pp2 zb-v zero2", 4)):
        folder = copy_until(before, tmp_path / layout, at)
        train_on(workers, make_job(layout, f"layout={layout}", *settings))
        assert losses(folder) == pytest.approx(never_changed, rel=1e-6)
        for step, row in metrics(folder, "held_out").items():
            assert row["loss"] == pytest.approx(held_out[step]["loss"], rel=1e-6)
        before = folder


def test_a_recipe_names_a_file_with_a_schedule(workers, make_job, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(format_schedule(build("gpipe", ranks=2, micros=3)._replace(name="mine")))
    settings = ["train.steps=2", "layout=pp2 x3"]
    job = make_job("own", *settings, f"schedule={path}")
    small = miniature(job, precision="float64", steps=1)
    assert job.plan.schedule.name == "mine" == small.plan.schedule.name
    for one in (job, make_job("usual", *settings)):
        train_on(workers, one)
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "usual"), rel=1e-6)
    for text, sentence in (
        (OWN, "it has 4 stages and the layout 2"),
        (path.read_text().replace("0B0 ", ""), "rank 0 leaves out 0B0"),
        ("nonsense", "line 1: 'nonsense' is no header"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=re.escape(sentence)):
            make_job("own", *settings, f"schedule={path}")
    with pytest.raises(UserError, match="cannot be read"):
        make_job("own", *settings, f"schedule={tmp_path / 'none.txt'}")


def test_a_run_on_stages_says_exports_and_samples_what_any_does(workers, make_job, tmp_path):
    for name, layout in (("one", "single"), ("two", "pp2")):
        settings = [
            "train.steps=4",
            "batch.micro_batch=2",
            "train.export=true",
            "train.prompt=says",
        ]
        train_on(workers, make_job(name, f"layout={layout}", *settings))
    one, two = (open_run(tmp_path / name, say=print).model() for name in ("one", "two"))
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], weight, rtol=1e-4, atol=1e-6)
    told = (tmp_path / "two" / "log.txt").read_text()
    assert "says" in told and (tmp_path / "two" / "export").is_dir()
    measured = re.findall(r"(\w+) ([\d.]+) \(predicted ([\d.]+)\)", told)
    assert {name for name, *_ in measured} == {"weights", "gradients", "moments", "activations"}
    assert all(mine == planned for _, mine, planned in measured)
