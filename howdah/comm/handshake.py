"""The handshake: two processes of a run prove to each other that they know its secret, before
either reads a byte of anything else.

    caller                                   listener
      MAGIC, nonce a (32 random bytes)  ──>
                                        <──  nonce b (32 random bytes)
      proof(caller), hello              ──>    a wrong proof: the connection is closed, silently
                                        <──  proof(listener), hello
    proof(role) = length and SHA-256 of the hello, and HMAC-SHA256(secret, MAGIC, role, a, b, the
                  addresses of both ends, that length and that SHA-256)

What is read from a stranger has a fixed size. He hears 32 random bytes and no more: not who
listens, nor why he was refused. Fresh numbers of both ends make an old proof useless; the role,
that a proof is sent back to its sender; the addresses, that somebody between two ends passes on
what they say, each believing to talk to him alone. So addresses must not be translated on the way.

The secret proves who joins. What is sent afterwards is neither encrypted nor signed: who can change
packets on the way can change it (docs/security.md).

    hello = greet(sock, secret, own, role=CALLER)    either end of one connection
    door = Door(listener, secret, own)               one that listens: many callers, one thread
    for sock, hello in door.look(seconds): ...
"""

import errno
import hmac
import os
import select
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import suppress
from hashlib import sha256
from time import monotonic
from typing import Literal, NamedTuple

from howdah.comm.credentials import require_own_user
from howdah.comm.tls import Seal, plain

Role = Literal["caller", "listener"]
CALLER: Role = "caller"
LISTENER: Role = "listener"

MAGIC = b"howdah1\n"  # another number when the messages change
NONCE = 32  # bytes
HELLO = 4096  # the most bytes of a hello
LOOK = 0.1  # seconds
DEADLINE = 5.0  # seconds for a whole greeting: strangers may send nothing for ever
WAITING = 256  # greetings under way at one door; the oldest is dropped for one more
PROOF = struct.Struct("<I32s32s")  # length and SHA-256 of the hello, HMAC of all
ENDED = "it ended the connection: its secret may be another one, or too many call it"

Greeting = Generator[tuple[bytes, int], bytes, bytes]


class Stranger(Exception):
    """The peer has not proved that it knows the secret; the message says what it did instead."""


def greeting(role: Role, secret: bytes, hello: bytes, ends: tuple[bytes, bytes]) -> Greeting:
    """One end of a handshake, without a socket: yields bytes to send, and how many to read next,
    which are sent into it; returns the peer's hello. Raises Stranger.

    ends  the addresses of the caller and of the listener
    """
    if len(hello) > HELLO:
        raise ValueError(f"a hello has at most {HELLO} bytes, not {len(hello)}")
    mine = os.urandom(NONCE)
    if role == CALLER:
        theirs = yield MAGIC + mine, NONCE
        nonces = mine, theirs
    else:
        said = yield b"", len(MAGIC) + NONCE
        if said[: len(MAGIC)] != MAGIC:
            raise Stranger("it does not speak this protocol, or another version of it")
        nonces = said[len(MAGIC) :], mine

    def digest(of: Role, length: int, sum_: bytes) -> bytes:
        parts = (MAGIC, of.encode(), *nonces, *ends, length.to_bytes(4, "little"), sum_)
        # Each part with its length: no two lists of parts give the same text.
        text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(secret, text, "sha256")

    def check(packed: bytes) -> tuple[int, bytes]:
        length, sum_, proof = PROOF.unpack(packed)
        peer: Role = LISTENER if role == CALLER else CALLER
        if not hmac.compare_digest(proof, digest(peer, length, sum_)) or length > HELLO:
            raise Stranger("it does not know the run's secret")
        return length, sum_

    sum_ = sha256(hello).digest()
    own = PROOF.pack(len(hello), sum_, digest(role, len(hello), sum_)) + hello
    if role == CALLER:
        length, sum_ = check((yield own, PROOF.size))
        heard = yield b"", length
    else:
        length, sum_ = check((yield mine, PROOF.size))
        heard = yield b"", length
    if not hmac.compare_digest(sha256(heard).digest(), sum_):
        raise Stranger("its hello is not the one that it has proved")
    if role == LISTENER:
        yield own, 0
    return heard


def greet(
    sock: socket.socket,
    secret: bytes,
    hello: bytes,
    deadline: float = DEADLINE,
    *,
    role: Role,
    look: Callable[[], object] = lambda: None,
) -> bytes:
    """Greets the peer of a connected socket; returns its hello, which it has proved to be its own.

    hello     at most HELLO bytes, such as JSON with a rank, a run and a version
    deadline  seconds for all of it
    role      CALLER for the end that has connected, LISTENER for the one that has accepted
    look      called every LOOK seconds while the peer is waited for; may raise

    Raises Stranger: the peer has another secret or none, ended, or was too slow. The socket is then
    of no use. Its timeout is None after success.
    """
    until, steps = monotonic() + deadline, greeting(role, secret, hello, ends(sock, role))
    try:
        out, wanted = next(steps)
        while True:
            sock.settimeout(max(until - monotonic(), 0.001))
            sock.sendall(out)
            heard = b""
            while len(heard) < wanted:
                sock.settimeout(min(max(until - monotonic(), 0.001), LOOK))
                try:
                    part = sock.recv(wanted - len(heard))
                except TimeoutError:
                    if monotonic() > until:
                        raise
                    look()
                    continue
                if not part:
                    raise Stranger(ENDED)
                heard += part
            out, wanted = steps.send(heard)
    except StopIteration as stop:
        sock.settimeout(None)
        return bytes(stop.value)
    except TimeoutError:
        raise Stranger(f"it did not greet within {deadline:g} s") from None
    except (ConnectionResetError, BrokenPipeError):
        raise Stranger(ENDED) from None
    except OSError as error:
        raise Stranger(f"its connection failed: {error.strerror or error}") from None


def ends(sock: socket.socket, role: Role) -> tuple[bytes, bytes]:
    """The addresses of the caller and of the listener of a connected socket, as both ends see them.
    A socket pair has none. Raises Stranger if the peer has left.
    """
    try:
        here, there = spell(sock.getsockname()), spell(sock.getpeername())
    except OSError:
        raise Stranger("it ended the connection") from None
    return (here, there) if role == CALLER else (there, here)


def spell(address: object) -> bytes:
    """An address as bytes: host and port, without the zone that only one machine knows."""
    if isinstance(address, tuple):
        return f"{str(address[0]).partition('%')[0]} {address[1]}".encode()
    return b""  # of a Unix socket: only processes of this machine reach it


class _Guest(NamedTuple):
    """A greeting under way at a door."""

    sock: socket.socket
    steps: Greeting
    heard: bytearray
    since: float


class Door:
    """Greets those who connect to a listening socket, all at once: nobody waits for another.

    strangers  how many connections were refused so far, for the log
    why        of the last one: what it did
    full       why nobody can be let in, though nobody is being greeted: no descriptor is free

    `hello` is this process's own. The caller closes the listening socket; `close` ends greetings.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        hello: bytes,
        *,
        deadline: float = DEADLINE,
        waiting: int = WAITING,
        seal: Seal = plain,
    ) -> None:
        listener.setblocking(False)
        self._seal = seal  # for those who call
        self._listener, self._secret, self._hello = listener, secret, hello
        self._deadline, self._most = deadline, waiting
        self._guests: dict[int, _Guest] = {}  # by descriptor, the oldest first
        self._wanted: dict[int, int] = {}  # bytes that are read next
        self.strangers, self.why = 0, ""
        self.full: OSError | None = None

    def look(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Waits up to `seconds` for somebody to do something, and greets; returns the connections
        whose peers have proved that they know the secret, with their hellos. They are blocking.
        """
        poll = select.poll()
        for number in (self._listener.fileno(), *self._guests):
            poll.register(number, select.POLLIN)
        due = min((guest.since for guest in self._guests.values()), default=0.0) + self._deadline
        if self._guests:
            seconds = max(min(seconds, due - monotonic()), 0)
        found: list[tuple[socket.socket, bytes]] = []
        ready = [number for number, _ in poll.poll(seconds * 1000)]
        for number in ready:  # before those who come now, of whom there may be too many
            if number in self._guests:
                self._go_on(number, found.append)
        if self._listener.fileno() in ready:
            self._accept()
        late = monotonic() - self._deadline
        for number in [n for n, guest in self._guests.items() if guest.since <= late]:
            self._refuse(number, f"it did not greet within {self._deadline:g} s")
        return found

    def close(self) -> None:
        """Ends the greetings that are under way; the listening socket stays."""
        for guest in self._guests.values():
            guest.sock.close()
        self._guests.clear()

    def _accept(self) -> None:
        for _ in range(self._most):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # nobody else, or somebody who has left
                none_free = error.errno in (errno.EMFILE, errno.ENFILE) and not self._guests
                self.full = error if none_free else None
                return
            if len(self._guests) >= self._most:
                self._refuse(next(iter(self._guests)), "too many came at once")
            with suppress(Stranger, OSError):
                require_own_user(sock)
                sock = self._seal(sock)
                sock.setblocking(False)
                steps = greeting(LISTENER, self._secret, self._hello, ends(sock, LISTENER))
                number = sock.fileno()
                self._guests[number] = _Guest(sock, steps, bytearray(), monotonic())
                _, self._wanted[number] = next(steps)
                continue
            self.strangers += 1
            sock.close()

    def _go_on(self, number: int, welcome: Callable[[tuple[socket.socket, bytes]], object]) -> None:
        """Reads what has come of one greeting, and takes its next steps."""
        sock, steps, heard, _ = self._guests[number]
        try:
            part = sock.recv(self._wanted[number] - len(heard))
            if not part:
                raise Stranger("it ended the connection")
            heard += part
            while len(heard) == self._wanted[number]:
                said = bytes(heard)
                heard.clear()
                out, self._wanted[number] = steps.send(said)
                if out and sock.send(out) != len(out):  # an empty socket holds more than that
                    raise Stranger("it does not read")
        except StopIteration as stop:
            del self._guests[number]
            sock.setblocking(True)
            welcome((sock, bytes(stop.value)))
        except BlockingIOError:
            return
        except (Stranger, OSError) as error:
            self._refuse(number, str(error))

    def _refuse(self, number: int, why: str) -> None:
        self.strangers, self.why = self.strangers + 1, why
        self._guests.pop(number).sock.close()
