"""Lines between members and the coordinator: what ends them, and whose mistake it was."""

import json
import socket
from queue import Queue

import pytest

from howdah.comm.frames import Frames
from howdah.server.line import Line
from howdah.server.messages import FILE, SAID


def file_frame(name):
    said = {"name": name, "offset": 0, "size": 3}
    return lambda frames: frames.send(FILE, json.dumps(said).encode(), [memoryview(b"abc")])


ENDS = {
    "its end": (lambda frames: None, False),
    "no frame": (lambda frames: frames.sock.sendall(b"x" * 200), True),
    "no JSON": (lambda frames: frames.send(SAID, b"", [memoryview(b"{")]), True),
    "a file that nobody asked for": (file_frame("../../passwd"), True),
    "a list": (lambda frames: frames.send(SAID, b"", [memoryview(b"[1]")]), True),
    "what the line itself tells": (
        lambda frames: frames.send(SAID, b"", [memoryview(b'{"file": "x"}')]),
        True,
    ),
    "a file without facts": (lambda frames: frames.send(FILE, b"{}"), True),
    "a file at no place": (
        lambda frames: frames.send(FILE, b'{"name": "x", "offset": Infinity, "size": 3}'),
        True,
    ),
    "lists in lists": (lambda frames: frames.send(SAID, b"", [memoryview(b"[" * 200_000)]), True),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_line_that_ends_by_what_was_sent_says_so(what, tmp_path):
    ours, theirs = socket.socketpair()
    heard, frames = Queue(), Frames(theirs, "us")
    line = Line(ours, "a server", take=heard.put, folder=tmp_path).start()
    line.tell({"seat": 0})
    assert json.loads(frames.receive(lambda head: [memoryview(bytearray(head.size))]).payload)
    send, refused = ENDS[what]
    send(frames)
    if not refused:
        frames.close()
    assert "ended" in heard.get(timeout=10)
    line.close()
    assert line.refused == refused and not [*tmp_path.iterdir()]
    frames.close()


def test_a_file_for_which_there_is_no_room_ends_no_line(tmp_path):
    """What was sent of it is dropped; the same file, sent again, may be kept."""
    ours, theirs = socket.socketpair()
    heard, name = Queue(), "step-00000002.tmp/rank-00000.done"
    (tmp_path / "step-00000002.tmp").write_text("in the way")
    line = Line(ours, "a server", take=heard.put, folder=tmp_path).start()
    frames = Frames(theirs, "us")

    def send(offset, part):
        said = {"name": name, "offset": offset, "size": 6}
        frames.send(FILE, json.dumps(said).encode(), [memoryview(part)])

    send(0, b"abc")
    assert heard.get(timeout=10) == {"unwritten": name, "why": "File exists"}
    send(3, b"def")
    frames.send(SAID, b"", [memoryview(b'{"said": "on"}')])
    assert heard.get(timeout=10) == {"said": "on"}
    (tmp_path / "step-00000002.tmp").unlink()
    send(0, b"ABC")
    send(3, b"DEF")
    assert heard.get(timeout=10) == {"file": name}
    assert (tmp_path / name).read_bytes() == b"ABCDEF"
    line.close()
    frames.close()


def test_texts_that_cannot_be_written_are_made_such_that_can():
    """A path whose name is not UTF-8, or what nobody sound would say."""
    ours, theirs = socket.socketpair()
    heard, frames = Queue(), Frames(theirs, "us")
    line = Line(ours, "a worker", take=heard.put, folder=None).start()
    frames.send(SAID, b"", [memoryview(b'{"said": "in \\udcff", "\\ud800": 1}')])
    assert heard.get(timeout=10) == {"said": "in ?", "?": 1}
    line.refuse("\ud800 is nobody")
    assert frames.receive(lambda head: []).fields == b"? is nobody"
    frames.close()
    line.close()
