"""The scripts of bench/: they want a quiet machine, judge what is promised, and write it down."""

import json
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
QUIET = {"others": 0.01, "one_core": 0.02, "all_cores": 0.03}
STAT = "cpu  {user} 0 0 {idle} {waiting} 0 0 {steal} 7 7\ncpu0 1 1 1 1\n"


@pytest.fixture
def scripts(monkeypatch):
    """Imports modules of a folder of bench/. Folders have modules of equal names."""
    before = set(sys.modules)

    def load(folder, *names):
        for path in (BENCH, BENCH / "data_parallel", BENCH / folder):
            monkeypatch.syspath_prepend(str(path))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCH):
            del sys.modules[name]


@pytest.fixture
def quiet(scripts, monkeypatch):
    """The module, which finds the machine as quiet as `noises` says, look after look."""
    (module,) = scripts(".", "quiet")
    module.noises = []
    monkeypatch.setattr(
        module,
        "measure",
        lambda: module.Noise(**(QUIET | (module.noises.pop(0) if module.noises else {}))),
    )
    monkeypatch.setattr(module, "sleep", lambda seconds: None)
    return module


# -- quiet -----------------------------------------------------------------------------


def test_what_is_not_idle_is_taken_by_others(quiet):
    before = STAT.format(user=100, idle=100, waiting=0, steal=0)
    after = STAT.format(user=110, idle=170, waiting=10, steal=10)
    assert quiet.busy_share(before, after) == pytest.approx(0.2)
    assert quiet.busy_share(before, before) == 1  # no time passed: nothing is known


def test_noise_is_the_time_beyond_the_least(quiet):
    assert quiet.spread([2.0, 2.0, 5.0]) == pytest.approx(0.5)
    assert quiet.spread([2.0] * 3) == 0


def test_work_is_timed_by_every_thread(quiet, monkeypatch):
    monkeypatch.setattr(quiet, "REPEATS", 2)
    monkeypatch.setattr(quiet, "COPIED", 64)
    assert len(quiet.repeats(3)) == 6 and min(quiet.repeats(1)) > 0


@pytest.mark.parametrize("name", QUIET)
def test_each_kind_of_noise_makes_a_machine_loaded(quiet, name):
    assert quiet.problems(quiet.Noise(**QUIET)) == []
    for bad in (0.9, float("nan")):
        (told,) = quiet.problems(quiet.Noise(**(QUIET | {name: bad})))
        assert "(at most " in told


def test_on_a_loaded_machine_nothing_is_written(quiet, capsys):
    quiet.noises = [{"others": 0.5}] * 3
    with pytest.raises(SystemExit) as end:
        quiet.Watch(writes=True)
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert "not quiet: others take 50.0% (at most 5%); end what else runs on it, or give" in told


def test_load_that_comes_later_is_seen_too(quiet):
    watch = quiet.Watch(writes=True)
    quiet.noises = [{"all_cores": 3.0}] * 3
    with pytest.raises(SystemExit):
        watch.end()


def test_a_moment_of_noise_is_waited_for(quiet):
    quiet.noises = [{"others": 0.5}, {}]
    first, last = quiet.Watch(writes=True).end()
    assert first == last == QUIET | {"loaded": False}


def test_results_of_a_loaded_machine_say_so_where_they_were_asked_for(quiet):
    quiet.noises = [{"others": 0.5}] * 3
    looks = quiet.Watch(writes=True, loaded=True).end()
    assert [one["loaded"] for one in looks] == [True, False]
    said = quiet.sentence(looks)
    assert "other processes took 50.0% of" in said and "**The machine was not quiet.**" in said
    assert "not quiet" not in quiet.sentence(looks[1:])


def test_what_writes_nothing_looks_at_nothing(quiet):
    quiet.noises = [{"others": 0.5}] * 3
    assert quiet.Watch(writes=False).end() == [] and len(quiet.noises) == 3


def test_older_results_have_no_noise(quiet):
    assert quiet.sentence([]) == "Noise of the machine: not measured."


CLOCKED = {p.parent.name for p in BENCH.glob("*/*.py") if "perf_counter" in p.read_text("utf-8")}


@pytest.mark.parametrize("folder", sorted((CLOCKED | {"experts", "faults", "measure"}) - {"gpu"}))
def test_what_is_timed_is_watched(folder):
    """A list of six folders did not know of those that came later; bench/gpu notes the noise."""
    text = (BENCH / folder / "run.py").read_text("utf-8")
    assert "quiet.Watch(" in text and "quiet.add_option(parser)" in text


def test_parts_of_a_step_that_are_timed_are_there(scripts):
    """The loss had moved to another file, and the script ended with an AttributeError."""
    (overhead,) = scripts("data_parallel", "overhead")
    clock = overhead.Clock()
    with overhead.hooked(clock):
        overhead.torch._foreach_zero_([overhead.torch.ones(2)])
    assert clock.now["zero"] > 0 and {part for part, _, _ in overhead.HOOKS} >= {*overhead.WORK}


@pytest.mark.slow
def test_each_part_of_a_step_is_timed(scripts, tmp_path):
    (overhead,) = scripts("data_parallel", "overhead")
    steps = overhead.steps_of_a_run(tmp_path, tiny=True)
    assert len(steps) == 30
    assert all(overhead.shares(steps)[part] > 0 for part in overhead.WORK)


def test_the_machine_is_described_in_one_place():
    found = [p for p in BENCH.rglob("*.py") if re.search(r"^def machine\(", p.read_text(), re.M)]
    assert [path.name for path in found if path.parent.name != "chaos"] == ["machine.py"]


# -- what is judged ----------------------------------------------------------------------


def test_goals_of_collectives_are_of_what_connect_returns(scripts):
    (cases,) = scripts("collectives", "cases")
    carriers = {one.name: one.carrier for one in (*cases.CONTESTANTS, *cases.BF16)}
    goals, all_cases = cases.goals(), [*cases.cases(tiny=False)]
    assert {carriers[goal.contestant] for goal in goals} == {"group"}
    assert {carriers[goal.peer] for goal in goals} == {"gloo", "group"}  # bf16 beside float32
    measured = {(case.name, one.name) for case in all_cases for one in case.contestants}
    assert {
        (goal.case, name) for goal in goals for name in (goal.contestant, goal.peer)
    } <= measured


class NoWorkers:
    """In place of processes."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    close = __exit__


@pytest.fixture
def pipeline(scripts, quiet, monkeypatch, tmp_path):
    """The script, of which every bubble is as `module.found` says beside a simulated 5.9 %."""
    (run,) = scripts("pipeline", "run")
    run.found = 0.059

    def compared(workers, plan, unit, folder):
        spread = {"median": run.found, "least": run.found, "most": run.found}
        row = {"schedule": str(plan.layout), "seconds of a forward": unit, "simulated": 0.059}
        row |= {"measured": spread, "step longer by": 0.01}
        return row | run.judged(0.059, run.found)

    monkeypatch.setattr(run, "compared", compared)
    monkeypatch.setattr(run, "Workers", NoWorkers)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    return run


@pytest.mark.parametrize(("measured", "met"), [(0.061, True), (0.0625, False), (0.0555, False)])
def test_bubbles_are_judged_relative_to_the_simulated_one(pipeline, measured, met, tmp_path):
    """1.7 points beside 5.9 % were once within "5 %"; here 0.35 points are not."""
    pipeline.found = measured
    assert pipeline.main() == (0 if met else 1)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["met"] for row in results["schedules"]} == {met}
    assert len(results["noise"]) == 2
    text = (tmp_path / "results.md").read_text()
    assert f"{14 if met else 0} of 14 bubbles are within 5%" in text
    assert ("**not met**" in text) != met


def test_a_part_of_the_pipelines_is_not_written(pipeline, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "zb-v"])
    assert pipeline.main() == 0 and not any(tmp_path.iterdir())


def test_lost_ranks_are_told_in_milliseconds(scripts):
    (faults,) = scripts("faults", "run")
    row = faults.told("engine", "kill", 2, [0.003, 0.001, 0.002])
    assert (row["median"], row["worst"], row["survivors"]) == pytest.approx((2.0, 3.0, 3))
    text = faults.markdown({"machine": "M.", "rows": [row], "wrong": ["it hangs"]})
    assert "| engine | kill | 2 | 3 | 2.0 | 2.0 | 3.0 |" in text and "- it hangs" in text
    assert "M. Noise of the machine: not measured." in text


def test_who_is_told_late_between_hosts_misses_the_goal(scripts, monkeypatch, capsys):
    """The script once ended as if it were met."""
    scripts("cluster", "box")
    (hosts,) = scripts("faults", "hosts")
    late = {"name": "a kill", "shape": "2 x 2", "times": 1, "survivors": 3, "wrong": []}
    late |= {"goal": 0.1, "median": 0.05, "worst": 0.2}
    monkeypatch.setattr(hosts, "rows", lambda *_, **__: [late])
    for name, code in (("--only=kill", 1), ("--tiny", 0)):
        monkeypatch.setattr(sys, "argv", ["hosts.py", name, "--loaded"])
        assert hosts.main() == code
        assert "**missed**" in capsys.readouterr().out


# -- the matrix --------------------------------------------------------------------------


@pytest.fixture
def matrix(scripts, monkeypatch):
    """The script, in which `zero3` is refused and `module.broken` fails."""
    (run,) = scripts("matrix", "run")
    run.broken = ()  # the forms of a cell

    class Bench(NoWorkers):
        def run(self, words):
            if {cell.forms for cell in run.pairs() if cell.words == words} & {run.broken}:
                return run.Result("fails", "losses differ")
            return run.Result("refused", "not so") if "zero3" in words else run.Result("works")

    monkeypatch.setattr(run, "Bench", Bench)
    monkeypatch.setattr(run, "commit", lambda: "abc")
    return run


def test_the_matrix_writes_every_cell_and_counts_them(matrix, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "zero3", "--to", str(tmp_path)])
    assert matrix.main() == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["commit"] == "abc" and found["all"] == len(found["cells"]) > 10
    assert found["counts"]["alone"] == {"refused": 1}
    assert {tuple(one) for one in found["cells"]} == {("kind", "forms", "layout", "result", "why")}
    text = (tmp_path / "results.md").read_text()
    assert "at abc:" in text and "| refused | not so |" in text
    assert "1. not so" in (tmp_path / "matrix.md").read_text()
    assert {matrix.kind_of(cell) for cell in matrix.drawn()} == {"drawn at random"}


def test_a_cell_that_neither_works_nor_is_refused_ends_with_1(matrix, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "tensor", "--to", str(tmp_path)])
    matrix.broken = ("dp", "tensor")
    assert matrix.main() == 1
    assert "| fails | losses differ |" in (tmp_path / "results.md").read_text()


def test_the_matrix_can_be_asked_for_its_waits(matrix, monkeypatch, tmp_path, capsys):
    class Two:
        """Ranks, of which the second comes to NaN."""

        def run(self, function, case, ranks):
            return [function.__globals__["Seen"](9, 9, differ) for differ in ([], ["loss 0: nan"])]

    assert matrix.Flights().ask(matrix.case_of("dp2 x2"), Two()) == ["rank 1: loss 0: nan"]
    monkeypatch.setattr(matrix, "Flights", matrix.Bench)
    monkeypatch.setattr(sys, "argv", ["run.py", "--flight", "--only", "tensor"])
    monkeypatch.setattr(Path, "write_text", None)  # nothing is written
    assert matrix.main() == 0
    assert "dp2 tp2 x2: works" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run.py", "--flight", "--to", str(tmp_path)])
    with pytest.raises(SystemExit):
        matrix.main()
    assert "--flight writes nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_matrix_can_be_asked_for_its_sums(matrix, monkeypatch, tmp_path, capsys):
    shadows = matrix.Shadows()
    assert shadows.ask(matrix.case_of("dp2 zero2 x2"), None) == [] and not shadows.processes
    monkeypatch.setattr(matrix, "differences", lambda plan: ["rank 1 lacks a sum"])
    assert shadows.ask(matrix.case_of("dp2 x2"), None) == ["rank 1 lacks a sum"]
    monkeypatch.setattr(matrix, "Shadows", matrix.Bench)
    monkeypatch.setattr(sys, "argv", ["run.py", "--shadow", "--only", "tensor"])
    monkeypatch.setattr(Path, "write_text", None)  # nothing is written
    assert matrix.main() == 0
    assert "dp2 tp2 x2: works" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run.py", "--shadow", "--flight"])
    with pytest.raises(SystemExit):
        matrix.main()
    assert "ask one thing at a time" in capsys.readouterr().err


# -- the planner's goals -----------------------------------------------------------------


def test_each_goal_of_the_planner_is_met_or_missed(scripts):
    """Of the results that are committed; a figure that is not there is not measured."""
    (run,) = scripts("planner", "run")
    own = json.loads((BENCH / "planner" / "results.json").read_text("utf-8"))
    found = {**run.results_beside(), run.OWN: own}
    lines = run.goals(found).splitlines()[2:]
    assert len(lines) == len(run.GOALS)
    off = found["left_out.json"]["mean over sources"]
    assert f"| <= 20% | <= 12% | {off:.1f}% | {'met' if off <= 20 else 'missed'} |" in lines[0]
    worse = {run.OWN: {"order": {"mean over sources": {"tau": 0.5, "regret": 4.0}}}}
    said = {line.split(" | ")[0][2:]: line for line in run.goals(worse).splitlines()[2:]}
    assert said["Kendall's tau inside sweeps"].endswith("| 0.50 | missed |")
    assert said["regret, mean"].endswith("| 4.0% | met |")
    assert said["regret, largest"].endswith("|  | not measured |")
    assert run.goals(found) in (BENCH / "planner" / "results.md").read_text("utf-8")


# -- a model of somebody else's --------------------------------------------------------


def test_each_stage_is_held_to_its_peer_in_speed_and_in_loss(scripts):
    """The slower process counts, repeat by repeat, behind the warm-up."""
    (judge,) = scripts("own_model", "judge")
    took = {"howdah dp2": (4, 2, 4), "howdah dp2 zero1": (5, 3, 6), "howdah dp2 zero2": (9, 9, 9)}
    took |= {"howdah dp2 zero3": (8, 8, 8), "DDP": (4, 4, 4), "FSDP2, gathered once": (8, 8, 8)}
    took |= {"FSDP2": (9, 9, 9), "bound": (2, 2, 2)}
    slow = {name: [[100.0, 2.0], *([s, 2.0] for s in many)] for name, many in took.items()}
    fast = {name: [[1.0, 2.0]] * 4 for name in took}
    found = judge.judged([slow, fast], 12, warm_up=1)
    verdicts = [one["verdict"] for one in found.values() if "verdict" in one]
    assert verdicts == ["met", "tie", "missed", "met"] and set(judge.GOALS) <= set(found)
    assert found["howdah dp2"]["pictures/s"] == 3 and found["howdah dp2"]["of the bound"] == 0.5
    text = judge.report("A machine.", found)
    assert "2 met, 1 tie, 1 missed" in text and "| 0.89 (0.89 to 0.89) FSDP2, " in text
    assert judge.problems(found) == []
    for loss in (2.01, float("nan")):
        slow["FSDP2"][2][1] = slow["bound"][2][1] = loss
        (told,) = judge.problems(judge.judged([slow, fast], 12, warm_up=1))
        assert told.startswith("FSDP2: a loss differs from DDP's by ")
