"""What is written in the wrong place is answered with what to write; all that is wrong is told."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from howdah.base.errors import UserError
from howdah.config.overrides import MEANT, changed
from howdah.config.recipe import Run, load_run, parse_run


def refusal(recipe, *overrides):
    with pytest.raises(UserError) as refused:
        load_run(recipe, overrides)
    return str(refused.value)


def tables(kind, path=""):
    """The dotted names of all tables of a recipe, and of its lists of tables."""
    for one in fields(kind):
        hint = get_type_hints(kind)[one.name]
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                yield path + one.name
                yield from tables(inner, f"{path}{one.name}.")


def test_every_table_has_an_example_of_what_to_write():
    assert [*tables(Run)] == [*MEANT]


@pytest.mark.parametrize("table", MEANT)
@pytest.mark.parametrize("value", ["3", "true", "many", "[[1]]", "1e99"])
def test_what_is_told_to_write_is_read(recipe, table, value):
    """`model=3` and `method=3` were only told that they must be tables."""
    if value == "many" and table in ("data", "data.sources", "data.validation", "model"):
        return  # a path, or a preset
    if value == "many" and table == "comm.algorithm":
        return  # a name
    found = refusal(recipe, f"{table}={value}")
    item = "[0]" if table in ("data.sources", "data.validation") else ""
    problem, found, word = found.partition("; it must be a table: write ")
    assert found and problem.startswith(f"{table}{item} is ")
    assert word.startswith(table) and "; " not in word
    start = {"name": "a", "model": {"preset": "laptop"}}
    read, problems = changed(start, [word.replace("PATH", "a.txt")], Run)
    assert not problems
    try:
        parse_run(read, whole=False)
    except UserError as other:  # sizes that do not fit together
        told = str(other)
        assert "must be a table" not in told and f"{word.partition('=')[0]} is" not in told


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("method=bf16", "method.precision='bf16'"),
        ("method=sgd", "method.optimizer.name='sgd'"),
        ("method.lr=cosine", "method.lr.schedule='cosine'"),
        ("train=many", "train.steps=1000"),
        ("train.steps.x=3", "train.steps=3"),
        ("train.save_every.steps=3", "train.save_every=3"),
        ("train.export.hub=true", "train.export=true"),
        ("layout.dp=2", "layout='dp2'"),
        ("layout.schedule=1f1b", "layout='1f1b'"),
        ("data.sequence_length.x=a", "data.sequence_length=32"),
    ],
)
def test_the_value_is_kept_where_a_key_takes_it(recipe, override, word):
    found = refusal(recipe, override)
    assert found.endswith(f": write {word}") and found.count(";") <= 1


def test_a_table_in_the_place_of_a_value(recipe):
    recipe.write_text(recipe.read_text() + "[train.evaluate_every]\nsteps = 7\n")
    assert refusal(recipe) == (
        "train.evaluate_every is {'steps': 7}; it must be a whole number: write "
        "train.evaluate_every=7"
    )


def test_no_change_hides_another(recipe):
    """The first that could not be applied was told alone."""
    found = refusal(recipe, "seed", "seed.x=1", "train.tokens=0", "train=3", "layout=tp3", "a=1")
    for problem in ("'seed' changes", "seed.x: ", "train.tokens is 0", "train is 3", "'a'; "):
        assert problem in found
    assert "tp3 does not divide" in found


def test_a_wrong_batch_hides_no_layout(recipe):
    """Types were told first, and how layout and model fit when they had been mended."""
    for batch in ("batch=3", "batch.micro_batch=x", "layout=dp* tp3"):
        found = refusal(recipe, "layout=tp3", batch, "seed=x")
        assert "tp3 does not divide" in found and "seed is 'x'" in found
    assert "micro_batch" not in refusal(recipe, "layout=dp*", "seed=x", "batch.micro_batch=1")
