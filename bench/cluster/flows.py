"""Raw sockets, one flow each way that is asked for: what the links of the box are proved with.

    python flows.py receive PORT SECONDS     takes one connection; a line on stdin starts the clock
    python flows.py send ADDRESS PORT        sends until it is ended

A receiver prints the bytes and the seconds of its own window. It needs nothing but Python.
"""

import socket
import sys
import time
from contextlib import suppress

BLOCK = 1 << 18


def receive(port: int, seconds: float) -> None:
    """Counts what comes in `seconds`, from the line on stdin on."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
    buffer = bytearray(BLOCK)
    with link:
        link.recv_into(buffer)
        print("flows", flush=True)
        sys.stdin.readline()
        count, began = 0, time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            count += link.recv_into(buffer)
        print(count, took, flush=True)


def send(address: str, port: int) -> None:
    """Sends zeros."""
    block = bytes(BLOCK)
    with socket.create_connection((address, port)) as link, suppress(OSError):
        while True:
            link.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), float(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
