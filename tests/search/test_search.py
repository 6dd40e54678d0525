"""The search for a layout: what it lists, how near its closed form is, that it finds the best."""

import importlib.util
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.draw.found import found_data, show_found
from howdah.machines.cluster import resized
from howdah.machines.cluster_file import cluster_names, load_cluster
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.search import search as search_file
from howdah.search.budget import parse_budget, priced, within
from howdah.search.closed_form import ClosedForm
from howdah.search.notes import usual_batch
from howdah.search.search import BEST, REFINED, TOO_LARGE, on_each, pareto, room, search, sizes
from howdah.search.space import COLUMNS, HOMES, Question, layout_of, space
from howdah.shapes.presets import PRESETS, preset
from howdah.sim.cost import hourly
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.sim.predict import predict
from howdah.sim.profile import own_profile
from howdah.sim.step_time import step_time

BENCH = Path(__file__).parents[2] / "bench"
BF16 = Method(precision="bf16")
CASES = {  # model, cluster, samples of a step, tokens of a sample
    "node": ("llama3-8b", "h100x8", 64, 4096),
    "nodes": ("llama3-70b", "a100-80x64", 128, 4096),
    "slow wire": ("gpt2-1.5b", "rack-10gbex16", 64, 1024),
    "experts": ("mixtral-8x7b", "h100x32", 64, 4096),
}


def question_of(model, cluster, batch, sequence, **more):
    return Question(preset(model), load_cluster(cluster), BF16, sequence, batch, **more)


def small(layers=3, devices=4):
    """A tiny model on a few devices."""
    shape = replace(preset("laptop"), layers=layers)
    return Question(shape, resized(load_cluster("h100"), devices), BF16, 256, 4)


def with_memory(question, size):
    """The same question on devices of so many bytes."""
    device = replace(question.cluster.device, memory=size, reserved=0.0)
    return replace(question, cluster=replace(question.cluster, device=device))


def simulated(question, row):
    plan = question.plan(layout_of(row), int(row["micro_batch"]))
    time = step_time(plan, question.cluster, own_profile(question.cluster.device)).seconds
    ranks, kernels = axis(plan.layout, "pp").group(0), kernels_of(plan)
    return time, max(peak(memory(plan, rank, kernels)) for rank in ranks)


def drawn(question, count, seed):
    """Random layouts of a question that seem to fit: their closed forms, and what is simulated."""
    rows, _ = space(question)
    closed = ClosedForm(question, own_profile(question.cluster.device)).price(rows)
    short = rows["pp"] * rows["virtual"] * rows["micros"] < 1000
    fits = np.flatnonzero((closed.memory <= room(question.cluster)) & short)
    for index in np.random.default_rng(seed).choice(fits, count, replace=False):
        exact = simulated(question, rows[index])
        yield (closed.seconds[index], closed.memory[index]), exact


QUICK = ("node", "slow wire")  # the others are among the thousand layouts of the slow test


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", QUICK)
def test_the_closed_form_is_near_the_simulation(case):
    """Four of five are within 10 % in time, and within 5 % in memory."""
    errors = [
        [math.log(a / b) for a, b in zip(closed, exact, strict=True)]
        for closed, exact in drawn(question_of(*CASES[case]), 12, seed=1)
    ]
    time, held = np.abs(np.array(errors)).T
    assert np.quantile(time, 0.8) < math.log(1.1) and np.median(time) < 0.05
    assert np.quantile(held, 0.8) < math.log(1.05)


@pytest.mark.slow
def test_the_closed_form_is_near_the_simulation_on_a_thousand_layouts():
    errors = [
        abs(math.log(closed[0] / exact[0]))
        for case in CASES.values()
        for closed, exact in drawn(question_of(*case), 250, seed=2)
    ]
    assert len(errors) == 1000 and np.mean(np.array(errors) < math.log(1.1)) > 0.93


def even_seconds(found, question):
    """The least seconds of the best layouts with stages of equal FLOPs."""
    profile = own_profile(question.cluster.device)
    return min(
        step_time(
            question.plan(replace(plan.layout, stages=None), plan.micro_batch),
            question.cluster,
            profile,
        ).seconds
        for plan in (one.plan for one in found.best)
    )


@pytest.mark.slow
def test_the_best_of_the_simulation_is_among_the_first_of_the_closed_form():
    """In 95 % of random searches, every layout of which is simulated; bench/search has 60."""
    spec = importlib.util.spec_from_file_location("search_bench", BENCH / "search" / "run.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    assert bench.first_of(20)[f"among the first {REFINED}, %"] >= 95
    assert json.loads((BENCH / "search" / "results.json").read_text())["first"]["searches"] == 60


@pytest.mark.parametrize(
    "question",
    [
        small(devices=2, layers=6),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (small(), small(devices=6))),
    ],
)
def test_no_plan_is_better_than_the_one_that_is_found(question):
    """Against brute force: every layout planned, its memory counted, its step simulated."""
    rows, _ = space(question)
    every = [simulated(question, row) for row in rows]
    question = with_memory(question, float(np.median([held for _, held in every])) + 0.5)
    fitting = sorted(time for time, held in every if held <= room(question.cluster))
    found = search(question)
    assert 0 < len(fitting) < len(rows)
    assert even_seconds(found, question) == pytest.approx(fitting[0], rel=0.005)
    assert found.best[0].seconds <= fitting[0] * 1.005  # stages of equal seconds may be faster
    assert all(one.peak <= room(question.cluster) for one in found.best)
    times = [one.seconds for one in found.best]
    assert times == sorted(times) and len(times) == min(BEST, len(fitting))
    assert found.ruled_out[TOO_LARGE] <= len(rows) - len(fitting)


def test_a_prediction_of_the_best_says_the_same():
    found = search(question_of("llama3-8b", "h100x8", 32, 4096), refined=3)
    best = found.best[0]
    said = predict(best.plan, found.question.cluster)
    assert said.time and said.time.seconds == best.seconds and said.peak == best.peak


@pytest.mark.slow
def test_what_cannot_be_is_counted_by_reason():
    question = question_of("llama3-8b", "h100x64", 16, 4096)
    rows, out = space(question)
    assert out["more replicas than samples in the batch"] > 0
    assert not (rows["dp"] > 16).any() and (rows["home"] == 0).all()
    shape = question.shape
    assert all(shape.heads % tp == 0 for tp in np.unique(rows["tp"]))
    both = space(replace(question, planned=True))
    assert (both.rows["home"] > 0).any() and len(both.rows) > len(rows)
    fixed = space(replace(question, micro_batch=4)).rows
    assert set(fixed["micro_batch"].tolist()) == {4}


def test_as_few_blocks_are_recomputed_as_memory_asks_for():
    """Between none, which does not fit, and all."""
    question = replace(small(layers=8, devices=1), micro_batch=4)
    rows, _ = space(question)
    held = {layout_of(row).recompute: simulated(question, row)[1] for row in rows}
    middle = with_memory(question, (held["none"] + held["full"]) / 2)
    best = search(middle).best[0].plan
    assert best.layout.recompute == "full" and 1 <= best.layout.recompute_blocks < 8
    fewer = replace(best.layout, recompute_blocks=best.layout.recompute_blocks - 1 or None)
    if fewer.recompute_blocks is None:
        fewer = replace(fewer, recompute="none")
    plan = question.plan(fewer, 4)
    assert peak(memory(plan, 0, kernels_of(plan))) > room(middle.cluster)


@pytest.mark.slow
def test_states_on_the_host_are_found_where_nothing_else_fits():
    question = replace(small(layers=6, devices=2), planned=True)
    rows, _ = space(question)
    assert set(rows["home"].tolist()) == {*range(len(HOMES))}
    held = [simulated(question, row)[1] for row in rows[rows["home"] == 0]]
    tight = with_memory(question, min(held) * 0.8)
    assert search(replace(tight, planned=False)).best == ()
    best = search(tight).best[0]
    assert best.plan.layout.optimizer != "device" and best.peak <= room(tight.cluster)
    host = replace(tight.cluster.host, memory=1.0, disk=0.0)
    bare = replace(tight, cluster=replace(tight.cluster, host=host))
    assert not search(bare).best


def test_activations_leave_the_device_where_that_is_faster_than_to_compute_them_again():
    """One card, whose states leave little room: beside a link that hides them, all activations are
    kept on the host; beside a slow one blocks are recomputed.
    """
    question = replace(small(layers=8, devices=1), micro_batch=4, planned=True)
    rows, _ = space(question)
    held = {
        layout_of(row).recompute: simulated(question, row)[1] for row in rows[rows["home"] == 0]
    }
    tight = with_memory(question, (held["none"] + held["full"]) / 2)
    found = {}
    for bandwidth in (1e12, 1e8):
        host = tight.cluster.host
        host = replace(host, link=replace(host.link, bandwidth=bandwidth))
        asked = replace(tight, cluster=replace(tight.cluster, host=host))
        best = search(asked).best[0]
        found[bandwidth] = best.plan.layout
        assert best.peak <= room(tight.cluster)
    assert found[1e12].activations == "host" and found[1e12].recompute != "full"
    assert (found[1e8].activations, found[1e8].recompute) == ("device", "full")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("bandwidth", "off"), [(63e9, 0.04), (2e9, 0.22)])
def test_what_other_homes_take_and_save_is_what_the_simulation_says(bandwidth, off):
    """Where moves hide behind computation, and where a step waits for them. Memory is beside the
    same layout with its states on the device, which is counted by the same tables.
    """
    question = replace(small(layers=6, devices=2), planned=True)
    host = question.cluster.host
    host = replace(host, link=replace(host.link, bandwidth=bandwidth), disk_bandwidth=bandwidth)
    question = replace(question, cluster=replace(question.cluster, host=host))
    rows, _ = space(question)
    closed = ClosedForm(question, own_profile(question.cluster.device)).price(rows)
    same = {tuple(row[name] for name in COLUMNS if name != "home"): {} for row in rows}
    for index, row in enumerate(rows):
        same[tuple(row[name] for name in COLUMNS if name != "home")][int(row["home"])] = index
    alone = [one for one in same.values() if len(one) > 1 and rows[one[0]]["pp"] == 1]
    compared = alone[:: len(alone) // 12]
    for one in compared:
        base = simulated(question, rows[one[0]])
        for home, index in one.items():
            time, held = simulated(question, rows[index])
            held -= base[1]
            assert closed.seconds[index] == pytest.approx(time, rel=off), layout_of(rows[index])
            if HOMES[home].keys() <= {"optimizer", "activations"}:  # others leave a window there
                saved = closed.memory[index] - closed.memory[one[0]]
                assert saved == pytest.approx(held, rel=0.02), layout_of(rows[index])
    assert len(compared) >= 8


@pytest.mark.slow
def test_that_nothing_fits_is_said_of_memory_that_was_counted(monkeypatch):
    """The fastest layouts seem to fit by closed form, and do not; the smallest one does."""
    question = small(devices=2, layers=6)
    rows, _ = space(question)
    held = sorted(simulated(question, row)[1] for row in rows)
    monkeypatch.setattr(search_file, "TRIED", 1)
    for spare in (0.5, 0.01 * held[0]):
        found = search(with_memory(question, held[0] + spare), refined=1)
        assert len(found.best) == 1 and found.best[0].peak <= held[0] + spare


def test_layouts_that_cannot_be_told_apart_are_listed_once():
    found = search(small())
    assert len({(one.seconds, one.peak) for one in found.best}) == len(found.best)


def test_every_layout_of_a_space_can_be_planned():
    question = small(devices=8)
    for row in space(question).rows[::7]:
        plan = question.plan(layout_of(row), int(row["micro_batch"]))
        assert plan.layout.world == 8 and plan.micros == row["micros"]


@pytest.mark.slow
def test_more_devices_are_kept_only_where_they_are_faster():
    question = question_of("llama3-8b", "h100x32", 64, 4096, micro_batch=1)
    counts = sizes(question.cluster, 4, 32)
    assert counts == [4, 6, 8, 16, 24, 32]
    kept = pareto(on_each(question, [8, 16], None, iter))
    seconds = [one.seconds for one in kept]
    assert [one.devices for one in kept] == [8, 16] and seconds == sorted(seconds)[::-1]


# -- budgets -----------------------------------------------------------------------------


def test_a_budget_is_read_strictly():
    assert parse_budget("days<30 money<2.5M") == {"days": 30.0, "money": 2.5e6}
    for wrong in ("", "days", "days>3", "day<3", "days<-1", "days<3 days<4", "money<2X", "days<0"):
        with pytest.raises(UserError, match="--budget"):
            parse_budget(wrong)


@pytest.mark.parametrize("tokens", [1, 10**6, 10**15])
def test_the_nearest_budget_is_written_so_that_it_can_be_read(tokens):
    """It was 1.01e-05 for a short run, and 1.5e+13 for a long one."""
    found = search(question_of("laptop", "h100x2", 8, 64), refined=1)
    rows = [*priced(found.best, tokens, hourly(found.question.cluster, rent=2.0))]
    with pytest.raises(UserError, match="can be met") as refused:
        within({"days": 1e-12, "money": 1e-12}, rows)
    said = str(refused.value).partition("--budget '")[2].partition("'")[0]
    assert "e" not in said.replace("money", "") and within(parse_budget(said), rows)


def test_a_budget_that_cannot_be_met_names_the_nearest_that_can():
    found = search(question_of("llama3-8b", "h100x8", 32, 4096), refined=3)
    rows = [*priced(found.best, 10**11, hourly(found.question.cluster, rent=2.0))]
    takes = rows[0].takes()
    assert within({"days": takes["days"] * 1.01}, rows) and takes["money"] > 0
    with pytest.raises(UserError, match="can be met") as refused:
        within({"days": takes["days"] / 2, "money": 1.0}, rows)
    said = str(refused.value).partition("--budget '")[2].partition("'")[0]
    assert within(parse_budget(said), rows)
    alone = [*priced(found.best, 10**11, replace(hourly(found.question.cluster), purchase=None))]
    with pytest.raises(UserError, match="--rent"):
        within({"money": 1e9}, alone)


# -- any question ------------------------------------------------------------------------

BUDGETS = ("days<30", "money<2M", "days<0.000001 money<1", "days<3 days<4", "hours<3", "money<9B")


def any_shape(draw):
    """A preset with other layers, or sizes of no model."""
    shape = preset(draw.choice(sorted(PRESETS)))
    layers = draw.choice([1, 2, 3, 5, 5, 61])
    if draw.random() < 0.7:
        return replace(shape, layers=layers)
    sizes = {"width": draw.choice([8, 72, 640]), "ffn_size": draw.choice([1, 7, 96, 2048])}
    sizes |= {"heads": draw.choice([1, 3, 8]), "vocab": draw.choice([1, 50, 30001])}
    kinds = {"kv_heads": None, "head_size": draw.choice([None, 1, 24]), "experts": None}
    return replace(preset("laptop"), layers=layers, **sizes, **kinds)


def any_answer(number):
    """A random model, cluster, batch and budget: an answer of finite numbers, or a sentence."""
    draw = random.Random(number)
    shape, name = any_shape(draw), draw.choice(cluster_names())
    try:
        cluster = resized(load_cluster(name), draw.choice([1, 2, 3, 4, 8, 12, 16, 24, 72]))
        sequence = draw.choice([1, 7, 64, 512, 2048])
        method = Method(precision=draw.choice(["bf16", "float32", "fp16", "fp8", "nvfp4"]))
        batch, micro = draw.choice([1, 3, 8, 64]), draw.choice([None, None, 1, 5])
        question = Question(
            shape, cluster, method, sequence, batch, micro, planned=draw.random() < 0.2
        )
        found = search(question, refined=2)
        tokens = draw.choice([1, 10**6, 10**12])
        rows = [*priced(found.best, tokens, hourly(cluster, rent=draw.choice([None, 2.0])))]
        numbers = [n for one in found.best for n in (one.seconds, one.peak, one.capacity)]
        numbers += [n for row in rows for n in row.takes().values()]
        within(parse_budget(draw.choice(BUDGETS)), rows)
        show_found(found, rows) if found.best else None
    except UserError as problem:
        said = str(problem)
        assert len(said) > 20 and "nan" not in said.split() and "\n" not in said
        if "--budget '" in said and "can be met" in said:
            near = said.partition("--budget '")[2].partition("'")[0]
            assert within(parse_budget(near), rows)
        return
    assert (
        all(math.isfinite(n) and n > 0 for n in numbers)
        and min([0, *found.ruled_out.values()]) >= 0
    )
    assert all(one.peak <= one.capacity for one in found.best)
    assert json.dumps(found_data(found, rows), allow_nan=False)


@pytest.mark.slow
def test_any_question_has_an_answer_or_a_sentence():
    for number in range(20):
        any_answer(number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_questions_have_an_answer_or_a_sentence(part):
    """In eight parts: each belongs to another eighth of the slow tests."""
    for number in range(20 + part, 10_000, 8):
        any_answer(number)


def test_a_batch_is_that_of_published_runs():
    assert usual_batch(preset("llama3-8b"), 8192) == 256
    assert usual_batch(preset("laptop"), 256) == 512
