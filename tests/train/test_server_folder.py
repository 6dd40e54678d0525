"""Servers that join from one machine have folders of their own; those of killed ones are removed.

A server that was killed had left its folder, with a whole checkpoint in it.
"""

import subprocess
import sys

import pytest

from howdah.base.errors import UserError
from howdah.train.run_folder import server_folder

WAITS = """
import sys
from pathlib import Path
from howdah.train.run_folder import server_folder

with server_folder(Path(sys.argv[1])) as own:
    (own / "weights").write_text("many")
    print(own, flush=True)
    sys.stdin.read()
"""


def start(folder):
    command = [sys.executable, "-c", WAITS, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_folder_of_a_killed_server_is_removed_and_that_of_a_live_one_stays(tmp_path):
    with start(tmp_path) as killed, start(tmp_path) as live:
        dead, kept = killed.stdout.readline().strip(), live.stdout.readline().strip()
        killed.kill()
        killed.wait()
        names = {path.name for path in tmp_path.iterdir()}
        assert {f"{tmp_path}/{name}" for name in names} == {dead, kept}
        with server_folder(tmp_path) as own:
            assert {str(path) for path in tmp_path.iterdir()} == {kept, str(own)}
            assert (tmp_path / kept / "weights").read_text() == "many"
        assert {str(path) for path in tmp_path.iterdir()} == {kept}
        live.communicate("")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    wrong = "cannot write the run folder .*file/run: Not a directory; give another with folder="
    with pytest.raises(UserError, match=wrong), server_folder(tmp_path / "file" / "run"):
        pass
