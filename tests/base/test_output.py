"""Output whose reader has left: nothing is raised, in the program or at its end."""

import os
import pty
import subprocess
import sys
from contextlib import contextmanager

import pytest
from full_disk import FULL

SPEAK = """
import os, sys
from howdah.base.output import lasting_output
lasting_output()
assert all(os.fstat(descriptor) for descriptor in range(3))
print("x" * 100_000)
print("\\u00b3 and bytes \\udcc3", flush=True)
print("\\u00b3", file=sys.stderr)
print("kept for the end")
"""


def speak(environment=None, program=SPEAK, **streams):
    """Runs a program; (exit code, standard output, standard error) as far as they are asked for."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command, changed = [sys.executable, "-c", program], {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=changed, check=False, **streams)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def lost_terminal():
    ours, theirs = pty.openpty()
    os.close(ours)
    yield theirs
    os.close(theirs)


@contextmanager
def full_disk():
    with FULL.open("wb") as file:
        yield file.fileno()


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("broken", [closed_pipe, lost_terminal, full_disk])
def test_nobody_listens(broken, buffered):
    environment = {"PYTHONUNBUFFERED": buffered, "PYTHONUTF8": "1"}
    with broken() as stream:
        code, _, error = speak(environment, stdout=stream)
        assert (code, error) == (0, "³\n".encode())
        code, out, _ = speak(environment, stderr=stream)
        assert code == 0 and out.endswith("x\n³ and bytes ?\nkept for the end\n".encode())


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_streams_that_were_never_open(closed):
    code, _, error = speak(preexec_fn=lambda: [os.close(descriptor) for descriptor in closed])
    assert code == 0 and b"Error" not in error


def test_a_terminal_without_the_character():
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, error = speak(ascii_only)
    assert code == 0 and out.endswith(b"x\n? and bytes ?\nkept for the end\n")
    assert error == b"\\xb3\n"


def test_somebody_elses_streams_are_left_alone():
    program = (
        "import io, sys\nfrom howdah.base.output import lasting_output\n"
        "sys.stdout = mine = io.StringIO()\nlasting_output()\nassert sys.stdout is mine\n"
        "sys.stdout = sys.__stdout__\nlasting_output()\nonce = sys.stdout\nlasting_output()\n"
        "assert once is sys.stdout is not sys.__stdout__\nprint('once')"
    )
    assert speak(program=program) == (0, b"once\n", b"")


BAR = """
import sys
from howdah.base.output import lasting_output
lasting_output()
from howdah.train.show import open_show
show = open_show(0, 50, 0)
assert type(show).__name__ == "Bar"
show.step(1)
sys.stdin.readline()  # the terminal is gone
for step in range(2, 50):
    show.step(step)
    show.say("a line")
show.close()
print("to its end", file=sys.stderr)
"""


def test_a_bar_outlives_its_terminal():
    """A thread draws it, and would have printed a traceback of its own."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", BAR]
    streams = {"stdin": subprocess.PIPE, "stdout": theirs, "stderr": subprocess.PIPE}
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, env=environment, **streams) as process:
        os.close(theirs)
        assert os.read(ours, 1)
        os.close(ours)
        assert process.communicate(b"\n") == (None, b"to its end\n")
    assert process.returncode == 0


def test_a_run_whose_reader_leaves_trains_to_its_end(recipe, cache, tmp_path):
    program = (
        "from howdah.base.output import lasting_output; lasting_output()\n"
        "from howdah.cli import main; main()"
    )
    words = ["train", str(recipe), f"folder={tmp_path / 'a'}", "pace.steps=2"]
    with closed_pipe() as stream:
        environment = {**os.environ, "HOWDAH_CACHE": str(cache.parent)}
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=environment,
            stdout=stream,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "a" / "checkpoints" / "step-00000002").is_dir()
