"""The trace: what the format demands, and the timeline read back from it."""

import json
from collections import Counter, defaultdict

import pytest

from howdah.draw.perfetto import trace
from howdah.plan.schedule.lowering import Verb, lower
from howdah.plan.schedule.registry import build
from howdah.sim.timeline import simulate


@pytest.fixture(scope="module")
def timeline():
    lowered = lower(build("interleaved", ranks=3, micros=3, virtual=2), tied=(0, 5))
    costs = {Verb.SEND: 0.25, Verb.REDUCE: 2.0, Verb.TIE: 1.0}
    return simulate(lowered, transfer=lambda instruction: costs[instruction.verb])


@pytest.fixture(scope="module")
def events(timeline):
    return json.loads(trace(timeline))["traceEvents"]


def phase(events, letter):
    return [event for event in events if event["ph"] == letter]


def threads(events):
    names = [e for e in phase(events, "M") if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in names}


def test_ranks_are_processes_and_lanes_are_threads(events):
    processes = {
        e["pid"]: e["args"]["name"] for e in phase(events, "M") if e["name"] == "process_name"
    }
    assert processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert [name for (rank, _), name in threads(events).items() if rank == 0] == [
        *("compute", "collectives", "to 1", "to 2")
    ]
    assert {thread for (_, thread), name in threads(events).items() if name == "compute"} == {0}


def test_every_span_is_an_event(timeline, events):
    """Seconds and microseconds: whole sums agree by rank and lane."""
    lanes, expected, found = threads(events), defaultdict(float), defaultdict(float)
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            expected[rank, span.lane] += (span.end - span.start) * 1e6
    for event in phase(events, "X"):
        found[event["pid"], lanes[event["pid"], event["tid"]]] += event["dur"]
    assert found == pytest.approx(expected)
    assert [found[rank, "compute"] for rank in range(3)] == [s * 1e6 for s in timeline.busy]


def test_events_of_a_thread_are_in_order_and_do_not_overlap(events):
    """Viewers nest what overlaps on a thread, which would be a lie here."""
    ends = defaultdict(float)
    for event in phase(events, "X"):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends[thread]
        ends[thread] = event["ts"] + event["dur"]


def test_names_and_categories(events):
    first = next(event for event in phase(events, "X") if event["name"] == "0F0")
    assert (first["cat"], first["ts"], first["dur"]) == ("forward", 0.0, 1e6)
    categories = Counter(event["cat"] for event in phase(events, "X"))
    assert categories["forward"] == categories["backward"] == 3 * 6
    assert set(categories) == {"forward", "backward", "reduce", "tie", "send", "update"}


def test_each_message_is_an_arrow_to_what_uses_it(timeline, events):
    tails = {event["name"]: event for event in phase(events, "s")}
    heads = {event["name"]: event for event in phase(events, "f")}
    assert {name: event["id"] for name, event in tails.items()} == {
        name: event["id"] for name, event in heads.items()
    }
    assert tails.keys() == heads.keys()
    assert len(tails) == 2 * 5 * 3  # both ways over five boundaries
    assert (tails["0F1"]["pid"], heads["0F1"]["pid"]) == (0, 1)
    boxes = {(e["pid"], e["ts"]): e["name"] for e in phase(events, "X") if e["tid"] == 0}
    for name, tail in tails.items():
        head = heads[name]
        assert head["ts"] >= tail["ts"] + 0.25e6
        assert (head["tid"], head["bp"]) == (0, "e")
        stage, kind, micro = name
        user = f"{int(stage) + (1 if kind == 'F' else -1)}{kind}{micro}"
        assert boxes[head["pid"], head["ts"]] == user


def test_a_schedule_that_is_not_lowered_has_no_arrows():
    events = json.loads(trace(simulate(build("gpipe", ranks=2, micros=2))))["traceEvents"]
    assert len(phase(events, "X")) == 8
    assert phase(events, "s") == phase(events, "f") == []
