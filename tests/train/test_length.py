"""The length of a run: steps, tokens and epochs are ways to say one thing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.cli import train as cli_train
from howdah.config.recipe import load_run
from howdah.plan.batch import Batch
from howdah.text.order import Order
from howdah.train.job import Training
from howdah.train.length import describe, in_steps, spell_time, steps_of


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 60))
def test_the_fewest_steps_that_use_the_samples(full, start, ramp, samples):
    batch = Batch(full, 1, min(start, full) if ramp else 0, ramp)
    used = [0]
    while used[-1] < samples:
        used.append(used[-1] + batch.size(len(used) - 1))
    assert steps_of(batch, samples) == len(used) - 1


@pytest.mark.parametrize(
    ("train", "samples", "steps"),
    [
        (Training(steps=7), 0, 7),
        (Training(tokens=1), 0, 1),
        (Training(tokens=6 * 32 * 5), 0, 5),
        (Training(tokens=6 * 32 * 5 + 1), 0, 6),
        (Training(epochs=2), 15, 5),
        (Training(epochs=0.1), 15, 1),
    ],
)
def test_a_length_becomes_steps(train, samples, steps):
    found = in_steps(train, Batch(6, 6), 32, samples)
    assert found == replace(train, steps=steps, tokens=0, epochs=0.0)


def test_epochs_stay_until_the_text_is_known():
    assert in_steps(Training(epochs=2.5), Batch(6, 6), 32) == Training(epochs=2.5)


def test_a_length_beyond_all_runs_is_refused():
    told = r"^train\.tokens 2,000,000,000 takes 62,500,000 steps; a run has at most 10,000,000$"
    with pytest.raises(UserError, match=told):
        in_steps(Training(tokens=2 * 10**9), Batch(1, 1), 32)


def test_the_length_is_told():
    one, two = Order(1, 32, (100,), (1000,)), Order(1, 32, (100, 10), (500, 500))
    assert describe(one, steps=25, used=150) == (
        "length      25 steps, 4,800 tokens: 1.5 epochs of 100 samples"
    )
    assert describe(two, steps=25, used=110) == (
        "length      25 steps, 3,520 tokens: 1 epochs of 110 samples; 0.55 to 5.5 epochs of single "
        "sources"
    )


def test_times_are_clocks():
    assert [spell_time(s) for s in (0, 59.6, 3600 * 30)] == ["0:00:00", "0:01:00", "30:00:00"]


# -- in a recipe -------------------------------------------------------------------


def test_the_line_replaces_the_length_of_the_recipe(recipe):
    """The recipe has train.steps = 20."""
    run = load_run(recipe, ["train.epochs=2"])
    assert (run.train.epochs, run.train.tokens, run.train.steps) == (2.0, 0, 1000)
    assert load_run(recipe, ["train.steps=2", "train.steps=3"]).train.steps == 3
    assert load_run(recipe, ["train.tokens=1.5K"]).train.tokens == 1500
    assert load_run(recipe, ["train.tokens=1e6"]).train.tokens == 10**6


@pytest.mark.parametrize("name", ["tokens", "epochs"])
def test_a_run_of_no_length_is_refused(recipe, name):
    """It took the default, a thousand steps."""
    with pytest.raises(UserError, match=f"train.{name} is 0; a run has at least one step"):
        load_run(recipe, [f"train.{name}=0"])


def test_two_lengths_or_one_that_is_no_number_are_refused(recipe):
    with pytest.raises(UserError, match=r"train\.tokens 'many' is no count; write it like"):
        load_run(recipe, ["train.tokens=many"])
    told = r"^train\.steps and train\.epochs say how long the run is; give one of them$"
    with pytest.raises(UserError, match=told):  # the last one of the line was taken
        load_run(recipe, ["train.epochs=2", "train.steps=3"])
    recipe.write_text(recipe.read_text().replace("steps = 20", "steps = 20\nepochs = 1"))
    with pytest.raises(UserError, match=told):
        load_run(recipe)
    assert load_run(recipe, ["train.tokens=1K"]).train.tokens == 1000


def test_tokens_are_steps_in_the_job(make_job):
    assert make_job("a", "train.tokens=1000").train == replace(
        make_job("a").train, steps=6, tokens=0
    )


def test_epochs_are_steps_when_the_text_is_read(make_job, recipe, tmp_path):
    """The run folder has the steps, so that it is resumed by the same command."""
    words = [f"folder={tmp_path / 'a'}", "train.epochs=2"]
    job = cli_train._make_ready(
        load_run(recipe, words), make_job("a", "train.epochs=2"), first=True
    )
    assert job.train.epochs == 0 and job.train.steps > 20
    stored = load_run(tmp_path / "a").train
    assert (stored.steps, stored.epochs) == (job.train.steps, 0)
