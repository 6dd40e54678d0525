"""The start of a run, before its first step: what cannot be written is a sentence."""

import pytest
from full_disk import FULL

from howdah.base.errors import UserError
from howdah.cli import train as cli_train
from howdah.config.recipe import load_run


def test_a_disk_that_is_full_before_the_first_step(make_job, recipe, tmp_path):
    """The run's own recipe is the first that is written there: it was a traceback."""
    job, run = make_job("a"), load_run(recipe, [f"folder={tmp_path / 'a'}"])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.toml.part").symlink_to(FULL)
    sentence = r"cannot write .*/a/run\.toml: No space left on device; make room there, or give an"
    with pytest.raises(UserError, match=sentence):
        cli_train._make_ready(run, job, first=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["lock"]
