"""bench/gpu without a GPU: what it writes has the keys that it would have with one, whatever ends
a part; and where there is no card it says so.
"""

import ast
import json
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from howdah.cli.environment import FOR_CARDS

BENCH = Path(__file__).parents[2] / "bench"
FOLDER = BENCH / "gpu"
LETTERS = "ABCDEFGHI"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def gpu(monkeypatch):
    """Imports modules of bench/gpu; other folders have some of the same names."""
    before = dict(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        sys.modules.pop(name, None)
    yield import_module
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update({name: before[name] for name in MODULES if name in before})


def run_alone(*words):
    """The script as a user calls it."""
    command = [sys.executable, str(FOLDER / "run.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_one_sentence_is_said(gpu, capsys, tmp_path):
    assert gpu("run").main(["--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"[^\n]+ here; nothing was measured \(without a GPU: [^\n]+\)\n", said)
    assert not (tmp_path / "out").exists()


def test_parts_are_those_of_the_page_and_take_ten_minutes(gpu):
    run = gpu("run")
    assert "".join(sorted(part.letter for part in run.PARTS)) == "".join(run.MODULES) == LETTERS
    told = re.findall(
        r"^\| ([A-I]) `(\w+)\.py` \| (\d+) \|", (FOLDER / "README.md").read_text(), re.M
    )
    assert told == [(p.letter, run.MODULES[p.letter], str(p.seconds)) for p in run.PARTS]
    for words, seconds in ((["--parts", LETTERS], 585), (["--parts", "F"], 585)):
        given = run.options([*words, "--minutes", "10"])
        asked = run.shared_out([one for one in run.PARTS if one.letter in given.parts], given)
        assert sum(part.seconds for part in asked) == pytest.approx(seconds)
    assert sum(part.seconds for part in run.PARTS) == 585  # and 15 to start them


def test_what_is_set_for_torch_is_what_commands_set(gpu):
    assert gpu("run").FOR_CARDS == FOR_CARDS


# -- rows --------------------------------------------------------------------------


def test_a_row_keeps_its_keys_whatever_happens(gpu, tmp_path):
    rows = gpu("rows")
    declared = {"good": ("a", "b"), "missing": ("a",), "wrong": ("a",), "late": ("a",)}
    place = rows.Place(torch.device("cpu"), until=rows.monotonic() + 1000)
    report = rows.Report(tmp_path / "a.json", declared, place)
    before = json.loads((tmp_path / "a.json").read_text())
    assert {name: tuple(row) for name, row in before.items()} == {
        name: (*fields, "why") for name, fields in declared.items()
    }
    report.measure("good", lambda: {"a": 1, "b": 2.5})

    def missing():
        raise rows.Unavailable("there is no such thing")

    report.measure("missing", missing)
    report.measure("wrong", lambda: {"a": 1 / 0})
    over = rows.Place(torch.device("cpu"), until=rows.monotonic())
    late = rows.Report(tmp_path / "b.json", declared, over)
    late.measure("late", lambda: {"a": 1})
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["good"] == {"a": 1, "b": 2.5, "why": ""}
    assert found["missing"] == {"a": None, "why": "there is no such thing"}
    assert found["wrong"] == {"a": None, "why": "ZeroDivisionError: division by zero"}
    assert found["late"]["why"] == "the part was ended before it came here"
    assert late.found["late"] == {"a": None, "why": "no time was left"}
    with pytest.raises(KeyError, match=r"good has the fields"):
        report._put("good", {"a": 1}, "")


def keys(parts):
    """Part, row, fields: what a reader of results.json relies on."""
    return {
        letter: (sorted(part), {name: sorted(row) for name, row in part["rows"].items()})
        for letter, part in parts.items()
    }


def declared_keys(run):
    parts = {part.letter: run.not_started(part, "") for part in run.PARTS}
    assert sorted(parts["A"]) == ["card", "name", "rows", "said", "seconds", "state"]
    return keys(parts)


def test_keys_do_not_depend_on_the_device(gpu):
    """Rows are declared before a device is known: nothing of them is asked of torch.cuda."""
    declared = declared_keys(gpu("run"))
    assert all(rows for _, rows in declared.values())
    for name in MODULES:
        for node in ast.parse((FOLDER / f"{name}.py").read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and "ROWS" in ast.dump(node.targets[0]):
                assert "cuda.is_available" not in ast.unparse(node)


@pytest.mark.slow
def test_a_part_fills_its_rows_without_a_card(gpu, tmp_path):
    gpu("part").main(["A", "--out", str(tmp_path / "a.json"), "--seconds", "1e6", "--cpu"])
    check_rows(json.loads((tmp_path / "a.json").read_text()), gpu("run"), "A")


@pytest.mark.slow
@pytest.mark.parametrize("letter", LETTERS)
def test_the_script_runs_without_a_card(gpu, tmp_path, letter):
    done, run = run_alone("--cpu", "--parts", letter, "--out", tmp_path), gpu("run")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert sorted(results) == ["command", "machine", "parts"]
    assert keys(results["parts"]) == declared_keys(run)
    part = results["parts"][letter]
    assert (part["state"], part["said"]) == ("done", "")
    check_rows(part["rows"], run, letter)
    page = (tmp_path / "results.md").read_text()
    assert "**Not a result: tiny sizes on the CPU" in page
    assert {*run.MODULES} == {*re.findall(r"^## ([A-I]):", page, re.M)}
    assert only(tmp_path) == ["results.json", "results.md"]


def check_rows(rows, run, letter):
    """All keys are there, nothing broke, and what is true or false is true."""
    (part,) = (one for one in run.PARTS if one.letter == letter)
    assert [*rows] == [*run.rows_of(part, "")]
    assert [*map(sorted, rows.values())] == [*map(sorted, run.rows_of(part, "").values())]
    reasons = {row["why"] for row in rows.values() if LATER not in row["why"]}
    assert not [why for why in reasons if re.match(r"\w+(Error|Exception)\b", why)]
    measured = [row for row in rows.values() if not row["why"]]
    assert measured and all(v is not False for row in measured for v in row.values())


LATER = "No viable backend"  # of attention, on this CPU


def only(folder):
    return sorted(path.name for path in folder.iterdir())


# -- what ends a part --------------------------------------------------------------

WRITES = (
    "import json, sys, time; path = sys.argv[sys.argv.index('--out') + 1]; "
    "json.dump({'launch': {'microseconds': 1.5, 'why': ''}}, open(path, 'w')); "
)


@pytest.fixture
def ended(gpu, tmp_path, monkeypatch):
    """Runs part A as other code; what came of it."""
    run = gpu("run")
    monkeypatch.setattr(run, "SHORT", 0.1)

    def end(code, seconds=600.0, left=1000.0):
        part = run.Part("A", "ceilings", seconds)
        command = [sys.executable, "-c", code]
        found = run.run_part(part, command, out=tmp_path, until=run.monotonic() + left)
        assert only(tmp_path) == []
        assert sorted(found["rows"]) == sorted(gpu("ceilings").ROWS)
        return found

    return end


def test_what_a_part_found_before_its_deadline_stays(ended):
    found = ended(WRITES + "print('x', file=sys.stderr); time.sleep(10_000)", seconds=3.0)
    assert found["state"] == "out of time"
    assert found["rows"]["launch"] == {"microseconds": 1.5, "why": ""}
    assert found["rows"]["product bf16"]["why"] == "the part ended before it wrote"


def test_what_a_part_found_before_it_failed_stays(ended):
    found = ended(WRITES + "raise SystemExit('this card is broken')")
    assert (found["state"], found["said"]) == ("failed, exit code 1", "this card is broken")
    assert found["rows"]["launch"]["microseconds"] == 1.5


def test_a_part_for_which_no_time_is_left_is_not_started(ended):
    found = ended("raise AssertionError", left=0.0)
    assert (found["state"], found["seconds"]) == ("no time was left", 0.0)


def test_results_are_whole_after_each_part(gpu, tmp_path, monkeypatch):
    """The second part sees what the first has written; the third breaks the script."""
    run, seen = gpu("run"), []

    def part(part, command, *, out, until):
        path = out / "results.json"
        seen.append(json.loads(path.read_text())["parts"] if path.exists() else None)
        if part.letter == "C":
            raise KeyboardInterrupt
        return run.not_started(part, "done")

    monkeypatch.setattr(run, "run_part", part)
    monkeypatch.setattr(run, "measured_on", lambda cpu: machine("a"))
    with pytest.raises(KeyboardInterrupt):
        run.main(["--cpu", "--out", str(tmp_path)])
    assert seen[0] is None
    assert [seen[1][letter]["state"] for letter in "ABC"] == ["done", *["was not asked for"] * 2]
    assert [seen[2][letter]["state"] for letter in "ABC"] == ["done", "done", "was not asked for"]


def machine(name, version="2.11"):
    card = {"name": name}
    facts = {"torch": version, "cuda": "13", "python": "3", "mode": "gpu", "others": 0.0}
    return facts | {"card": card}


def test_other_parts_keep_what_they_found_on_the_same_card(gpu, tmp_path, monkeypatch):
    run = gpu("run")
    monkeypatch.setattr(run, "no_card", lambda: "")
    monkeypatch.setattr(run, "card", lambda: None)
    states = []
    for name, letter in (("a", "A"), ("a", "E"), ("b", "C")):
        monkeypatch.setattr(run, "measured_on", lambda cpu, name=name: machine(name))
        monkeypatch.setattr(run, "run_part", lambda part, *_, **__: run.not_started(part, "done"))
        assert run.main(["--parts", letter, "--out", str(tmp_path)]) == 0
        parts = json.loads((tmp_path / "results.json").read_text())["parts"]
        states.append("".join(one for one in parts if parts[one]["state"] == "done"))
    assert states == ["A", "AE", "C"]


# -- what is written and what is needed --------------------------------------------


def test_goals_stand_beside_what_was_measured(gpu):
    run, tables = gpu("run"), gpu("tables")
    parts = {part.letter: run.not_started(part, "no time was left") for part in run.PARTS}
    results = {"command": "run.py", "machine": machine("H200"), "parts": parts}
    assert [goal.got for goal in tables.goals(results)] == [None] * 7
    rows = parts["F"]["rows"]
    rows["1b"] |= {"tokens/s": 50e3, "allocated": 100, "planned": 98, "why": ""}
    rows["8b of 4 layers"] |= {"tokens/s": 10.0, "mfu full square": 0.5, "why": ""}
    rows["8b of 4 layers, fp8"] |= {"tokens/s": 12.0, "why": ""}
    rows["kernels"] |= {"busy share": 0.9, "why": ""}
    for name, rate in (
        ("howdah", 6.0),
        ("transformers, eager", 4.0),
        ("torchtitan, compiled", 5.0),
    ):
        parts["G"]["rows"][name] |= {"tokens/s": rate, "why": ""}
    got = [goal.got for goal in tables.goals(results)]
    assert got == pytest.approx([50e3, 0.5, 1.2, 1.5, 1.2, 0.02, 0.9])
    page = tables.page(results)
    assert "on H200, torch 2.11, CUDA 13" in page
    assert "| 1b at 4096, bf16: tokens/s | 45000 | 52000 | 5e+04 |" in page


def test_wheels_are_found_behind_what_is_installed(gpu, tmp_path, monkeypatch):
    run = gpu("run")
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    with zipfile.ZipFile(tmp_path / "made_up-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_up.py", "HERE = 1")
    site = run.unpacked(tmp_path)
    assert [path.name for path in site.iterdir()] == ["made_up.py"]
    assert run.command(run.PARTS[0], False, site)[-2:] == ["--site", str(site)]


@pytest.mark.parametrize("words", [["--parts", "AX"], ["--wheels", "nowhere"]])
def test_wrong_options_are_refused(gpu, words, capsys):
    with pytest.raises(SystemExit) as end:
        gpu("run").main(["--cpu", *words])
    assert end.value.code == 2
    assert f"{words[0]}: " in capsys.readouterr().err


@pytest.mark.slow
def test_parts_need_no_package_that_a_machine_with_a_card_may_lack():
    """pydantic and typer: only the commands and recipes of howdah import them."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'typer', 'tomli_w'])); "
        f"sys.path[:0] = {[str(BENCH), str(FOLDER)]!r}; import run; "
        "[__import__(name) for name in run.MODULES.values()]; run.environment(); run.no_card()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
