"""Shared memory between the ranks of one host, by torch and Python alone.

Taken where the engine cannot be built: the same operations and the same bits, some times slower
than the engine and some times faster than messages.

    shared file    | words | calls | slots of rank 0: A B | slots of rank 1: A B | … | mail |

A collective is a row of turns. In each, a rank writes to its own slot, says so in its word, waits
until all have said so, and reads the slots of the others. Turns use the slots A and B by turns:
who writes to A again has seen everyone finish the turn of B, and so the reading of A before it.

    all_reduce, rank 0 of 2     turn A   write its part of b, read rank 1's part of a, add
                                turn B   write a, read b

Words are polled, with yields and then short sleeps. Each rank holds a lock on a byte of the file,
which the system lets go when the process ends, however it ends: a rank that waits long looks at
it, and at the word in which a rank that gave up says so. The file has no name, or loses it when
all have opened it, so nothing is left behind.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, lockf
from mmap import mmap
from threading import Lock
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import Checks, duration, flat, reduction
from howdah.comm.fallback_file import LINE, MAIL, SLOT, TEXT, Plan, create, open_file
from howdah.comm.joining import Ranks, all_came, told_to_all
from howdah.comm.reduction import reduce_in_order
from howdah.comm.signature import (
    CALL,
    RECORD,
    Disagreement,
    agree,
    caller,
    disagreement,
    number,
    pack,
    spell,
)
from howdah.comm.transport import (
    Batch,
    Counts,
    Nothing,
    PeerLost,
    SubgroupFactory,
    copy_own,
    shares,
)
from howdah.comm.watch import Patience

ONE_SHOT = 1 << 14  # bytes: up to here everyone adds everything, and a turn is saved
GIVEN_UP = 1 << 16  # in the abort word: 1 + who gave up, and times this 1 + about whom
YIELDS, NAP, LOOK = 300, 5e-5, 0.02  # yields before the first nap; seconds: a nap, between looks

give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: sleep(0))


class Fallback:
    """The ranks of one host that share a file."""

    link = "shared"
    among: SubgroupFactory

    def __init__(self, fd: int, *, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.site = rank, size, ""
        self._checks = Checks(rank, size)
        self._fd, self._seconds, self._at = fd, seconds, Plan(size)
        self._map = mmap(fd, self._at.total)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._words = memoryview(self._map)[: self._at.records].cast("q")
        self._peers = [(rank + hop) % size for hop in range(1, size)]
        self._lane = SLOT // size // 64 * 64  # bytes: a slot's part for one reader
        self._turns = self._calls = 0
        self._call = ""  # the last one
        self._record = b""  # of a call that is not compared yet
        self._sent, self._received = [0] * size, [0] * size  # messages, with each peer
        self._bolt = Lock()
        self._bolt.acquire()

    # -- collectives

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        x = self._reducible(x, op)
        self._begin(spell("all_reduce", x.dtype, [x.numel()], op))
        if x.nbytes <= ONE_SHOT:
            reduce_in_order(x, self._everyone(x), op)
        else:
            for chunk in x.split(self.size * self._lane // x.element_size()):
                pieces = chunk.split(shares(len(chunk), self.size))
                self._reduce(pieces[self.rank], pieces, op)
                self._gather(pieces, pieces[self.rank])
        own = shares(x.numel(), self.size)[self.rank]
        return (x.numel() + (self.size - 2) * own) * x.element_size()

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        x, (counts, *_) = self._reducible(x, op), self._checks.cut(x, out, counts)
        out = flat(out)
        self._begin(spell("reduce_scatter", x.dtype, counts, op))
        pieces = x.split(list(counts))
        for part in _steps(max(counts), self._lane // x.element_size()):
            self._reduce(out[part], [piece[part] for piece in pieces], op)
        return (x.numel() - counts[self.rank]) * x.element_size()

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        out, x, (counts, *_) = flat(out), flat(x), self._checks.cut(out, x, counts)
        self._begin(spell("all_gather", x.dtype, counts))
        pieces = out.split(list(counts))
        for part in _steps(max(counts), SLOT // x.element_size()):
            self._gather([piece[part] for piece in pieces], x[part])
        return (self.size - 1) * x.nbytes

    def broadcast(self, x: Tensor, root: int) -> int:
        x, root = flat(x), self._checks.peer(root)
        self._begin(spell("broadcast", x.dtype, [x.numel()], f"root {root}"))
        for part in _steps(x.numel(), SLOT // x.element_size()):
            side = self._turn([(0, x[part])] if self.rank == root else [])
            if self.rank != root:
                x[part].copy_(self._slot(root, side, x[part]))
        return (self.size - 1) * x.nbytes if self.rank == root else 0

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        x, root = self._reducible(x, op), self._checks.peer(root)
        self._begin(spell("reduce", x.dtype, [x.numel()], f"{op}, root {root}"))
        for part in _steps(x.numel(), SLOT // x.element_size()):
            slots = self._everyone(x[part])
            if self.rank == root:
                reduce_in_order(x[part], slots, op)
        return 0 if self.rank == root else x.nbytes

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        out = self._checks.on_root(root, "out", out)
        (counts, *_), x = self._checks.cut(out, x, counts), flat(x)
        self._begin(spell("gather", x.dtype, counts, f"root {root}"))
        pieces = [x[:0]] * self.size if out is None else list(flat(out).split(list(counts)))
        for part in _steps(max(counts), SLOT // x.element_size()):
            self._gather([piece[part] for piece in pieces], x[part])
        return 0 if self.rank == root else x.nbytes

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        x = self._checks.on_root(root, "x", x)
        (counts, *_), out = self._checks.cut(x, out, counts), flat(out)
        self._begin(spell("scatter", out.dtype, counts, f"root {root}"))
        pieces = [out[:0]] * self.size if x is None else list(flat(x).split(list(counts)))
        incoming = [out if peer == root else out[:0] for peer in range(self.size)]
        self._swap(incoming, pieces, max(counts))
        return sum(piece.nbytes for piece in pieces) - pieces[self.rank].nbytes

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        """What each sends to each stands in a table, for the ranks know their own part only."""
        out, x = flat(out), flat(x)
        sent, received = self._checks.exchange(out, x, sent, received)
        self._begin(spell("all_to_all", x.dtype, []))
        size, table = self.size, self._at.table + self._calls % 2 * self.size**2
        for peer, count in enumerate(sent):
            self._words[table + self.rank * size + peer] = count
        self._turn()
        for peer in range(size):
            count = self._words[table + peer * size + self.rank]
            if count != received[peer]:
                self._give_up()
                raise Disagreement(
                    f"rank {self.rank} called all_to_all to receive {received[peer]} elements "
                    f"from rank {peer} at {self.site or caller()}, but rank {peer} sends {count}"
                )
        longest = max(self._words[table : table + size**2])
        self._swap(out.split(list(received)), x.split(list(sent)), longest)
        return (x.numel() - sent[self.rank]) * x.element_size()

    def barrier(self) -> None:
        self._begin("barrier")
        self._turn()

    def group(self) -> AbstractContextManager[Batch]:
        """One after the other: nothing is gained by starting them together."""
        return nullcontext(Nothing())

    # -- one peer: a mailbox for each ordered pair, which holds one message

    def send(self, x: Tensor, to: int) -> int:
        x, to = flat(x), self._checks.peer(to, other=True)
        words, record, box = self._mailbox(self.rank, to)
        self._sent[to] += 1
        call = number(self._sent[to], spell("send", x.dtype, [x.numel()], f"{self.rank} to {to}"))
        for part in _steps(x.numel(), MAIL // x.element_size()):
            put = self._words[words]  # messages; the other word: taken out
            self._wait(to, words + LINE, put)
            self._map[record : record + RECORD] = pack(call, self.site or caller())
            self._view(box, x[part]).copy_(x[part])
            self._tell(words, put + 1)
        return x.nbytes

    def receive(self, x: Tensor, source: int) -> None:
        x, source = flat(x), self._checks.peer(source, other=True)
        words, record, box = self._mailbox(source, self.rank)
        self._received[source] += 1
        call = number(
            self._received[source],
            spell("send", x.dtype, [x.numel()], f"{source} to {self.rank}"),
        )
        for part in _steps(x.numel(), MAIL // x.element_size()):
            taken = self._words[words + LINE]
            self._wait(source, words, taken + 1)
            self._compare(source, pack(call, self.site or caller()), record)
            x[part].copy_(self._view(box, x[part]))
            self._tell(words + LINE, taken + 1)

    def _mailbox(self, source: int, to: int) -> tuple[int, int, int]:
        """Its first word, and where its record and its message lie."""
        self._check_open()
        pair = source * self.size + to
        place = self._at.mail + pair * (MAIL + RECORD)
        return self._at.mail_words + pair * 2 * LINE, place + MAIL, place

    def abort(self) -> None:
        """Ends all waits of all ranks, those of other threads of this one too."""
        if not self._map.closed:
            self._give_up()

    def close(self) -> None:
        """Lets go of the file. Its memory goes when the last rank has."""
        if self._map.closed:
            return
        self._words.release()
        del self._bytes
        self._map.close()
        os.close(self._fd)

    def _check_open(self) -> None:
        if self._map.closed:
            raise UserError("this transport is closed")

    # -- what operations are made of

    def _reducible(self, x: Tensor, op: str) -> Tensor:
        x = flat(x)
        reduction(x, op)
        return x

    def _reduce(self, out: Tensor, pieces: Sequence[Tensor], op: str) -> None:
        """One turn: every piece to its rank, which reduces what it got; each fits a lane."""
        side = self._turn((peer * self._lane, pieces[peer]) for peer in self._peers)
        lane = self.rank * self._lane
        parts = [self._slot(peer, side, out, lane) for peer in range(self.size)]
        parts[self.rank] = pieces[self.rank]
        reduce_in_order(out, parts, op)

    def _gather(self, pieces: Sequence[Tensor], own: Tensor) -> None:
        """One turn: the own piece to all; it fits a slot."""
        side = self._turn([(0, own)])
        for peer in self._peers:
            pieces[peer].copy_(self._slot(peer, side, pieces[peer]))
        if pieces[self.rank].numel():
            copy_own(pieces[self.rank], own)

    def _swap(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], longest: int) -> None:
        """A piece from everyone to everyone."""
        copy_own(incoming[self.rank], outgoing[self.rank])
        for part in _steps(longest, self._lane // incoming[0].element_size()):
            side = self._turn((peer * self._lane, outgoing[peer][part]) for peer in self._peers)
            for peer in self._peers:
                into = incoming[peer][part]
                into.copy_(self._slot(peer, side, into, self.rank * self._lane))

    def _everyone(self, x: Tensor) -> list[Tensor]:
        """One turn: everyone's `x`, which all may read."""
        side = self._turn([(0, x)])
        return [self._slot(peer, side, x) for peer in range(self.size)]

    def _slot(self, rank: int, side: int, like: Tensor, start: int = 0) -> Tensor:
        return self._view(self._at.slots + (2 * rank + side) * SLOT + start, like)

    def _view(self, start: int, like: Tensor) -> Tensor:
        return self._bytes[start : start + like.nbytes].view(like.dtype)

    # -- turns

    def _begin(self, call: str) -> None:
        """Says what comes; the first turn compares it."""
        self._check_open()
        self._calls += 1
        self._call = number(self._calls, call)
        self._record = pack(self._call, self.site or caller())
        place = self._record_of(self.rank)
        self._map[place : place + RECORD] = self._record
        if len(self._call) >= CALL:  # else the record has it all
            place = self._text_of(self.rank)
            self._map[place : place + TEXT] = self._call.encode()[:TEXT].ljust(TEXT)

    def _record_of(self, rank: int) -> int:
        return self._at.records + (self._calls % 2 * self.size + rank) * RECORD

    def _text_of(self, rank: int) -> int:
        return self._at.texts + (self._calls % 2 * self.size + rank) * TEXT

    def _turn(self, writes: Iterable[tuple[int, Tensor]] = ()) -> int:
        """Writes to the own slot and waits until all have; the side they wrote to."""
        side = self._turns % 2
        for start, tensor in writes:
            self._slot(self.rank, side, tensor, start).copy_(tensor)
        self._turns += 1
        self._tell(self.rank * LINE, self._turns)
        for peer in self._peers:
            self._wait(peer, peer * LINE, self._turns)
        if self._record:
            for peer in self._peers:
                self._compare(peer, self._record, self._record_of(peer))
            self._record = b""
        return side

    def _compare(self, peer: int, mine: bytes, theirs: int) -> None:
        record = self._map[theirs : theirs + RECORD]
        if not agree(mine, record):
            self._give_up()
            place = self._text_of(peer)
            whole = self._map[place : place + TEXT].decode(errors="replace").strip()
            raise disagreement(self.rank, mine, peer, record, (self._call, whole))

    def _tell(self, word: int, value: int) -> None:
        self._fence()
        self._words[word] = value

    def _fence(self) -> None:
        """Keeps memory in order: on some processors others may see a word before what it tells."""
        self._bolt.release()
        self._bolt.acquire()

    def _wait(self, peer: int, word: int, value: int) -> None:
        """Until `peer` has set a word to `value`."""
        words = self._words
        for _ in range(YIELDS):
            if words[word] >= value:
                return self._fence()
            give_way()
        patience, looked = Patience(self._seconds, every=LOOK), monotonic()
        while words[word] < value:
            sleep(NAP)
            if (now := monotonic()) - looked > LOOK:
                looked = now
                self._look(peer, word, value, patience)
        return self._fence()

    def _look(self, peer: int, word: int, value: int, patience: Patience) -> None:
        if self._words[word] >= value:  # whatever has happened since
            return
        if told := self._words[self._at.abort]:
            by, about = told % GIVEN_UP - 1, told // GIVEN_UP - 1
            if about in (-1, self.rank):
                raise PeerLost(f"rank {by} of {self.size} gave up; what it says tells why")
            raise PeerLost(f"rank {about} of {self.size} is lost; rank {by} waited for it")
        gone = self._ended(peer) and self._words[word] < value
        if not patience.look() or gone:
            self._give_up(about=peer)
            how = "has ended" if gone else f"has been silent for {patience.waited:.0f} s"
            raise PeerLost(f"rank {peer} of {self.size} {how}; rank {self.rank} waits for it")

    def _ended(self, peer: int) -> bool:
        """The lock of a process that lives cannot be had, not even to share it."""
        try:
            lockf(self._fd, LOCK_SH | LOCK_NB, 1, peer)
        except OSError:
            return False
        lockf(self._fd, LOCK_UN, 1, peer)
        return True

    def _give_up(self, about: int = -1) -> None:
        """Ends the waits of all others; `about` is the rank that is lost, if one is."""
        self._words[self._at.abort] = 1 + self.rank + (1 + about) * GIVEN_UP


def _steps(length: int, step: int) -> Iterator[slice]:
    """[0, length) in slices; one empty slice when there is nothing, for calls to be compared."""
    # Not a list: a rank may have said any length, and is found out in the first turn.
    return (slice(start, min(start + step, length)) for start in range(0, max(length, 1), step))


def connect_fallback(store: dist.Store, *, rank: int, size: int, seconds: float = 600) -> Fallback:
    """Connects `size` processes of one host that share a store.

    A rank that is silent for `seconds` is given up. Raises UserError when memory is short.
    """
    seconds = duration("seconds", seconds)
    rank, total = Checks(0, size).peer(rank), Plan(size).total
    ranks = Ranks(store, rank, size, (), (), Patience(seconds, every=LOOK))
    with told_to_all(store, rank):
        if rank == 0:
            fd, path = create(total)
            store.set("file", path)
        else:
            path = ranks.hear("file")
            fd = open_file(path, total)
        lockf(fd, LOCK_EX, 1, rank)
        transport = Fallback(fd, rank=rank, size=size, seconds=seconds)
        all_came(ranks)
    if rank == 0 and not path.startswith("/proc"):
        os.unlink(path)
    return transport
