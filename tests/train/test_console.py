"""What a run shows: a bar on a (pseudo-)terminal; in a pipe, lines alone."""

import os
import pty
import sys
from contextlib import contextmanager
from threading import Thread

import pytest

from howdah.comm.transport import SingleRank
from howdah.train.console import RunConsole, encoding_bar
from howdah.train.loop import train

SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"  # the cursor, again and while a bar is drawn


@pytest.fixture
def show(monkeypatch):
    """Standard output leads into a terminal or a pipe; what arrived is in the list afterwards."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    @contextmanager
    def to(ends):
        source, sink = ends
        arrived, said = [], []

        def read():
            try:
                while part := os.read(source, 1 << 12):
                    arrived.append(part)
            except OSError:  # of a terminal whose other end is closed
                pass

        reader = Thread(target=read)
        reader.start()
        with open(sink, "w", encoding="utf-8") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            yield said
        reader.join()
        os.close(source)
        said.append(b"".join(arrived).decode())

    return to


def test_a_terminal_sees_a_bar_that_is_closed_at_the_end(show, make_job):
    with show(pty.openpty()) as said:
        train(make_job("a", "train.steps=3", "train.save_every=0"), SingleRank())
    (text,) = said
    assert HIDDEN in text and "training" in text and "3/3" in text and "tokens/s per rank" in text
    assert "step:" not in text  # the bar is instead of the log lines
    assert text.rindex(SHOWN) > text.rindex("3/3")
    assert text.removesuffix(SHOWN).endswith("\n")


def test_a_pipe_sees_lines_alone(show, make_job):
    with show(os.pipe()) as said:
        train(make_job("a", "train.steps=3", "train.save_every=0"), SingleRank())
    (text,) = said
    assert "\x1b" not in text and "\r" not in text and "━" not in text and "3/3" not in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step:")] == list(
        "123"
    )


def test_other_ranks_and_short_commands_show_no_bar(show):
    with show(pty.openpty()) as said:
        RunConsole(1, steps=3).say("of rank 1")
        RunConsole(0).say("of rank 0")
    assert said == ["of rank 0\r\n"]


@pytest.mark.parametrize(("ends", "seen"), [(pty.openpty, True), (os.pipe, False)])
def test_the_encoding_of_text_has_a_bar_that_goes_away(show, ends, seen):
    with show(ends()) as said, encoding_bar() as progress:
        progress(0.5)
    assert ("encoding" in said[0]) is seen and (HIDDEN in said[0]) is seen
    assert not seen or said[0].rindex(SHOWN) > said[0].rindex("encoding")
