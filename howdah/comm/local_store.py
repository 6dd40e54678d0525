"""The store of one machine's ranks: keys and values, over sockets that were inherited.

    rank 0 ── socket pair ──┐
    rank 1 ── socket pair ──┴── fork server, which keeps the Table

torch's own stores listen on a port, to which any process can connect, or are files. These sockets
have no name: only a process that inherited one can use it, and nothing of them remains.

A request and its answer are one frame each: a number, equal in both, and fields of bytes.

    set key value        →                    wait seconds key ...   →  1, or 0 after the timeout
    get key              →  value, or none    check key ...          →  1 or 0
    add key number       →  the sum           swap key old new       →  the value now there
    delete key           →  1 or 0            count                  →  number of keys
"""

import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Condition
from time import monotonic

import torch.distributed as dist

LENGTH = struct.Struct("<I")
LARGEST = 1 << 24  # the most bytes of a frame: a value is an address or a few words
DEADLINE = timedelta(seconds=600)  # the default timeout of `wait`; torch's stores have 300 s


def pack(number: int, fields: Sequence[bytes]) -> bytes:
    """The bytes of a frame with this number and these fields."""
    parts = [LENGTH.pack(number & 0xFFFFFFFF)]
    for part in fields:
        parts += [LENGTH.pack(len(part)), part]
    body = b"".join(parts)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[int, list[bytes]]:
    """The number and the fields of a frame. Raises ValueError if the bytes are no frame."""
    (number,), at, fields = LENGTH.unpack_from(body), LENGTH.size, []
    while at < len(body):
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size + length
        if at > len(body):
            raise ValueError("a field is longer than its frame")
        fields.append(body[at - length : at])
    return number, fields


# -- the side of the ranks ---------------------------------------------------------


class LocalStore(dist.Store):
    """A torch store over one end of a socket pair. All threads may use it: one that waits for keys
    keeps none of the others, such as the watcher, from asking.

    One of the threads whose answers have not come reads the socket, and gives each answer to whom
    it is for.

    secret  of the processes that this process was forked beside; it is not in the store
    """

    def __init__(self, line: socket.socket, secret: bytes = b"") -> None:
        super().__init__()
        self.secret = secret
        self._line, self._number, self._reads = line, 0, False
        self._changed = Condition()  # guards all of these, but not the reading
        self._answers: dict[int, list[bytes] | None] = {}  # by number; None: not come yet

    def _ask(self, *fields: str | bytes) -> list[bytes]:
        raw = [part.encode() if isinstance(part, str) else part for part in fields]
        with self._changed:
            self._number = mine = (self._number + 1) & 0xFFFFFFFF
            self._answers[mine] = None
            try:
                self._line.sendall(pack(mine, raw))
                while (answer := self._answers[mine]) is None:
                    if self._reads:
                        self._changed.wait()
                    else:
                        self._hear()
                return answer
            finally:
                del self._answers[mine]

    def _hear(self) -> None:
        """Reads one answer, without the lock; one of an aborted request is dropped."""
        self._reads = True
        self._changed.release()
        try:
            number, answer = unpack(self._read(*LENGTH.unpack(self._read(LENGTH.size))))
        finally:
            self._changed.acquire()
            self._reads = False
            self._changed.notify_all()
        if number in self._answers:
            self._answers[number] = answer

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._line.recv(count - len(parts))
            if not part:
                raise dist.DistNetworkError("the process that keeps the store has ended")
            parts += part
        return bytes(parts)

    # The interface of dist.Store.

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Waits until the key has a value, and returns it."""
        self.wait([key])
        return self._ask("get", key)[0]

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the number of a key (0 at first); returns the sum."""
        return int(self._ask("add", key, str(amount))[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return self._ask("check", *keys) == [b"1"]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key to `desired` if its value is `expected`; a missing value counts as empty.
        Returns the value after that, or `expected` if there is none.
        """
        return self._ask("swap", key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it had a value."""
        return self._ask("delete", key) == [b"1"]

    def num_keys(self) -> int:
        """The number of keys that have values."""
        return int(self._ask("count")[0])

    def wait(self, keys: list[str], timeout: timedelta = DEADLINE) -> None:
        """Returns when all keys have values. Raises DistStoreError after `timeout`."""
        if self._ask("wait", str(timeout.total_seconds()), *keys) != [b"1"]:
            raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")


# -- the side that keeps the table ---------------------------------------------------


@dataclass
class Line:
    """The server's end of a rank's socket pair; `read` holds the bytes of an incomplete frame."""

    socket: socket.socket
    read: bytearray = field(default_factory=bytearray)

    def frames(self) -> Iterator[bytes]:
        """Reads from the socket and yields the complete frames. Raises OSError when the rank has
        ended, and ValueError when a frame is too long.
        """
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the rank has ended")
        self.read += part
        while len(self.read) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.read)
            if length > LARGEST:
                raise ValueError("a frame is too long")
            if len(self.read) < LENGTH.size + length:
                return
            frame = bytes(self.read[LENGTH.size : LENGTH.size + length])
            del self.read[: LENGTH.size + length]
            yield frame

    def answer(self, number: int, *fields: bytes) -> None:
        """Sends an answer without blocking: a rank that does not read has ended or is stopped."""
        self.socket.send(pack(number, fields), socket.MSG_DONTWAIT)


@dataclass
class Waiting:
    """A rank that waits for keys: its request's number, the keys, and the end of its timeout."""

    line: Line
    number: int
    keys: list[bytes]
    until: float


class Table:
    """The keys and values, and the requests that wait for keys."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[Waiting] = []

    def serve(self, line: Line) -> None:
        """Answers the requests on a line. Raises OSError or ValueError: the line must be closed."""
        for frame in line.frames():
            number, fields = unpack(frame)
            self._answer(line, number, *fields)

    def forget(self, line: Line) -> None:
        """Drops the waiting requests of a line that was closed."""
        self._waiting = [one for one in self._waiting if one.line is not line]

    def soonest(self) -> float | None:
        """Seconds until the next timeout of a waiting request; None if no request waits."""
        ends = [one.until for one in self._waiting]
        return max(min(ends) - monotonic(), 0) if ends else None

    def look(self) -> None:
        """Answers the waiting requests whose keys all have values, and those that timed out."""
        now, left = monotonic(), []
        for one in self._waiting:
            if self._has(one.keys):
                _tell(one, b"1")
            elif now >= one.until:
                _tell(one, b"0")
            else:
                left.append(one)
        self._waiting = left

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _answer(self, line: Line, number: int, name: bytes, *fields: bytes) -> None:
        values = self._values
        match name, *fields:
            case b"set", key, value:
                values[key] = value
                line.answer(number)
            case b"get", key:
                line.answer(number, *[values[key]] if key in values else [])
            case b"add", key, amount:
                values[key] = str(int(values.get(key, b"0")) + int(amount)).encode()
                line.answer(number, values[key])
            case b"swap", key, old, new:
                if values.get(key, b"") == old:
                    values[key] = new
                line.answer(number, values.get(key, old))
            case b"delete", key:
                line.answer(number, b"1" if values.pop(key, None) is not None else b"0")
            case (b"count",):
                line.answer(number, str(len(values)).encode())
            case b"check", *keys:
                line.answer(number, b"1" if self._has(keys) else b"0")
            case b"wait", seconds, *keys:
                self._waiting.append(Waiting(line, number, keys, monotonic() + float(seconds)))
            case _:
                raise ValueError("a rank asks what no store can answer")
        self.look()


def _tell(one: Waiting, word: bytes) -> None:
    try:
        one.line.answer(one.number, word)
    except OSError:
        return  # the rank has ended; reading its line reports it
