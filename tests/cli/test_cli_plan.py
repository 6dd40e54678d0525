"""The deciding commands: what they print, their JSON, and one sentence for every mistake."""

import json
import os
import re
import sys

import pytest

from howdah.cli import main as cli
from howdah.comm.transport import SingleRank
from howdah.config.recipe import load_run, resolved, save_run
from howdah.plan.schedule.registry import build
from howdah.plan.schedule.text import format_schedule
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.train.loop import train

RECIPE = "recipes/laptop.toml"
FITS = ("llama3-8b", "--cluster", "h100x16", "--layout", "pp2 dp* tp2 zero1 sp x8 recompute=full")

SMALL = {  # a config.json
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}


@pytest.fixture
def howdah(monkeypatch, capsys):
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return run


# -- plan --------------------------------------------------------------------------------


def test_a_model_alone_has_its_parameters(howdah):
    code, out, _ = howdah("plan", "gpt3-175b")
    assert code == 0 and out.startswith("gpt3-175b: 174,604,259,328 parameters (174.6B)\n")
    data = json.loads(howdah("plan", "gpt3-175b", "--json")[1])
    assert data["parameters"] == parameters(preset("gpt3-175b")).total


def test_a_plan_in_a_page(howdah):
    code, out, _ = howdah("plan", *FITS, "--tokens", "15T")
    words = [line.split()[0] for line in out.splitlines()]
    assert code == 0 and "fits" in out and "profile howdah" in out
    assert {"layout", "batch", "memory", "stage", "traffic", "tp", "dp", "pp", "time", "run"} <= {
        *words
    }
    more = howdah("plan", *FITS, "--why")[1]
    assert "of the data sheet, assumed" in more and "measured" in more


def test_a_plan_as_data(howdah):
    data = json.loads(howdah("plan", *FITS, "--tokens", "15T", "--json")[1])
    assert [stage["rank"] for stage in data["stages"]] == [0, 1]
    assert all(held["peak"] >= held["weights"] > 0 for held in data["memory_bytes"])
    assert {"tp", "dp", "pp"} <= data["traffic_bytes"].keys()
    assert data["step_seconds"] > 0 and data["fits"] and data["run"]["days"] > 0
    assert data["profile"] == "howdah"


def test_a_plan_of_a_recipe_takes_the_recipes_batch_and_layout(howdah):
    data = json.loads(howdah("plan", RECIPE, "--cluster", "laptop-cpu", "--json")[1])
    assert (data["layout"], data["global_batch"], data["sequence"]) == ("dp2 x1", 8, 256)
    other = json.loads(howdah("plan", RECIPE, "--layout", "pp2 x4", "--json")[1])
    assert (other["layout"], other["micro_batch"]) == ("pp2 1f1b x4", 2)


@pytest.mark.parametrize("model", ["laptop", RECIPE, "config.json"])
def test_keys_change_a_plan_as_options_do(howdah, tmp_path, monkeypatch, model):
    """A preset, a recipe and a config.json take KEY=VALUE, alike and together with options."""
    if model == "config.json":
        model = tmp_path / model
        model.write_text(json.dumps(SMALL))
    keys = howdah(
        "plan",
        model,
        "layout=dp2 x2",
        "data.sequence_length=16",
        "batch.micro_batch=3",
        "batch.global_batch=12",
        "method.precision=float32",
        "--json",
    )
    options = howdah(
        "plan",
        model,
        "--json",
        *("--layout", "dp2 x2", "--sequence", 16),
        *("--micro-batch", 3, "--global-batch", 12, "--precision", "float32"),
    )
    assert keys == options
    data = json.loads(keys[1])
    assert (data["layout"], data["sequence"], data["global_batch"]) == ("dp2 x2", 16, 12)
    assert "masters" not in data["memory_bytes"][0]  # float32
    both = howdah("plan", model, "model.layers=3", "layout=pp3 x2", "--layout", "pp3 x2", "--json")
    assert len(json.loads(both[1])["stages"]) == 3


def test_keys_change_a_model_alone_and_a_drawing(howdah):
    more = json.loads(howdah("plan", "llama3-8b", "model.layers=40", "--json")[1])
    assert more["parameters"] > parameters(preset("llama3-8b")).total
    assert (
        "layers.5 to 7, head"
        in howdah("draw", "mesh", "laptop", "model.layers=8", "layout=pp2 x2")[1]
    )


def test_rent_stands_beside_purchase(howdah):
    long = (*FITS, "--tokens", "1T")
    assert " USD (purchase over 5 years), 34.1 MWh" in howdah("plan", *long)[1]
    code, out, _ = howdah("plan", *long, "--rent", "2.5")
    run = json.loads(howdah("plan", *long, "--rent", "2.5 USD/h", "--json")[1])["run"]
    assert code == 0 and " USD (purchase over 5 years), " in out and " USD (rent), " in out
    assert run["usd_rent"] == pytest.approx(2.5 * run["device_hours"])
    tpu = ("--cluster", "tpu-v5e", "--layout", "dp*", "--tokens", "1T")
    tpu = howdah("plan", "llama3-8b", *tpu)[1]
    assert " USD (rent), " in tpu and "purchase" not in tpu


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


def test_the_largest_model_of_a_cluster(howdah):
    words = ("plan", "llama3-1b", "--cluster", "rtx-4090x2", "--sequence", 512, "--largest")
    code, out, error = howdah(*words)
    assert code == 0, error
    assert "largest preset that fits: " in out and "largest of its kind: " in out
    keys = re.search(r"parameters, llama3-1b (.*)", out)[1].split()
    size = json.loads(howdah("plan", "llama3-1b", *keys, "--json")[1])["parameters"]
    assert f"{size / 1e9:.3g}B parameters, llama3-1b" in out


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


def test_a_new_cluster_file(howdah, tmp_path, monkeypatch):
    """All by options; asked on a terminal; never over a file that is there."""
    file, told = tmp_path / "ours.toml", ("--device", "RTX 4090", "--devices", 2)
    code, out, _ = howdah("cluster", "new", file, *told)
    assert code == 0 and "ours: sound, 1 x 2 RTX 4090" in out
    assert "2 devices: 1 x 2 RTX 4090" in howdah("cluster", "show", file)[1]
    before = file.read_text()
    assert howdah("cluster", "new", file, *told)[0] == 2 and file.read_text() == before
    assert howdah("cluster", "new", file, *told, "--price-per-hour", "3", "--force")[0] == 0
    assert "rent: 1.5 USD/h" in howdah("cluster", "show", file)[1]
    code, _, error = howdah("cluster", "new", tmp_path / "b.toml")
    assert code == 2 and "--device is missing, and there is no terminal" in error
    answers = iter(["L4", "4", "", "2", "25gbe", "", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    code, out, error = howdah("cluster", "new", tmp_path / "asked.toml")
    assert code == 0 and "asked: sound, 2 x 4 L4" in out, error


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
        (("--cluster", "rack-1gbe", "--sequence", "8"), "no layout of llama3-405b fits"),
    ],
)
def test_a_search_that_cannot_be_is_refused(howdah, words, said):
    code, _, err = howdah("plan", "llama3-405b", *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_mfu_over_100_percent_is_not_printed(howdah):
    """qwen3-0.6b at 40,960 tokens: flops of all pairs are 1.8 times those that are computed."""
    words = ("qwen3-0.6b", "--cluster", "tpu-v5px8", "--layout", "dp* zero1", "--sequence", "40960")
    code, out, _ = howdah("plan", *words)
    assert code == 0 and "mfu 75.2% (causal), bubble" in out
    data = json.loads(howdah("plan", *words, "--json")[1])
    assert data["mfu_causal"] < 1 < data["mfu"]


def test_a_hint_that_cannot_be_run_on_gpus_says_so(howdah, tmp_path):
    small = tmp_path / "small.toml"
    small.write_text(
        'name = "small"\nnode.devices = 2\ninside.link = "pcie4"\nhost.link = "pcie4"\n'
        'host.memory = "64 GB"\ndevice.name = "chip"\ndevice.memory = "35 MB"\n'
        'device.bandwidth = "1 TB/s"\ndevice.flops.bf16 = "1 TFLOP/s"\n'
    )
    code, out, err = howdah("plan", "model.preset=laptop", "--cluster", small, "--layout", "dp*")
    assert code == 2 and "memory  80.9 MB a device of 35: DOES NOT FIT" in out
    assert err == (
        f"howdah: layout 'dp2 x1' needs 80.9 MB a device, and {small} has 35 MB; 'dp2 x1 "
        "recompute=full optimizer=host' fits\n"
    )
    card = small.read_text() + 'device.cuda_names = ["chip"]\n'
    small.write_text(card)
    err = howdah("plan", "model.preset=laptop", "--cluster", small, "--layout", "dp*")[2]
    assert err.endswith("fits (optimizer=host can be planned, but not run on GPUs yet)\n")


def test_homes_that_are_too_small_do_not_fit(howdah, tmp_path):
    """Only the device's peak was looked at."""
    small = tmp_path / "small.toml"
    text = (
        'name = "small"\nnode.devices = 2\ninside.link = "pcie4"\nhost.link = "pcie4"\n'
        'host.memory = "64 MB"\nhost.disk = "64 MB"\ndevice.name = "chip"\n'
        'device.memory = "90 MB"\ndevice.bandwidth = "1 TB/s"\n'
        'device.flops.bf16 = "1 TFLOP/s"\n'
    )
    small.write_text(text)
    words = ("plan", "model.preset=laptop", "--cluster", small, "--layout")
    for home in ("host", "disk"):
        if home == "disk":  # an update goes through buffers of the host
            small.write_text(text.replace('memory = "64 MB"', 'memory = "64 GB"'))
        code, _, err = howdah(*words, f"dp2 x1 optimizer={home}")
        assert code == 2 and f" a device on the {home}, and {small} has 32 MB of it a d" in err
        assert " too little: use another home" in err
    assert howdah(*words, "dp2 x1")[0] == 0
    shared = text.replace('host.link = "pcie4"', 'host.link = "shared"\nhost.bandwidth = "1 GB/s"')
    small.write_text(shared.replace('"64 MB"', '"64 GB"') + 'host.latency = "1 us"\n')
    code, _, err = howdah(*words, "dp2 x1 optimizer=host")
    assert code == 2 and "on the host, device and host in one memory, and" in err
    assert howdah(*words, "dp2 x1")[0] == 0


def test_what_can_only_be_planned_is_noted(howdah):
    words = ("t5-small", "--layout", "single")
    sentence = "a model with family encoder-decoder can be planned, but not built yet"
    assert f"{sentence}\n" in howdah("plan", *words)[1]
    assert sentence in json.loads(howdah("plan", *words, "--json")[1])["notes"]


def test_a_config_json_with_longrope_is_planned_with_a_note(howdah, tmp_path):
    config = SMALL | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = howdah("plan", tmp_path)
    assert code == 0 and "note    rope_type 'longrope' of config.json changes no size" in out


def test_a_plan_of_a_config_json(howdah, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    for path in (tmp_path, tmp_path / "config.json"):
        assert json.loads(howdah("plan", path, "--json")[1])["sequence"] == 32


def test_what_does_not_fit_is_shown_and_the_closest_that_does_is_named(howdah):
    code, out, err = howdah("plan", "llama3-70b", "--cluster", "h100x64", "--layout", "dp*")
    assert code == 2 and "DOES NOT FIT" in out
    assert err.startswith("howdah: layout 'dp64 x1' needs ") and err.endswith(" fits\n")
    closest = err.split("'")[3]
    assert howdah("plan", "llama3-70b", "--cluster", "h100x64", "--layout", closest)[0] == 0


def test_what_fits_nowhere_near_is_told(howdah):
    code, _, err = howdah("plan", "llama3-405b", "--cluster", "rack-1gbe", "--layout", "dp*")
    assert code == 2 and "nothing near fits: take more devices" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lama3-8b"], "model.preset 'lama3-8b' is unknown; did you mean 'llama3-8b'?"),
        (["llama3-8b", "--cluster", "h1000"], "cluster 'h1000' is unknown; did you mean 'h100'?"),
        (["llama3-8b", "--cluster", "h100", "--tokens", "lots"], "tokens 'lots' is no count"),
        (["llama3-8b", "--layout", "dp2 tpp2"], "unknown word 'tpp2'; did you mean 'tp'?"),
        (
            ["llama3-8b", "--layout", "dp3", "--cluster", "h100"],
            "'dp3' is for 3 devices, and the cluster has 8; plan it for h100x3, or use dp8 or dp*",
        ),
        (["llama3-8b", "--layout", "tp12"], "tp12 does not divide 32 heads of 8 key-value heads"),
        (
            ["llama3-8b", "--layout", "dp2", "--precision", "fp4"],
            "--precision is 'fp4'; it must",
        ),
        (["laptop", "--layout", "dp999999999"], "dp999999999 must be at most dp1048576"),
        (["laptop", "--layout", "x999999999"], "x999999999 must be at most x16384"),
        (["laptop", "--cluster", "h100x99999999"], "with 99,999,999 devices is too large; at most"),
        (["llama3-8b", "--sequence", "-4"], "--sequence is -4; it must be at least 1"),
        (["llama3-8b", "--sequence", "0"], "--sequence is 0; it must be at least 1"),
        ([RECIPE, "--global-batch", "0"], "--global-batch is 0; it must be at least 1"),
        ([RECIPE, "--micro-batch", "0"], "--micro-batch is 0; it must be at least 1"),
        (["llama3-8b", "--sequence", "9" * 19], "it must be at most 134,217,728"),
        (
            ["llama3-8b", "--sequence", "200000"],
            "--sequence 200000 is over the model's context 131072; use --sequence 131072",
        ),
        (
            ["llama3-8b", "--layout", "dp2", "--micro-batch", "-1"],
            "--micro-batch is -1; it must be",
        ),
        (["llama3-8b", "--layout", "dp2", "--global-batch", "-1"], "--global-batch is -1; it must"),
        (["llama3-8b", "--precision", "bf16"], "--precision says nothing of a model alone; give a"),
        (["llama3-8b", "--micro-batch", "4"], "--micro-batch says nothing of a model alone; give"),
        (["llama3-8b", "--why"], "--why says nothing of a model alone; give a --layout or a"),
        (
            ["llama3-8b", "--tokens", "15T"],
            "--tokens asks for the time and cost of a run; say wher",
        ),
        (
            ["llama3-8b", "--layout", "dp2", "--tokens", "15T"],
            "--tokens asks for the time and cost",
        ),
        (
            [RECIPE, "--sequence", "512"],
            "--sequence 512 is over the model's context 256; use --",
        ),
        (["llama3-8b", "data.sequence_length=-4"], "data.sequence_length is -4; it must be at l"),
        (["llama3-8b", "model.layers=0"], "model.layers is 0; it must be at least 1"),
        (
            ["llama3-8b", "--layout", "dp2", "method.dropout=2"],
            "method.dropout is 2.0; it must be",
        ),
        (["llama3-8b", "batch.micro_batch=2"], "batch.micro_batch says nothing of a model alone"),
        (["llama3-8b", "train.steps=2"], "train.steps is no part of a plan; leave it out"),
        ([RECIPE, "data.sources=text"], "data.sources is no part of a plan; leave it out"),
        (["llama3-8b", "model.layer=2"], "unknown key 'model.layer'; did you mean 'layers'?"),
        (["llama3-8b", "layers"], "'layers' changes nothing; write key=value"),
        (
            ["llama3-8b", "layout=dp8", "--layout", "dp4", "--cluster", "h100"],
            "--layout is dp4 and layout is dp8; give one of the two",
        ),
        (
            [RECIPE, "data.sequence_length=128", "--sequence", "64"],
            "--sequence is 64 and data.sequence_length is 128; give one of the two",
        ),
        (
            ["llama3-8b", "--layout", "single", "--cluster", "h100x2"],
            "'single' is for 1 device, and the cluster has 2; plan it for h100x1, or use dp2 or",
        ),
        (["llama3-8b", "--cluster", "a100"], "did you mean 'a100-40' or 'a100-80'?"),
        (["llama3-8b", "--cluster", "h100", "--rent", "2"], "say how long it is, with --tokens"),
        (
            ["llama3-8b", "--cluster", "h100", "--tokens", "1T", "--rent", "-2"],
            "--rent '-2 USD/h' is not a number and a unit, like '2 USD/h'",
        ),
        (["x" * 5000], "that are known the nearest are"),
        (["none.toml"], "cannot read the recipe none.toml: No such file"),
        (["none.json"], "cannot read none.json"),
    ],
)
def test_a_mistake_in_a_plan_is_one_sentence(howdah, words, sentence):
    code, out, err = howdah("plan", *words)
    assert (code, out) == (2, "")
    assert sentence in err and err.count("\n") == 1


# -- simulate, check -----------------------------------------------------------------------


def test_simulate_draws_a_step_and_writes_pictures_and_traces(howdah, tmp_path):
    code, out, _ = howdah("simulate", RECIPE, "layout=pp2 x4")
    assert code == 0 and out.startswith("1f1b: 2 ranks, 4 micro-batches\nrank 0  F0")
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert howdah("simulate", RECIPE, "--svg", svg, "--trace", trace)[:2] == (0, "")
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
    assert howdah("draw", "schedule", "1f1b", "--svg", svg)[:2] == (0, "")
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
    assert howdah("draw", *words, "--svg", svg)[:2] == (0, "")
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
