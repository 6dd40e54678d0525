"""The files of trace: on disks that do not take them, and as somebody else may have written them.

What stands in sound ones is in test_measured.py.
"""

import json
import os

import pytest
from full_disk import fill, small_disk

from howdah.base.errors import UserError
from howdah.plan.recording import Call, RankTrace, Span, StepTrace
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.plan.trace_file import read_traces, write_trace

SPAN = Span(Instruction(Verb.COMPUTE, Action(Kind.FORWARD, 0, 0)), 0.25, 0.5)


def trace(count):
    call = Call("dp", "all_reduce", 8, 0.5, 0.75)
    steps = [StepTrace(n, 0.0, [SPAN], [call]) for n in range(count)]
    return RankTrace("single x1", "here", steps, "all_reduce ring")


def test_a_draft_is_removed_when_it_cannot_take_its_place(tmp_path):
    (tmp_path / "rank-0.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_trace(tmp_path, 0, trace(1))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_a_file_in_the_place_of_the_folder_is_an_oserror(tmp_path):
    (tmp_path / "trace").write_text("")
    with pytest.raises(OSError, match="File exists"):
        write_trace(tmp_path / "trace", 0, trace(1))


@pytest.mark.root
def test_on_a_full_disk_the_earlier_laps_stay(tmp_path):
    with small_disk(tmp_path, 64 << 10):
        write_trace(tmp_path, 0, trace(2))
        fill(tmp_path)
        with pytest.raises(OSError, match="No space left on device"):
            write_trace(tmp_path, 0, trace(1000))
        assert read_traces(tmp_path, "single x1", 1) == [trace(2)]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["filler", "rank-0.json"]


# -- files that somebody else wrote ----------------------------------------------

NO_NUMBER = [None, True, "1", [1], {}, 1e308]
NO_WHOLE = [*NO_NUMBER, -1, 0.5, 2**63]
NO_TEXT = [None, 1, [1], {}, "a\nb", "x" * 2000]
NO_LIST = [None, 1, {}, {"a": 1}, "abc"]
WRONG = {
    "layout": NO_TEXT,
    "machine": NO_TEXT,
    "steps": NO_LIST,
    "steps.0": [*NO_LIST[:3], []],
    "steps.0.number": NO_WHOLE,
    "steps.0.began": NO_NUMBER,
    "steps.0.spans": [*NO_LIST, []],
    "steps.0.spans.0": [*NO_LIST, [], [0] * 9],
    "steps.0.spans.0.0": [*NO_TEXT, "computed"],
    "steps.0.spans.0.1": [*NO_TEXT, "X"],
    "steps.0.spans.0.2": NO_WHOLE,
    "steps.0.spans.0.3": [*NO_WHOLE, 1, 10**9],
    "steps.0.spans.0.4": NO_WHOLE,
    "steps.0.spans.0.5": NO_WHOLE[1:],
    "steps.0.spans.0.6": [*NO_NUMBER, 0.5, 0.75],
    "steps.0.spans.0.7": [*NO_NUMBER, 0.25, 0.125],
    "steps.0.calls": NO_LIST,
    "steps.0.calls.0": [*NO_LIST, [], [1, 2, 3, "a", "b"]],
    "steps.0.calls.0.0": NO_TEXT,
    "steps.0.calls.0.2": NO_WHOLE,
    "steps.0.calls.0.3": [*NO_NUMBER, 1.0],
}


@pytest.mark.parametrize("path", WRONG)
def test_every_field_has_a_type_and_bounds(tmp_path, path):
    write_trace(tmp_path, 0, trace(1))
    file = tmp_path / "rank-0.json"
    sound = file.read_text()
    for value in WRONG[path]:
        content = owner = json.loads(sound)
        *owners, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        for name in owners:
            owner = owner[name]
        owner[last] = value
        file.write_text(json.dumps(content))
        with pytest.raises(
            UserError, match=r"rank-0.json is damaged .*train on to have it written"
        ):
            read_traces(tmp_path, "single x1", 1)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"steps": NaN}', "\0", '"\ud800"'])
def test_a_file_that_is_none_is_a_sentence(tmp_path, text):
    (tmp_path / "rank-0.json").write_text(text, errors="surrogatepass")
    with pytest.raises(UserError, match=r"rank-0.json is damaged"):
        read_traces(tmp_path, "single x1", 1)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-0.json")
    with pytest.raises(UserError, match=r"cannot read .*it is a pipe"):
        read_traces(tmp_path, "single x1", 1)
