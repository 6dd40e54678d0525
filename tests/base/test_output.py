"""Output whose reader has left, or does not read: nothing is raised, and nothing waits for ever."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("broken", [closed_pipe, lost_terminal, full_disk])
def test_nobody_listens(broken, buffered):
    environment = {"PYTHONUNBUFFERED": buffered, "PYTHONUTF8": "1"}
    with broken() as stream:
        code, _, error = speak(environment, stdout=stream)
        assert (code, error) == (0, "³\n".encode())
        code, out, _ = speak(environment, stderr=stream)
        assert code == 0 and out.endswith("x\n³ and bytes ?\nkept for the end\n".encode())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_streams_that_were_never_open(closed):
    code, _, error = speak(preexec_fn=lambda: [os.close(descriptor) for descriptor in closed])
    assert code == 0 and b"Error" not in error


OWN_CHILD = """
import subprocess, sys
from howdah.base.output import lasting_output
lasting_output()
sys.stdout.flush()
sys.stderr.flush()
looks = "import os, sys; [os.fstat(number) for number in range(3)]; sys.stdout.flush()"
sys.exit(subprocess.run([sys.executable, "-c", looks]).returncode)
"""


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_streams_that_were_never_open_can_be_flushed_and_are_there_for_children(closed):
    """A run without standard output had trained and saved, and ended in a traceback: there was
    nothing to flush, and its ranks had the descriptor of a socket in that place.
    """
    shut = {"preexec_fn": lambda: [os.close(descriptor) for descriptor in closed]}
    code, _, error = speak(program=OWN_CHILD, **shut)
    assert code == 0, error


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
from howdah.train.console import RunConsole
show = RunConsole(0, steps=50)
assert show.has_bar
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


@pytest.mark.slow
def test_a_run_whose_reader_leaves_trains_to_its_end(recipe, cache, tmp_path):
    program = (
        "from howdah.base.output import lasting_output; lasting_output()\n"
        "from howdah.cli.main import main; main()"
    )
    words = ["train", str(recipe), f"folder={tmp_path / 'a'}", "train.steps=2"]
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


# -- readers that are there and do not read --------------------------------------

GUARD = 600  # seconds
MUCH = 40_000  # lines, more than a pipe or a terminal takes
HEAD = """
import sys, threading
from howdah.base import output
from howdah.base.signals import Stopped, listen
output.GLANCE, output.LOOKS = 10, {looks}
output.lasting_output()
def tell(what):
    print(what, file=sys.stderr, flush=True)
def speak():
    for line in range({much}):
        print(line)
    sys.stdout.flush()
"""
NEVER, SOON = 10**9, 2  # looks after which the reader is given up
PATIENT = """
with listen(patient=True) as request:
    tell("begun")
    speak()
    print("the last line", flush=True)
    tell(f"asked {request.signal}")
"""
AT_ONCE = """
with listen():
    try:
        tell("begun")
        speak()
        tell("all is written")
    except Stopped as stopped:
        print("more, which waits for nobody", flush=True)
        tell(f"stopped {stopped.number}")
"""
IN_A_THREAD = """
with listen() as request:
    tell("begun")
    thread = threading.Thread(target=speak)
    thread.start()
    thread.join()
    tell("dropped")
"""


@contextmanager
def unread_pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


@contextmanager
def unread_terminal():
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


@contextmanager
def held_terminal():
    """As after Ctrl-S."""
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    yield ours, theirs
    os.close(ours)


UNREAD = [unread_pipe, unread_terminal, held_terminal]


@contextmanager
def killed_in_the_end(process):
    """After the block, and where that waits for what never comes."""
    guard = threading.Timer(GUARD, process.kill)
    guard.start()
    try:
        yield
    finally:
        guard.cancel()
        process.kill()


@contextmanager
def speaking(program, looks, to):
    """Runs a program that speaks to `to`, and has begun."""
    command = [sys.executable, "-c", HEAD.format(looks=looks, much=MUCH) + program]
    with subprocess.Popen(command, stdout=to, stderr=subprocess.PIPE, stdin=subprocess.PIPE) as one:
        os.close(to)
        with killed_in_the_end(one):
            assert one.stderr.readline() == b"begun\n"
            yield one
            assert one.wait(GUARD) == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize(
    ("program", "said"), [(PATIENT, b"asked 15\n"), (AT_ONCE, b"stopped 15\n")]
)
def test_a_stop_request_ends_the_waiting(unread, program, said):
    """A training whose pager was paused heard no signal at all."""
    with unread() as (_, to), speaking(program, NEVER, to) as one:
        one.send_signal(signal.SIGTERM)
        assert one.stderr.readline() == said


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize(
    ("program", "said"), [(PATIENT, b"asked 0\n"), (IN_A_THREAD, b"dropped\n")]
)
def test_training_goes_on_without_a_reader(unread, program, said):
    with unread() as (_, to), speaking(program, SOON, to) as one:
        assert one.stderr.readline() == said


def test_a_terminal_without_room_for_the_end_of_a_line():
    """It has room for one byte and says so, and would wait for the second."""
    program = """
with listen(patient=True):
    tell("begun")
    print("\\n" * 40_000, flush=True)
    tell("dropped")
"""
    with unread_terminal() as (_, to), speaking(program, SOON, to) as one:
        assert one.stderr.readline() == b"dropped\n"


def lines_of(reader):
    with os.fdopen(os.dup(reader), "rb") as file:
        return file.read().split()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("program", "looks"), [(PATIENT, NEVER), (AT_ONCE, 0)])
def test_a_slow_reader_gets_every_line(program, looks):
    """And a command whose Ctrl-C is heard at once waits as long as its pager is open."""
    with unread_pipe() as (reader, to):
        ours = os.dup(to)
        with speaking(program, looks, to):
            while select.select([], [ours], [], 0)[1]:  # until it is full
                pass
            os.close(ours)
            numbers = lines_of(reader)[:MUCH]
    assert numbers == [str(line).encode() for line in range(MUCH)]


def test_a_reader_that_comes_back_is_written_to_again():
    program = """
with listen(patient=True):
    tell("begun")
    speak()
    tell("dropped")
    sys.stdin.readline()
    print("again", flush=True)
"""
    with unread_pipe() as (reader, to), speaking(program, SOON, to) as one:
        assert one.stderr.readline() == b"dropped\n"
        os.read(reader, 1 << 20)
        one.communicate(b"\n", timeout=GUARD)
        assert lines_of(reader)[-1] == b"again"


@pytest.mark.slow
def test_a_run_whose_reader_does_not_read_stops_when_it_is_asked(recipe, cache, tmp_path):
    program = (
        "import sys; from howdah.base import output; output.GLANCE, output.LOOKS = 10, 2\n"
        "from howdah.cli.main import main; main()"
    )
    words = ["train", str(recipe), f"folder={tmp_path / 'a'}", "train.steps=1000000"]
    log = tmp_path / "a" / "log.txt"
    with unread_pipe() as (_, to):
        fcntl.fcntl(to, fcntl.F_SETPIPE_SZ, 16384)  # some seventy lines of the log
        environment = {**os.environ, "HOWDAH_CACHE": str(cache.parent)}
        command = [sys.executable, "-c", program, *words, "method.lr.schedule=constant"]
        streams = {"stdout": to, "stderr": subprocess.PIPE}
        with (
            subprocess.Popen(command, env=environment, **streams) as one,
            killed_in_the_end(one),
        ):
            os.close(to)
            while one.poll() is None and not (log.is_file() and "step: 99" in log.read_text()):
                pass
            one.send_signal(signal.SIGTERM)
            _, error = one.communicate()
    assert (one.returncode, error) == (143, b"")
    assert "and saved; go on: howdah train" in log.read_text()
    assert len([*(tmp_path / "a" / "checkpoints").glob("step-????????")]) >= 1
