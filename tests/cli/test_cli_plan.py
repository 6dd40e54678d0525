"""The deciding commands: what they print, their JSON, and one sentence for every mistake."""

import json
import sys

import pytest

from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset

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
    assert " USD (purchase over 5 years), 35.8 MWh" in howdah("plan", *long)[1]
    code, out, _ = howdah("plan", *long, "--rent", "2.5")
    run = json.loads(howdah("plan", *long, "--rent", "2.5 USD/h", "--json")[1])["run"]
    assert code == 0 and " USD (purchase over 5 years), " in out and " USD (rent), " in out
    assert run["usd_rent"] == pytest.approx(2.5 * run["device_hours"])
    tpu = ("--cluster", "tpu-v5e", "--layout", "dp*", "--tokens", "1T")
    tpu = howdah("plan", "llama3-8b", *tpu)[1]
    assert " USD (rent), " in tpu and "purchase" not in tpu


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
    assert howdah("cluster", "show", file)[1].startswith("ours\n")  # it has no summary
    code, _, error = howdah("cluster", "new", tmp_path / "b.toml", "--device", "A100")
    assert code == 2 and "did you mean 'A100 SXM4 40 GB' or 'A100 SXM4 80 GB'?" in error
    code, _, error = howdah("cluster", "new", tmp_path / "b.toml")
    assert code == 2 and "--device is missing, and there is no terminal" in error
    answers = iter(["L4", "4", "", "2", "25gbe", "", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    code, out, error = howdah("cluster", "new", tmp_path / "asked.toml")
    assert code == 0 and "asked: sound, 2 x 4 L4" in out, error


def test_mfu_over_100_percent_is_not_printed(howdah):
    """qwen3-0.6b at 40,960 tokens: flops of all pairs are 1.8 times those that are computed."""
    words = ("qwen3-0.6b", "--cluster", "tpu-v5px8", "--layout", "dp* zero1", "--sequence", "40960")
    code, out, _ = howdah("plan", *words)
    assert code == 0 and "mfu 75.5% (causal), bubble" in out
    data = json.loads(howdah("plan", *words, "--json")[1])
    assert data["mfu_causal"] < 1 < data["mfu"]


def test_a_hint_names_homes_on_gpus_too(howdah, tmp_path):
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
    assert err.endswith("'dp2 x1 optimizer=host' fits\n")


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
        assert code == 2 and f" on the {home} of a node, and {small} has 64 MB there, " in err
        assert " too little: use another home" in err
    assert howdah(*words, "dp2 x1")[0] == 0
    shared = text.replace('host.link = "pcie4"', 'host.link = "shared"\nhost.bandwidth = "1 GB/s"')
    small.write_text(shared.replace('"64 MB"', '"64 GB"') + 'host.latency = "1 us"\n')
    code, _, err = howdah(*words, "dp2 x1 optimizer=host")
    assert code == 2 and "on the host of a node, device and host in one memory, and" in err
    assert howdah(*words, "dp2 x1")[0] == 0


def test_what_can_only_be_planned_is_noted(howdah):
    words = ("llama4-scout", "--layout", "single")
    what = "model.experts.scores=input-sigmoid (Llama 4)"
    sentence = f"{what} can be planned, but not run yet: use softmax or sigmoid"
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


@pytest.mark.slow
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
        (["llama3-8b", "model.layer=2"], "unknown key 'model.layer'; did you mean 'model.layers'?"),
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
            "--rent '-2' is below 0; give USD per device and hour",
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
