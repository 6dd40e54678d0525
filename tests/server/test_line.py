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
    "a file without facts": (lambda frames: frames.send(FILE, b"{}"), True),
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
