"""Sends Python objects over a pipe between a process and a child that it has started.

Unpickling can run code, so howdah unpickles only here: both ends of the pipe were inherited, and no
other process can write to them. Tensors are sent by value. multiprocessing would share their memory
through a socket with a name in a temporary folder, which remains when a process is killed.
"""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(pipe: Connection, *things: Any) -> None:
    """Sends some objects as one message. Raises OSError if the peer has ended."""
    pipe.send_bytes(pickle.dumps(things, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """The objects of one `send`, as a tuple. Raises EOFError or OSError if the peer has ended."""
    return pickle.loads(pipe.recv_bytes())
