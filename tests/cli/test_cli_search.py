"""`howdah plan` without a layout: the search, its questions, and what it refuses."""

import json
import re

import pytest

from howdah.config.recipe import load_run


def test_without_a_layout_one_is_searched(howdah, tmp_path):
    """The table; the same as data; and a recipe with it, which `check` and `plan` take."""
    words = ("plan", "laptop", "--sequence", 64, "--global-batch", 4, "--cluster", "laptop-cpux2")
    words = (words[0], "model.preset=laptop", *words[2:])
    code, out, _ = howdah(*words)
    assert code == 0 and "layouts of 2 x" in out and "note" in out
    file = tmp_path / "found.toml"
    data = json.loads(howdah(*words, "--write", file, "--tokens", "1M", "--json")[1])
    seconds = [row["step_seconds"] for row in data["best"]]
    assert seconds == sorted(seconds) and data["best"][0]["days"] > 0
    planned = json.loads(howdah("plan", file, "--cluster", "laptop-cpux2", "--json")[1])
    assert planned["layout"] == data["best"][0]["layout"]
    assert planned["step_seconds"] == pytest.approx(seconds[0])
    assert howdah("check", file)[0] == 0
    again = howdah(*words, "--write", file)
    assert again[0] == 2 and "is there already" in again[2]
    several = json.loads(howdah(*words, "--devices", "1..2", "--json")[1])
    assert [row["devices"] for row in several["by_devices"]] == [1, 2]
    assert json.loads(howdah(*words, "--fewest", "--json")[1])["best"][0]["devices"] == 1


SMALL_SEARCH = ("plan", "model.preset=laptop", "--sequence", 64, "--global-batch", 4)


@pytest.mark.slow
def test_a_search_in_several_precisions(howdah, tmp_path):
    """The best of each alone, in one table; what a device cannot do is said."""
    on = ("plan", "llama3-1b", "--global-batch", 64, "--sequence", 4096, "--cluster", "h100x2")
    alone = [
        json.loads(howdah(*on, "--precision", one, "--json")[1])["best"] for one in ("bf16", "fp8")
    ]
    recipe = tmp_path / "both.toml"
    both = json.loads(howdah(*on, "--precision", "bf16,fp8", "--json", "--write", recipe)[1])
    every = sorted((row for rows in alone for row in rows), key=lambda row: row["step_seconds"])
    assert both["best"] == every[:10] and {row["precision"] for row in every} == {"bf16", "fp8"}
    assert load_run(recipe).method.precision == every[0]["precision"] == "fp8"
    _, out, _ = howdah(*on, "--precision", "bf16,fp8")
    assert "(method.precision=fp8)" in out and "method.precision=bf16" not in out
    old = (*on[:-1], "a100-80x2", "--precision", "bf16,fp8")
    data = json.loads(howdah(*old, "--json")[1])
    assert {row["precision"] for row in data["best"]} == {"bf16"}
    assert any("fp8" in note for note in data["notes"])
    for words, sentence in (
        (("--precision", "bf16,fp9"), "--precision 'fp9' is none of"),
        (("--precision", "bf16,fp8", "--fewest"), "--fewest is asked in one precision"),
    ):
        code, _, error = howdah(*on, *words)
        assert code == 2 and sentence in error


@pytest.mark.slow
def test_other_questions_to_a_search(howdah, tmp_path):
    """The fewest devices, also within a budget; the largest model; a plot; a recipe's length."""
    on = (*SMALL_SEARCH, "--cluster", "rtx-4090x8", "--tokens", "1B", "--json")
    every = json.loads(howdah(*on, "--devices", "1..8")[1])["by_devices"]
    days = [row["days"] for row in every]
    assert len(every) > 1 and days == sorted(days)[::-1]
    assert json.loads(howdah(*on, "--fewest")[1])["best"][0]["devices"] == 1
    budget = f"days<{(days[0] + days[1]) / 2:.12f}"
    found = json.loads(howdah(*on, "--fewest", "--budget", budget)[1])["best"]
    assert found[0]["devices"] == every[1]["devices"] and found[0]["days"] < days[0]
    recipe, svg = tmp_path / "many.toml", tmp_path / "time.svg"
    words = ("--devices", "1..8", "--plot", svg, "--write", recipe)
    code, out, error = howdah(*on[:-1], *words)
    assert code == 0, error
    assert f"drawn   {svg}" in out and svg.read_text().count("<circle") == len(every)
    run = load_run(recipe)
    assert run.layout == every[-1]["layout"] and run.name == "many"
    assert run.train.steps == -(-(10**9) // (4 * 64))
    assert run.train.save_every == 0  # it is over before half an hour is
    assert f"{recipe} trains on the library of Python" in out and "saves every" not in out
    longer = tmp_path / "longer.toml"
    big = ("plan", "llama3-1b", "--cluster", "rtx-4090x8", "--global-batch", 512)
    code, out, error = howdah(
        *big, "--sequence", 2048, "--tokens", "1B", "--json", "--write", longer
    )
    assert code == 0, error
    told, saves = json.loads(out), load_run(longer).train.save_every
    seconds = told["best"][0]["step_seconds"]
    assert saves > 1 and saves * seconds == pytest.approx(1800, abs=seconds)
    assert any(f"saves every {saves:,} steps, some half an hour" in one for one in told["notes"])


@pytest.mark.slow
def test_the_largest_model_of_a_cluster(howdah):
    words = ("plan", "llama3-1b", "--cluster", "rtx-4090x2", "--sequence", 512, "--largest")
    code, out, error = howdah(*words)
    assert code == 0, error
    for what in ("preset", "preset with states on the host", "of its kind with states on the host"):
        assert f"largest {what}: " in out
    keys = re.search(r"of its kind: .* parameters, llama3-1b (.*)", out)[1].split()
    size = json.loads(howdah("plan", "llama3-1b", *keys, "--json")[1])["parameters"]
    assert f"{size / 1e9:.4g}B parameters, llama3-1b" in out


def test_a_recipe_without_a_global_batch_is_searched_for_the_one_that_its_layout_makes(
    howdah, tmp_path
):
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'layout = "dp2 x3"\n[model]\npreset = "laptop"\n[data]\nsequence_length = 64\n'
        "[batch]\nmicro_batch = 2\n"
    )
    found = json.loads(howdah("plan", recipe, "--search", "--cluster", "h100x2", "--json")[1])
    assert found["global_batch"] == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "h100x8", "--fewest", "--largest"), "are questions of their own"),
        (("--cluster", "h100x8", "--plot", "nowhere/a.svg"), "nowhere does not exist"),
        (("--cluster", "h100x8", "--plot", "time.png"), "drawings are SVG; name it time.svg"),
        (("--cluster", "h100x8", "--write", "nowhere/a.toml"), "nowhere does not exist"),
        (
            ("--cluster", "h100x8", "--micro-batch", "9", "--global-batch", "4"),
            "micro-batch that is",
        ),
        (("--search",), "give a --cluster"),
        (("--cluster", "h100x8", "--search", "--layout", "dp8"), "drop the layout"),
        (("--cluster", "h100x8", "--budget", "days<3"), "--tokens"),
        (("--cluster", "h100x8", "--devices", "8..4"), "no range"),
        (("--cluster", "h100x8", "--tokens", "1M", "--budget", "day<3"), "cannot be read"),
        (("--cluster", "h100x8", "--why"), "--why explains one layout"),
        (("--cluster", "rtx-4090x1", "--sequence", "8"), "no layout of llama3-405b fits"),
    ],
)
def test_a_search_that_cannot_be_is_refused(howdah, words, said):
    code, _, err = howdah("plan", "llama3-405b", *words)
    assert code == 2 and said in err and err.count("\n") == 1
