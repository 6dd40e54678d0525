"""Run folders and checkpoints of before the keys of recipes were renamed (decision 0025) go on.

`older/` has the run.toml that commit 0c4d9b5 wrote, with other numbers, and the facts of its
checkpoint.
"""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from howdah.base.errors import UserError
from howdah.checkpoint.facts import facts
from howdah.config.history import changes
from howdah.config.recipe import RENAMED, load_run
from howdah.shapes.presets import preset

OLDER = Path(__file__).parent / "older"


def test_a_run_folder_is_read_by_the_new_names():
    run = load_run(OLDER)
    model, rate = run.model, run.method.lr
    assert (model.ffn_size, model.tie_embeddings, model.relative_buckets) == (32, True, 32)
    assert (run.data.sequence_length, run.data.validation_share) == (32, 0.1)
    assert (run.method.grad_clip, run.method.optimizer.weight_decay) == (0.5, 0.2)
    assert (rate.peak, rate.warmup_steps, rate.schedule) == (0.001, 7, "constant")
    assert rate.min_ratio == 0.25
    assert (run.train.steps, run.train.keep_last, run.method.dropout) == (3, 3, 0.1)
    assert changes(run, load_run(OLDER, ["train.steps=9"])).keys() == {"train.steps"}


def test_the_same_text_as_a_recipe_is_answered_with_the_new_names(tmp_path):
    """All at once; those of a table that has another name itself were told after it."""
    (tmp_path / "mine.toml").write_text((OLDER / "run.toml").read_text("utf-8"))
    with pytest.raises(UserError) as refused:
        load_run(tmp_path / "mine.toml")
    told = refused.value.problems
    older = [old for old in RENAMED if f"unknown key {old!r}; it is" in " ".join(told)]
    assert len(older) == len(told) == 17 and "train.keep" in older
    with pytest.raises(UserError, match=r"^unknown key 'pace'; it is called 'train' now"):
        load_run(OLDER, ["pace.steps=9"])


def test_the_facts_of_a_checkpoint_are_read_by_the_new_names():
    """It was: does not say what it was trained with; use another checkpoint."""
    meta = json.loads((OLDER / "meta.json").read_text("utf-8"))
    found = facts(SimpleNamespace(meta=meta, path="a"))
    assert (found.model.ffn_size, found.model.norm_eps, found.order.samples) == (32, 1e-5, (800,))
    meta["model"] = asdict(preset("laptop"))
    meta["model"]["epsilon"] = "x"  # beside norm_eps, which counts
    assert facts(SimpleNamespace(meta=meta | {"end": 1}, path="a")).model == preset("laptop")
