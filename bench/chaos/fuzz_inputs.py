"""What a user or another program can hand to howdah, one function for each kind of input.

Each makes an input from a source of random choices, asks howdah about it as a command would, and
returns when it was answered. UserError is a refusal. Nothing else may come out.
"""

import contextlib
import io
import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import typer
from fuzz_mutations import INTEGERS, TEXTS, mutate, mutate_text

from howdah.base.errors import UserError
from howdah.cli import check as cli_check
from howdah.cli import plan as cli_plan
from howdah.cli.cluster import cluster_app
from howdah.config.drafts import Draft, draft
from howdah.config.recipe import Machine, load_run, parse_run, resolve_run
from howdah.draw.cluster import check_cluster, show_cluster
from howdah.machines.cluster_file import FOLDER, load_cluster
from howdah.plan.layout import CHOICES, MOST, NUMBERS, SCHEDULES
from howdah.plan.schedule.check import check_schedule
from howdah.plan.schedule.registry import SCHEDULES as FAMILIES
from howdah.plan.schedule.registry import build
from howdah.plan.schedule.text import format_schedule, read_schedule
from howdah.shapes.huggingface import model_of
from howdah.shapes.huggingface_written import config as hub_config
from howdah.shapes.presets import preset
from howdah.shapes.shape import stated
from howdah.sim.predict import predict
from howdah.sim.timeline import simulate
from howdah.train.resume import as_plain

Ask = Callable[[Random, Path], None]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "recipes" / "laptop.toml").read_bytes()
BUILT = ("laptop", "gpt2-124m", "llama3-1b", "qwen3-0.6b", "opt-125m")
SIZES = ("laptop", "gpt2-124m", "llama3-1b", "mixtral-8x7b", "t5-small")


# -- recipes -----------------------------------------------------------------------


def recipe(random: Random, folder: Path) -> None:
    """A recipe as `howdah train` resolves it, up to the job."""
    machine = Machine(None, None, cores=2, cuda=0, cache=folder)
    if random.random() < 0.3:
        file = folder / "recipe.toml"
        file.write_bytes(mutate_text(random, RECIPE))
        resolve_run(load_run(file, _overrides(random)), machine)
        return
    table = tomllib.loads(RECIPE.decode())
    table |= {"name": "run", "layout": random.choice(["dp2", "single", "pp2 x4", "dp2 tp2 zero3"])}
    if random.random() < 0.7:
        table["model"] = as_plain(
            stated(preset(random.choice(BUILT if random.random() < 0.8 else SIZES)))
        )
        table["model"] = {name: size for name, size in table["model"].items() if size is not None}
    table |= {"threads": 1, "compile": False, "device": "auto"}
    mutate(random, table)
    resolve_run(parse_run(table), machine)


def _overrides(random: Random) -> list[str]:
    keys = (
        *("seed", "layout", "model.layers", "model.preset", "data.sources", "train.steps", "name"),
        *("method.optimizer.betas", "method.lr", "folder", "init_from", "a.b.c", "", "threads"),
    )
    values = (*map(str, INTEGERS[:40]), *TEXTS, "[" * 1000, "{a=1}", "[1, 2]", "1\nseed = 2")
    many = random.choice([0, 1, 1, 2])
    return [f"{random.choice(keys)}={random.choice(values)}" for _ in range(many)]


# -- layouts and command lines -------------------------------------------------------


def layout(random: Random, folder: Path) -> None:
    """The words of a layout, on a preset, as `howdah plan` prices them."""
    text = " ".join(_word(random) for _ in range(random.randint(0, 6)))
    if random.random() < 0.1:
        text = mutate_text(random, text.encode(errors="replace")).decode(errors="replace")
    model = random.choice(SIZES)
    wanted = Draft(text, sequence=random.choice([None, None, 64]), precision="")
    found = draft(model, wanted, devices=random.choice([None, None, 4, 16, 1024]))
    if found.plan:
        predict(found.plan)


def _word(random: Random) -> str:
    kind = random.randrange(10)
    if kind < 6:
        word = random.choice([*NUMBERS])
        small = random.choice([1, 2, 2, 3, 4, 4, 8, 16])
        large = random.choice([0, MOST[word] - 1, MOST[word], MOST[word] + 1, 10**9, 10**40])
        return f"{word}{small if random.random() < 0.85 else large}"
    if kind == 6:
        return random.choice(["dp*", "sp", "single", *SCHEDULES])
    if kind < 9:
        name = random.choice([*CHOICES])
        return f"{name}={random.choice(CHOICES[name])}"
    return random.choice(["", "x", "dp", "=", "dp**", *TEXTS])


def command(random: Random, folder: Path) -> None:
    """A line that a user types, of the commands that decide."""
    sizes = [str(n) for n in (*INTEGERS[:12], -1, 10**9, 10**19)]
    files = [str(folder / "out.svg"), "/nowhere/out.svg", str(folder), "/dev/full", "/proc/out"]
    options = {
        "plan": ("--sequence", "--micro-batch", "--global-batch", "--tokens", "--layout"),
        "draw schedule": ("--pp", "--micros", "--virtual", "--slices", "--svg"),
        "draw mesh": ("--layout", "--cluster", "--svg"),
        "draw memory": ("--layout", "--cluster", "--svg"),
        "simulate": ("--cluster", "--svg", "--trace"),
        "cluster show": (),
        "check": (),
    }
    name = random.choice([*options])
    given = {
        "--svg": files,
        "--trace": files,
        "--cluster": ["h100x16", "h100", "laptop-cpu", "h100x" + random.choice(sizes), ""],
        "--layout": [" ".join(_word(random) for _ in range(3))],
        "--tokens": ["15T", "1e12", *sizes],
    }
    first = {
        "draw schedule": [*FAMILIES, *TEXTS],
        "simulate": [str(ROOT / "recipes" / "laptop.toml"), str(folder)],
        "check": [str(ROOT / "recipes" / "laptop.toml"), *TEXTS],
        "cluster show": ["h100", "tpu-v4x" + random.choice(sizes), *TEXTS],
    }.get(name, [*SIZES, *TEXTS])
    words = [*shlex.split(name), random.choice(first)]
    for option in random.sample(options[name], k=random.randint(0, len(options[name]))):
        words += [option, random.choice(given.get(option, sizes))]
    words += _overrides(random) if name in ("simulate", "check") else []
    _run([word.replace("\0", "") for word in words])


def _run(words: list[str]) -> None:
    """Runs a command without its prints. Words that the command line itself refuses are refused."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    for function in (cli_plan.plan, cli_plan.simulate, cli_check.check):
        app.command()(function)
    app.add_typer(cli_plan.draw_app, name="draw")
    app.add_typer(cluster_app, name="cluster")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            app(words)
        except SystemExit as left:
            if left.code:
                raise UserError("the words are no command") from None


# -- files of others -----------------------------------------------------------------


def cluster(random: Random, folder: Path) -> None:
    """A cluster file, shown, checked, and a plan priced on it."""
    shipped = random.choice(sorted(FOLDER.glob("*.toml"))).read_bytes()
    file = folder / "cluster.toml"
    if random.random() < 0.3:
        file.write_bytes(mutate_text(random, shipped))
    else:
        table = tomllib.loads(shipped.decode())
        mutate(random, table)
        file.write_bytes(_toml(table))
    found = load_cluster(f"{file}{random.choice(['', '', 'x4', 'x8', 'x16'])}")
    show_cluster(found)
    check_cluster(found)
    plan = draft("laptop", Draft("dp* zero1"), devices=found.devices).plan
    assert plan
    predict(plan, found, tokens=10**9)


def _toml(tree: Any, key: str = "") -> bytes:
    """Any tree as TOML, what TOML lacks included: writers of TOML are as strict as readers."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        if isinstance(item, float):
            return repr(item)
        return json.dumps(item, default=str)

    lines = [f"{json.dumps(name)} = {value(item)}" for name, item in tree.items()]
    return "\n".join(lines).encode(errors="surrogatepass")


def config(random: Random, folder: Path) -> None:
    """A config.json of Hugging Face, and its plan."""
    shape = preset(random.choice(["laptop", "llama3-1b", "gpt2-124m"]))
    table = hub_config(replace(shape, rope_scaling=None), end=0, dtype="float32")
    if random.random() < 0.5:
        kinds = ("opt", "bloom", "bert", "t5", "mistral", "mixtral", "qwen2", "qwen3_moe")
        table = _every_setting() | {"model_type": random.choice([*kinds, "deepseek_v3", "llama"])}
    file = folder / "config.json"
    if random.random() < 0.2:
        file.write_bytes(mutate_text(random, json.dumps(table).encode()))
    else:
        mutate(random, table)
        file.write_text(json.dumps(table, default=str))
    model_of(file)
    draft(str(file), Draft("dp2"), devices=None)


def _every_setting() -> dict[str, Any]:
    """The settings that any of the families reads, small and sound for most."""
    numbers = {"n_embd": 64, "hidden_size": 64, "n_embed": 64, "d_model": 64, "d_kv": 16}
    layers = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2)
    heads = dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 4)
    widths = dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "moe_intermediate_size"), 128)
    experts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8)
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    rest = {"vocab_size": 512, "max_position_embeddings": 128, "type_vocab_size": 2}
    more = {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "word_embed_proj_dim": 64}
    return numbers | layers | heads | widths | experts | latent | rest | more


def schedule(random: Random, folder: Path) -> None:
    """A file with a schedule of one's own, checked, and timed where it can run."""
    name = random.choice([*FAMILIES])
    extra = {"interleaved": {"virtual": 2}, "terapipe": {"slices": 2}}.get(name, {})
    made = build(name, ranks=random.randint(1, 4), micros=random.randint(1, 6), **extra)
    file, words = folder / "schedule.txt", format_schedule(made).split(" ")
    for _ in range(random.randint(0, 3)):
        at, other = random.randrange(len(words)), random.randrange(len(words))
        words[at], words[other] = words[other], words[at]
    text = " ".join(words).encode()
    file.write_bytes(mutate_text(random, text) if random.random() < 0.6 else text)
    found = read_schedule(file)
    if problems := check_schedule(found):
        raise UserError(problems[0])
    simulate(found)


KINDS: dict[str, Ask] = {
    ask.__name__: ask for ask in (recipe, layout, command, cluster, config, schedule)
}
