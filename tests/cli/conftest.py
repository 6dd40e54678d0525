"""What several tests of commands use."""

import sys

import pytest

from howdah.cli import main as cli


@pytest.fixture
def run(monkeypatch, capsys, cache):
    """Runs a command in this process: (exit code, output, error)."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return command
