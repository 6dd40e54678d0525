"""What the environment of a command says: numbers of a launcher, and where torch keeps code."""

import os
import subprocess
import sys
from importlib.abc import MetaPathFinder

import pytest

from howdah.base.errors import UserError
from howdah.cli import main
from howdah.cli.environment import launched, number_in, require_seat

READY = "import os; from howdah.cli.environment import ready_torch; ready_torch()"
READY += "; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"


def ready(**environment):
    """ready_torch in a new process, which has not loaded torch: (exit code, what it says)."""
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | environment
    words = [sys.executable, "-c", READY]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip() + done.stderr


def test_torch_keeps_what_it_compiles_where_nobody_else_may_write(tmp_path):
    code, said = ready(HOWDAH_CACHE=str(tmp_path))
    assert (code, said) == (0, str(tmp_path / "howdah" / "inductor"))
    assert (tmp_path / "howdah" / "inductor").stat().st_mode & 0o777 == 0o700


def test_a_limit_of_data_that_torch_exceeds_is_refused():
    """Torch aborted the process where it could not allocate."""
    words = ["bash", "-c", f'ulimit -d {200 << 10}; exec "$0" -c "{READY}"', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = "a process's data is limited to 200 MiB (ulimit -d), and torch alone takes 256; raise"
    assert done.returncode == 1 and said in done.stderr


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "howdah" / "inductor").mkdir(parents=True)
    (tmp_path / "howdah" / "inductor").chmod(0o777)
    code, said = ready(HOWDAH_CACHE=str(tmp_path))
    assert code != 0 and "inductor, where torch keeps code that it runs, is not this user's" in said


def test_a_folder_of_the_users_own_choice_is_looked_at_too(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "elsewhere").chmod(0o770)
    code, said = ready(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "elsewhere"))
    assert code != 0 and "elsewhere, where torch keeps code" in said


@pytest.mark.parametrize("word", ["abc", "", "-1", "0", "1.5", "²", "9" * 30])
def test_a_number_of_ranks_that_is_none_is_refused(monkeypatch, word):
    monkeypatch.setenv("WORLD_SIZE", word)
    with pytest.raises(UserError, match=r"^WORLD_SIZE is '.*', and a launcher gives a number from"):
        number_in("WORLD_SIZE")


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (("2", "2", "29500"), "^RANK is 2 and WORLD_SIZE 2; a launcher counts ranks from 0"),
        (("-1", "2", "29500"), "^RANK is '-1', and a launcher gives a number from 0 on"),
        (("1", "2", "0"), "^MASTER_PORT is 0; ranks meet at a port"),
    ],
)
def test_numbers_of_no_rank_are_refused(monkeypatch, numbers, said):
    """Ranks waited for others that could not come."""
    for name, word in zip(("RANK", "WORLD_SIZE", "MASTER_PORT"), numbers, strict=True):
        monkeypatch.setenv(name, word)
    with pytest.raises(UserError, match=said):
        require_seat()


def test_numbers_of_a_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (number_in("WORLD_SIZE"), number_in("LOCAL_RANK", least=0)) == (12, 0)
    assert not launched()
    monkeypatch.setenv("RANK", "3")
    assert launched()


class Refuses(MetaPathFinder):
    """Finds the commands, and fails as their libraries do where memory is limited."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path, target=None):
        if name == "howdah.cli.commands":
            raise self.error


def refused():
    error = ImportError("\n\nIMPORTANT: PLEASE READ THIS\n\nfor advice")
    error.__cause__ = ImportError("libblas.so: failed to map segment")
    return error


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), "there is not enough memory"),
        (refused(), "libblas.so: failed to map segment"),
    ],
)
def test_a_command_that_cannot_be_loaded_says_why_on_one_line(monkeypatch, capsys, error, why):
    monkeypatch.delitem(sys.modules, "howdah.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refuses(error), *sys.meta_path])
    assert main.run() == 1
    assert capsys.readouterr().err == f"howdah: howdah cannot be loaded: {why}\n"
