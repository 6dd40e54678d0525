"""Tables of the documentation that repeat what the code says, row for row.

docs/training.md    every key of a recipe, with its default
docs/presets.md     every preset, with its sizes
docs/layouts.md     every word of a layout, and whether it runs
docs/planning.md    every key of `howdah plan --json`
docs/library.md     every name that `import howdah` gives
docs/comm.md        every operation of a group, and of the engine
docs/glossary.md    the words that a reader once had to guess
"""

import inspect
import re
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import howdah
from howdah.base.errors import UserError
from howdah.comm.engine import Engine
from howdah.comm.group import Group
from howdah.comm.transport import OneLink
from howdah.config.drafts import Draft, draft
from howdah.config.recipe import Run, parse_run
from howdah.draw.found import found_data
from howdah.draw.tables import prediction_data
from howdah.machines.cluster_file import load_cluster
from howdah.plan.layout import KNOWN, Layout, parse_layout
from howdah.plan.method import Method
from howdah.plan.support import unsupported
from howdah.search.budget import priced
from howdah.search.search import search
from howdah.search.space import Question
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import PRESETS, preset
from howdah.sim.cost import hourly
from howdah.sim.predict import predict

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.M)


def table(page, heading):
    """The rows of the tables under a heading: what stands in backquotes, then the other cells."""
    text = (DOCS / page).read_text("utf-8")
    rows = ROW.findall(text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])
    assert len(dict(rows)) == len(rows) > 0, f"{page}: a row is there twice, or none"
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


# -- keys of a recipe ----------------------------------------------------------------

SMALL = {"layers": 1, "width": 8, "heads": 1, "ffn_size": 8, "vocab": 300, "context": 8}
# Tables that may be left out, with all that they cannot do without.
OPTIONAL = {
    "rope_scaling": {"factor": 8.0},
    "latent": {"kv_rank": 8, "query_rank": 8, "qk_nope_size": 4, "qk_rope_size": 4, "v_size": 4},
    "experts": {"count": 4, "top_k": 2, "ffn_size": 8},
}


def keys(kind, prefix=""):
    """The dotted names of all keys of a recipe, tables inside lists included.

    A table that is always there has no row of its own; one that may be left out has.
    """
    for name, hint in get_type_hints(kind).items():
        inner = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if inner is not hint:
            yield prefix + name
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


@pytest.fixture(scope="module")
def documented():
    return {name: cells[0] for name, cells in table("training.md", "Keys").items()}


def test_every_key_is_documented_and_none_is_invented(documented):
    assert set(documented) == {*keys(Run), "model.preset"}


def smallest(name):
    """The least that a recipe says in which the key `name` has a place, and that place."""
    recipe = {"name": "a", "model": dict(SMALL)}
    *path, _ = name.split(".")
    if path in (["data", "sources"], ["data", "validation"]):
        recipe["data"] = {path[1]: [{}]}
        return recipe, recipe["data"][path[1]][0]
    if path[1:]:
        recipe["model"] |= {part: dict(OPTIONAL[part]) for part in path[1:] if part in OPTIONAL}
    inner = recipe
    for part in path:
        inner = inner.setdefault(part, {})
    return recipe, inner


def value_of(run, name):
    for part in name.split("."):
        run = getattr(run, part)
    return run


@pytest.mark.parametrize("name", sorted(keys(Run)))
def test_documented_defaults_are_the_defaults(documented, name):
    default, last = documented.get(name, "missing"), name.rpartition(".")[2]
    recipe, place = smallest(name)
    if default == "required":
        del place[last]
        with pytest.raises(UserError, match=f"{re.escape(name)} is missing"):
            parse_run(recipe)
    elif default == "none":
        assert value_of(parse_run(recipe), name) is None
    elif name == "name":
        assert default == "the file's name"
    else:
        without = parse_run(recipe)
        place[last] = tomllib.loads(f"value = {default.strip('`')}")["value"]
        assert parse_run(recipe) == without


# -- presets ---------------------------------------------------------------------------


def test_every_preset_has_its_row_and_its_sizes():
    rows = table("presets.md", "Models")
    assert list(rows) == list(PRESETS)
    for name, (total, active, layers, width, heads, context, model, _) in rows.items():
        shape, count = preset(name), parameters(preset(name))
        assert total == f"{count.total:,}", name
        assert active == (f"{count.active:,}" if count.active != count.total else ""), name
        both = f"{shape.encoder_layers} + " if shape.encoder_layers else ""
        assert layers == f"{both}{shape.layers}", name
        shared = f" ({shape.k})" if shape.k != shape.heads and not shape.latent else ""
        assert (width, heads) == (f"{shape.width:,}", f"{shape.heads}{shared}"), name
        assert context == f"{shape.context:,}", name
        assert model == ("planned" if unsupported(shape, Layout()) else "built"), name


# -- words of a layout -------------------------------------------------------------------


def test_every_word_of_a_layout_has_its_row():
    assert set(table("layouts.md", "Words")) == set(KNOWN)


@pytest.mark.parametrize("word", KNOWN)
def test_words_of_a_layout_run_or_are_only_planned_as_said(word):
    example, *_, today = table("layouts.md", "Words")[word]
    layout = parse_layout(example.strip("`"))
    shape = preset("mixtral-8x7b" if word == "ep" else "laptop")
    assert str(layout) == example.strip("`"), "an example is spelled as it prints"
    assert word.rstrip("=") in example
    assert today == ("planned" if unsupported(shape, layout) else "runs")


# -- keys of a prediction ------------------------------------------------------------------


def test_every_key_of_a_plan_as_json_is_documented():
    plan = draft("laptop", Draft("pp2 x2"), devices=None).plan
    data = prediction_data(predict(plan, load_cluster("laptop-cpu"), tokens=1e6))
    rows = table("planning.md", "For programs")
    assert list(rows) == list(data)
    assert {inner for inner in data["run"] if f"`{inner}`" not in rows["run"][0]} == set()


def test_every_key_of_a_search_as_json_is_documented():
    method = Method(precision="bf16")
    question = Question(preset("llama3-1b"), load_cluster("h100x2"), method, 1024, 8, micro_batch=1)
    found = search(question, refined=1)
    data = found_data(found, [*priced(found.best[:1], 10**9, hourly(question.cluster))])
    rows = table("planning.md", "A search for programs")
    assert {*rows} == {*data, "by_devices", "notes"}
    assert {inner for inner in data["best"][0] if f"`{inner}`" not in rows["best"][0]} == set()


# -- the library ---------------------------------------------------------------------------


def test_every_name_of_the_library_has_its_row():
    assert set(table("library.md", "Names")) == set(howdah.__all__)


def operations(page, heading):
    """The calls in the first cells of a table, by name: `send(x, to)` → {"send": ["x", "to"]}."""
    text = (DOCS / page).read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    calls = [call for row in rows for call in re.findall(r"`(\w+)\(([^`]*)\)`", row)]
    return {name: re.findall(r"(\w+)(?:=|,|$)", arguments) for name, arguments in calls}


def public(kind):
    """The methods of a class that others call, with their arguments."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: [*inspect.signature(call).parameters] for name, call in methods if name[0] != "_"}


def test_every_operation_of_a_group_is_documented_with_its_arguments():
    rows = operations("comm.md", "`Group`")
    assert set(rows) == set(public(Group))
    for name, arguments in public(Group).items():
        given = [word for word in arguments if word not in ("self", "async_op", "after")]
        assert [word for word in rows[name] if word in arguments] == given, name


def test_what_the_engine_can_do_besides_is_documented():
    rows = operations("comm.md", "The engine")
    assert set(rows) == set(public(Engine)) - set(public(Group)) - set(public(OneLink))
    for name, arguments in rows.items():
        assert set(arguments) <= set(public(Engine)[name]), name


# -- words -----------------------------------------------------------------------------------

GUESSED = """masters|part|place|unit|share|home|held|moment (of a step)|moments (of Adam)|window
kept|computed again|summed|lack|sound|go on|accumulation|`sp`|hybrid shards|`accumulate=whole`
`release=step`|`inputs=gathered`|boundary|flush|lowering|tie (in a program)|tied|partial"""


@pytest.mark.parametrize("word", re.split(r"[|\n]", GUESSED))
def test_words_that_were_guessed_are_in_the_glossary(word):
    cells = re.findall(
        r"^\| ([^|]+) \| [^|]{20,} \|$", (DOCS / "glossary.md").read_text("utf-8"), re.M
    )
    assert word in [name for cell in cells for name in cell.split(", ")]
