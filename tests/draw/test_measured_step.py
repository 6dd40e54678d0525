"""A step that was measured, drawn beside the simulation of its own actions."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.draw.measured_step import (
    away,
    compare_step,
    exposed,
    overlap,
    report,
    to_perfetto,
    to_svg,
)
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.program import program_of
from howdah.plan.recording import IDLE, Call, RankTrace, StepTrace
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.lowering import Verb
from howdah.plan.trace_file import read_traces, write_trace
from howdah.shapes.shape import ModelShape
from howdah.sim.timeline import simulate

COSTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.5, Kind.INPUT: 1.25, Kind.WEIGHT: 0.75}
LAYOUTS = [
    *("single x3", "dp2 x2", "pp2 naive x2", "pp2 gpipe x3", "pp3 1f1b x6", "pp2 zb-h2 x4"),
    *("pp2 interleaved v2 x4", "pp2 zb-v x4", "dp2 pp2 zb-h1 x4", "dp2 pp2 tp2 zero2 1f1b x4"),
]


def plan_of(words):
    shape = ModelShape(
        layers=6, width=16, heads=2, ffn_size=32, vocab=64, context=8, tie_embeddings=True
    )
    return make_plan(
        shape, resolve(parse_layout(words), None), Batch(micro_batch=1), sequence=8, method=Method()
    )


def seconds(plan, slow, action):
    """As long as its kind takes, a stage more than the one before it; updates by rank."""
    if action.kind is Kind.UPDATE:
        where = plan.stages.where
        return (0.5 + where[action.stage]) / where.count(where[action.stage])
    return slow * COSTS[action.kind] * (1 + action.stage / 8)


def transfer(instruction):
    return {Verb.SEND: 0.25, Verb.REDUCE: 0.5, Verb.TIE: 0.125}[instruction.verb]


def step(plan, spans, number, began):
    """As a rank notes it: updates of all its stages at once."""
    updates = [span for span in spans if span.instruction.verb is Verb.UPDATE]
    rest = [span for span in spans if span not in updates]
    told = updates[0].instruction
    told = told._replace(action=told.action._replace(stage=0))
    update = updates[0]._replace(instruction=told, end=updates[-1].end)
    late = [s._replace(start=s.start - began, end=s.end - began) for s in [*rest, update]]
    return StepTrace(number, 100.0 + began, late, [Call("dp", "all_reduce", 4_000_000, 0.0, 0.5)])


def measure(plan, numbers=(3, 4, 5), slow=None):
    """The traces of all ranks if the simulation were true. Ranks begin at different moments."""
    found = [RankTrace(str(plan.layout), "here", []) for _ in range(plan.layout.world)]
    for number in numbers:
        cost = partial(seconds, plan, (slow or {}).get(number, 1.0))
        timeline = simulate(program_of(plan), cost, transfer)
        for rank, traces in enumerate(found):
            spans = timeline.spans[axis(plan.layout, "pp").group(rank).index(rank)]
            traces.steps.append(step(plan, spans, number, began=rank / 16))
    return found


@pytest.mark.parametrize("words", LAYOUTS)
def test_what_went_as_simulated_is_simulated_as_it_went(words):
    plan = plan_of(words)
    truth = simulate(program_of(plan), partial(seconds, plan, 1.0), transfer)
    found = compare_step(plan, measure(plan))
    assert [one.ranks for one in found] == sorted(
        {tuple(axis(plan.layout, "pp").group(rank)) for rank in range(plan.layout.world)}
    )
    for one in found:
        assert one.measured.makespan == pytest.approx(truth.makespan)
        assert one.simulated.makespan == pytest.approx(truth.makespan)
        assert one.measured.busy == pytest.approx(one.simulated.busy)
        assert one.measured.bubble == pytest.approx(truth.bubble)


def test_the_bubble_is_that_of_all_pipelines():
    """It was that of the slowest pipeline alone, below rows of all ranks."""
    plan = plan_of("dp2 pp2 1f1b x4")
    traces = measure(plan)
    slow = axis(plan.layout, "pp").group(0)
    for rank in slow:
        for one in traces[rank].steps:
            one.spans[:] = [s._replace(start=2 * s.start, end=2 * s.end) for s in one.spans]
    found = compare_step(plan, traces)
    assert len({round(one.measured.makespan, 6) for one in found}) == 2
    text = [*report(found, str(plan.layout))]
    rows = [row.split() for row in text[2 : 2 + plan.layout.world]]
    computes, waits = (sum(float(row[n].rstrip("s")) for row in rows) for n in (1, 2))
    line = next(line for line in text if line.startswith("bubble"))
    assert float(line.split()[1].rstrip("%")) == pytest.approx(
        100 * waits / (computes + waits), abs=0.06
    )


def test_the_step_of_median_length_is_shown_with_the_costs_of_all():
    plan = plan_of("pp2 1f1b x4")
    (one,) = compare_step(plan, measure(plan, (3, 4, 5), slow={3: 1.0, 4: 3.0, 5: 1.5}))
    truth = simulate(program_of(plan), partial(seconds, plan, 1.5), transfer)
    assert one.number == 5
    assert one.simulated.makespan == pytest.approx(truth.makespan)


def test_a_step_of_a_smaller_batch_is_left_out():
    small, full = (plan_of(f"pp2 1f1b x{micros}") for micros in (2, 4))
    traces = [
        before._replace(steps=[*before.steps, *now.steps])
        for before, now in zip(measure(small, (1, 2, 3)), measure(full, (4,)), strict=True)
    ]
    assert compare_step(full, traces)[0].number == 4


def test_clocks_of_several_machines_agree_on_the_beginning_of_a_step():
    """Moments of one machine's clock mean nothing on another."""
    plan = plan_of("dp2 x2")
    traces = measure(plan)
    traces[1] = traces[1]._replace(
        machine="there", steps=[StepTrace(x.number, 9e9, x.spans, x.calls) for x in traces[1].steps]
    )
    assert max(one.measured.makespan for one in compare_step(plan, traces)) < 100


def test_messages_that_wait_for_each_other_do_not_overlap():
    plan = plan_of("pp2 gpipe x3")
    traces = measure(plan)
    for one in traces[0].steps:  # all handed over at the start
        sends = [s for s in one.spans if s.instruction.verb is Verb.SEND]
        one.spans[:] = [s._replace(start=0.0) if s in sends else s for s in one.spans]
    (found,) = compare_step(plan, traces)
    sent = [s for s in found.measured.spans[0] if s.instruction.verb is Verb.SEND]
    assert all(a.end <= b.start for a, b in pairwise(sent)) and len(sent) == 3


def test_what_is_said_and_drawn():
    plan = plan_of("dp2 pp2 1f1b x4")
    found = compare_step(plan, measure(plan))
    lines = list(report(found, str(plan.layout)))
    assert lines[0].startswith(f"layout      {plan.layout}, step ")
    chosen = list(report(found, str(plan.layout), algorithms="all_reduce ring"))
    assert [line for line in chosen if line not in lines] == ["algorithms  all_reduce ring"]
    assert [line.split()[0] for line in lines[2:6]] == ["0", "2", "1", "3"]
    assert "simulated from the same actions: +0.0%" in "\n".join(lines)
    assert lines[-1] == "dp          all_reduce 1 times by rank 0: 4.000 MB, 0.5000 s"
    events = json.loads(to_perfetto(found))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {rank}{what}" for rank in range(4) for what in ("", ", simulated")}
    begun = [event for event in events if event["ph"] == "b"]
    assert {event["name"] for event in begun} == {"dp all_reduce 4 MB"}
    assert len({event["pid"] for event in begun}) == 4
    picture = to_svg(found)
    assert picture.count("measured: 1f1b") == picture.count("simulated: 1f1b") == 2


def test_waits_for_homes_are_told_apart_from_computation():
    """Two fetches of 0.5 s that overlap by half, and an evict of 0.25 s: 1 s of moves.
    Of two waits of 0.125 s, one is behind the step's computation.
    """
    plan = plan_of("single x1")
    traces = measure(plan)
    before = list(report(compare_step(plan, traces), "single x1"))
    moves = [
        Call("home", "fetch weights of layers.0", 8_000_000, 0.0, 0.5),
        Call("home", "fetch weights of layers.1", 8_000_000, 0.25, 0.75),
        Call("home", "evict gradients of layers.1", 4_000_000, 0.0, 0.25),
        Call("home", "wait for weights of layers.0", 0, 0.25, 0.375),
        Call("home", "wait for gradients of layers.1", 0, 1e6, 1e6 + 0.125),
    ]
    traces = [
        one._replace(steps=[replace(step, calls=step.calls + moves) for step in one.steps])
        for one in traces
    ]
    found = compare_step(plan, traces)
    assert away(found[0]) == [0.125] and exposed(moves) == (0.25, 1.0)
    lines = list(report(found, "single x1"))
    rows = [[float(word.rstrip("s")) for word in told[2].split()[1:]] for told in (before, lines)]
    changed = [after - was for was, after in zip(*rows, strict=True)]
    assert changed == pytest.approx([-0.125, 0.125, 0], abs=2e-4)
    assert "home        fetch weights 2 times by rank 0: 16.000 MB, 1.0000 s" in lines
    assert lines[-1] == (
        "home        rank 0 waits 0.2500 s for moves of 1.0000 s: 25.0% exposed; for weights of "
        "layers.0 0.1250 s, gradients of layers.1 0.1250 s"
    )
    assert not any("wait for" in line for line in lines)
    names = {event["name"] for event in json.loads(to_perfetto(found))["traceEvents"]}
    assert {"home wait for weights of layers.0", "home fetch weights of layers.1 8 MB"} <= names


def test_calls_beside_computing_are_overlap_unless_it_waits():
    """Forward to 1, backward to 3.5, update to 4. Calls from 0.5 to 2 and 1 to 3 are under way for
    2.5 s, for 0.5 of which the computation waits; the call behind the update is beside nothing.
    """
    plan = plan_of("dp2 x1")
    calls = [
        Call("dp", "all_reduce", 1, 1.0, 3.0),
        Call("dp", "all_reduce", 1, 0.5, 2.0),
        Call("dp", "all_gather", 1, 5.0, 6.0),
        Call("home", "fetch weights of layers.0", 1, 0.0, 4.0),
        Call("ranks", IDLE, 0, 2.5, 3.0),
    ]
    traces = measure(plan)
    traces = [
        one._replace(steps=[replace(step, calls=calls) for step in one.steps]) for one in traces
    ]
    (found, _) = compare_step(plan, traces)
    assert overlap(found) == pytest.approx((3.5, 2.0)) and away(found) == pytest.approx([0.5])
    lines = list(report([found], "dp2 x1"))
    assert "overlap     57.1% of the 3.5000 s in which there are calls, rank 0 computes" in lines
    assert not any(IDLE in line for line in lines)


# -- files


@settings(max_examples=25)
@given(st.sampled_from(LAYOUTS), st.integers(1, 4))
def test_what_is_read_was_written(tmp_path_factory, words, count):
    folder, plan = tmp_path_factory.mktemp("traces"), plan_of(words)
    traces = measure(plan, range(count))
    for rank, one in enumerate(traces):
        write_trace(folder, rank, one)
    assert read_traces(folder, str(plan.layout), plan.layout.world) == traces


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda path: path.unlink(), r"cannot read .*rank-1.json: No such file"),
        (lambda path: path.write_text("{"), r"rank-1.json is damaged"),
        (lambda path: path.write_text('{"layout": "dp2 x2"}'), r"rank-1.json is damaged"),
        (
            lambda path: path.write_text(path.read_text().replace("dp2 x2", "dp2 x4")),
            r"is of layout 'dp2 x4', and the run's is 'dp2 x2'; train a step in that layout",
        ),
        (
            lambda path: path.write_text(path.read_text().replace('"number": 3', '"number": 7')),
            r"have no step in common; train on first",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, break_it, sentence):
    plan = plan_of("dp2 x2")
    for rank, one in enumerate(measure(plan, (3,))):
        write_trace(tmp_path, rank, one)
    break_it(tmp_path / "rank-1.json")
    with pytest.raises(UserError, match=sentence):
        read_traces(tmp_path, "dp2 x2", 2)


@pytest.mark.parametrize("words", ["single x3", "pp2 1f1b x4"])
def test_a_step_that_does_not_follow_the_schedule_is_refused(words):
    plan = plan_of(words)
    for at, change in ((0, {"stage": 10**9}), (0, {"micro": 1}), (1, {"slice": 1})):
        traces = measure(plan, (3,))
        spans = traces[0].steps[0].spans
        told = spans[at].instruction
        told = told._replace(action=told.action._replace(**change))
        spans[at] = spans[at]._replace(instruction=told)
        with pytest.raises(
            UserError, match=r"step 3 of rank 0 is not one of .* train on to have it"
        ):
            compare_step(plan, traces)
