"""Sends Python objects over a pipe between a process and a child that it has started.

Unpickling can run code, so howdah unpickles only here: both ends of the pipe were inherited, and no
other process can write to them. Tensors are sent by value. multiprocessing would share their memory
through a socket with a name in a temporary folder, which remains when a process is killed.
"""

import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

LOOK, LOOKS = 0.5, 10  # seconds between looks; in so many a peer sends something, unless it stands


def send(pipe: Connection, *things: Any) -> None:
    """Sends some objects as one message. Raises OSError if the peer has ended."""
    pipe.send_bytes(pickle.dumps(things, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection, *, farewell: int = 0) -> Any:
    """The objects of one `send`, as a tuple. Raises EOFError or OSError if the peer has ended.

    farewell  a blocked signal, or 0. EOFError is raised as well when it is pending and nothing has
              come for LOOKS looks: the peer is stopped, and may send nothing for ever
    """
    looks = 0
    while farewell and not pipe.poll(LOOK):
        looks += 1
        if looks >= LOOKS and farewell in signal.sigpending():
            raise EOFError
    return pickle.loads(pipe.recv_bytes())
