"""Objects over a pipe between a process and one that it has started.

A pickle runs code when it is read, so it is read nowhere else: both ends were inherited, and nobody
but these two can write to them. Tensors travel by value. multiprocessing's own way would share
their memory through a socket with a name in a temporary folder, which a killed process leaves.
"""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(pipe: Connection, *things: Any) -> None:
    """Sends something. Raises OSError when nobody will read it."""
    pipe.send_bytes(pickle.dumps(things, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """What `send` sent, as a tuple. Raises EOFError or OSError when the other process is gone."""
    return pickle.loads(pipe.recv_bytes())
