"""Commands that simulate, draw and list: what they print and write, and what a mistake is told."""

import json
import os

import pytest

from howdah.comm.transport import SingleRank
from howdah.config.recipe import load_run, resolved
from howdah.config.save import save_run
from howdah.plan.schedule.registry import build
from howdah.plan.schedule.text import format_schedule
from howdah.train.loop import train

RECIPE = "recipes/laptop.toml"

# -- simulate, check -----------------------------------------------------------------------


def test_simulate_draws_a_step_and_writes_pictures_and_traces(howdah, tmp_path):
    code, out, _ = howdah("simulate", RECIPE, "layout=pp2 x4")
    assert code == 0 and out.startswith("1f1b: 2 ranks, 4 micro-batches\nrank 0  F0")
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert howdah("simulate", RECIPE, "--svg", svg, "--trace", trace)[:2] == (
        0,
        f"written {trace}\nwritten {svg}\n",
    )
    assert svg.read_text().startswith("<svg ") and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    "words",
    [
        ("draw", "schedule", "1f1b", "--svg"),
        ("draw", "mesh", "llama3-8b", "--layout", "dp2", "--svg"),
        ("simulate", RECIPE, "--svg"),
        ("simulate", RECIPE, "--trace"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_named(howdah, tmp_path, words):
    for file, sentence in {
        tmp_path / "nowhere" / "a.svg": "nowhere does not exist; make it first",
        tmp_path: "it is a folder; name a file in it",
        "/dev/full": "No space left on device; name a file elsewhere",
    }.items():
        code, out, err = howdah(*words, file)
        assert (code, out) == (2, "")
        assert err.startswith(f"howdah: cannot write {file}: ") and err.endswith(f"{sentence}\n")


def test_check_says_that_a_recipe_is_sound_or_everything_that_is_wrong(howdah):
    code, out, _ = howdah("check", RECIPE)
    assert code == 0 and "sound: laptop on dp2 x1, 2 ranks, 8 x 256 tokens a step" in out
    code, _, err = howdah(
        "check", RECIPE, "layout=tp3", "method.dropout=2", "data.sequence_length=300"
    )
    assert code == 2
    assert all(word in err for word in ("tp3", "method.dropout", "data.sequence_length 300"))
    told = howdah("check", RECIPE, "layout=single weights=host")[2]
    assert "weights=host with optimizer=device can be planned, but not run yet" in told
    code, _, told = howdah("check", RECIPE, "method.precision=fp16")
    assert (code, "method.precision fp16 can be planned, but not run yet" in told) == (2, True)
    code, _, err = howdah("check", RECIPE, "data.sources=nowhere", "data.validation=/none.txt")
    assert code == 2 and "data.validation: /none.txt does not exist; name a file" in err
    assert "data.sources: nowhere does not exist; " in err


@pytest.mark.slow
def test_check_refuses_what_this_machine_cannot_hold_unless_it_is_forced(howdah):
    big = ["model.layers=80", "model.width=8192", "model.heads=64", "model.ffn_size=28672"]
    code, _, err = howdah("check", RECIPE, *big)
    assert code == 2 and " a rank, and this machine has free for 2 ranks " in err
    code, out, _ = howdah("check", RECIPE, *big, "--force")
    assert code == 0 and "sound: laptop on dp2 x1, 2 ranks" in out


# -- draw ----------------------------------------------------------------------------------


def test_draw_schedule(howdah, tmp_path):
    code, out, _ = howdah("draw", "schedule", "1f1b", "--pp", 3, "--micros", 4)
    assert code == 0 and "rank 1    F0F1    B0··F2B1··F3B2··  B3··" in out
    svg = tmp_path / "1f1b.svg"
    assert howdah("draw", "schedule", "1f1b", "--svg", svg)[:2] == (0, f"written {svg}\n")
    assert svg.read_text().startswith("<svg ")


def test_a_schedule_without_flush_says_when_it_updates(howdah):
    out = howdah("draw", "schedule", "pipedream", "--pp", 2, "--micros", 3)[1]
    assert out.endswith(
        "pipedream: 1F1B without flush: an update after every backward, p versions\n"
    )
    assert "without flush" not in howdah("draw", "schedule", "1f1b")[1]


def test_a_schedule_goes_to_a_file_and_comes_back(howdah, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(howdah("draw", "schedule", "zb-h1", "--pp", 2, "--text")[1])
    assert file.read_text() == format_schedule(build("zb-h1", ranks=2, micros=8))
    again = howdah("draw", "schedule", file)
    assert again == howdah("draw", "schedule", "zb-h1", "--pp", 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["1f1b", "--pp", "0"], "ranks is 0; it must be at least 1"),
        (["1f1b", "--pp", "-4"], "ranks is -4; it must be at least 1"),
        (
            ["1f1b", "--pp", "99999", "--micros", "99999"],
            "have 9,999,800,001 forwards, and 131,072",
        ),
        (["1f1b", "--text", "--svg", "a.svg"], "give one of the two"),
        (["1f1b", "--svg", "a.png"], "drawings are SVG; name it a.svg"),
        (
            ["{file}", "--pp", "4"],
            "says its own sizes; drop --pp, --micros, --virtual and --slices",
        ),
        (["{binary}"], "is not UTF-8; give a text file"),
        (["{pipe}"], "cannot be read: it is a pipe, a socket or a device, and not a file"),
        (["."], "cannot be read: Is a directory"),
    ],
)
def test_a_mistake_in_a_schedule_is_one_sentence(howdah, tmp_path, words, sentence):
    files = {name: tmp_path / name for name in ("file", "binary", "pipe")}
    files["file"].write_text(format_schedule(build("1f1b", ranks=2, micros=2)))
    files["binary"].write_bytes(b"\0\xff")
    os.mkfifo(files["pipe"])
    code, out, err = howdah("draw", "schedule", *(word.format_map(files) for word in words))
    assert (code, out) == (2, "")
    assert sentence in err and err.count("\n") == 1


def test_a_schedule_that_deadlocks_is_drawn_where_it_stands(howdah, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(
        "mine stages 2 micros 2 slices 1\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"
    )
    code, out, err = howdah("draw", "schedule", file)
    assert code == 2
    assert out == ("rank 0   0F0 | 0B0 waits for 1B0\nrank 1   1F0 | 1F1 waits for 0F1\n")
    assert f"{file}: deadlock: rank 0 waits with 0B0 for 1B0 of rank 1" in err


def test_a_schedule_that_leaves_an_action_out_is_drawn_where_it_stands(howdah, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("mine stages 2 micros 1 slices 1\nrank 0: 0F0 0B0\nrank 1: 1F0\n")
    code, out, err = howdah("draw", "schedule", file)
    assert code == 2 and "1B0" in err
    assert out.splitlines()[0] == (
        "rank 0   0F0 | 0B0 waits for gradient of stage 1, micro-batch 0: left out"
    )


@pytest.mark.parametrize("what", ["memory", "mesh", "traffic"])
def test_draw_a_plan(howdah, tmp_path, what):
    words = (what, "llama3-8b", "--layout", "pp2 dp* tp2 zero1 sp x8", "--cluster", "h100x16")
    code, out, _ = howdah("draw", *words)
    assert code == 0 and "pp2 dp4 tp2 zero1 sp 1f1b x8" in out
    svg = tmp_path / "plan.svg"
    assert howdah("draw", *words, "--svg", svg)[:2] == (0, f"written {svg}\n")
    assert svg.read_text().startswith("<svg ")
    assert howdah("draw", what, "laptop")[0] == 0  # a model alone is drawn on one device


# -- clusters ------------------------------------------------------------------------------


def test_clusters(howdah, tmp_path):
    assert "h100 " in howdah("cluster", "list")[1]
    assert "16 devices: 2 x 8 H100" in howdah("cluster", "show", "h100x16")[1]
    assert howdah("cluster", "check", "h100")[1].startswith("h100: sound")
    bad = tmp_path / "bad.toml"
    bad.write_text('[device]\nname = "X"\nmemory = "80"\n')
    code, _, err = howdah("cluster", "check", bad)
    assert code == 2 and "bad.toml" in err and err.count("\n") == 1


def test_trace_shows_what_it_may_not_draw(howdah, make_job, recipe, tmp_path, capsys):
    """A run folder that one may read alone; the pictures go into it."""
    folder, job = tmp_path / "a", make_job("a", "train.steps=2")
    train(job, SingleRank())
    save_run(resolved(load_run(recipe), job), folder / "run.toml")
    (folder / "trace" / "trace.svg").mkdir()
    capsys.readouterr()
    code, out, error = howdah("trace", folder)
    assert code == 2 and out.startswith("layout      single x1, step "), error
    assert "written" not in out
    assert error.startswith(
        f"howdah: cannot write {folder / 'trace' / 'trace.svg'} (Is a directory); "
    )
    assert error.count("\n") == 1
    left = sorted(path.name for path in (folder / "trace").iterdir())
    assert left == ["rank-0.json", "trace.json", "trace.svg"]
    (folder / "trace" / "trace.svg").rmdir()
    code, out, _ = howdah("trace", folder)
    assert code == 0 and out.splitlines()[-1].startswith("written     ")
