"""What several tests of commands use."""

import os
import sys

import pytest

from howdah.cli import main as cli

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def run(monkeypatch, capsys, cache):
    """Runs a command in this process: (exit code, output, error)."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return command


@pytest.fixture
def howdah(run):
    """The same, by the name of the program."""
    return run


@pytest.fixture
def environment(cache):
    """That of a person's shell: no launcher in it, and the tests' token cache."""
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {**plain, "HOWDAH_CACHE": str(cache.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def refused(howdah):
    """Runs a command that must fail as a user's mistake; returns its one sentence."""

    def run(*words):
        code, _, error = howdah(*words)
        assert code == 2, error
        assert error.startswith("howdah: ") and error.count("\n") == 1, error
        assert "Traceback" not in error
        return error.removeprefix("howdah: ").strip()

    return run


@pytest.fixture
def trained(workers, make_job, recipe, howdah, tmp_path):
    """A run folder with checkpoints of steps 10 and 20."""
    code, _, error = howdah("train", recipe, f"folder={tmp_path / 'a'}")
    assert code == 0, error
    return tmp_path / "a"
