"""Streams of a GPU, played on the CPU: lanes and the wire of GPUs without a card.

    played = Played()                      the streams of one device
    wire = played.native(path, rank, size) Native over gloo, on a lane of these streams
    with played.checked(): ...             Race, if a stream touches what another one has in hand

Operators run at once, as always on the CPU. What is given to gloo is asynchronous: it is waited for
where a stream would wait, at an event behind it, and not when it is started. So operations of
different ranks may start in any order, as on GPUs, and late data are really late.

Each stream counts what it was given, and knows how much of the other streams lies before: an event
carries these numbers from one stream to another. Memory that two streams touch, one of which
writes, must have been touched in an order that events make. Otherwise nothing orders the two on a
GPU, whatever happens here.
"""

from collections import Counter, defaultdict
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from flight import Race, span_of, touched
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from howdah.comm.both import Both
from howdah.comm.lane import Lane
from howdah.comm.native import Native

LINK = "played"


class Stream:
    """A stream: what it was given that has not been waited for, and what lies before its next work.

    seen  by stream, the number of its works that this stream comes after
    """

    def __init__(self, name):
        self.name, self.works, self.seen = name, [], Counter()

    def wait_event(self, event):
        event.synchronize()  # on the CPU, what comes next runs at once
        for name, number in event.seen.items():
            self.seen[name] = max(self.seen[name], number)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        while self.works:
            self.works.pop(0).wait()


class Event:
    """A place in a stream."""

    def record(self, stream):
        self.seen, self.works, self.time = Counter(stream.seen), tuple(stream.works), perf_counter()

    def synchronize(self):
        for work in self.works:
            work.wait()

    def query(self):
        return all(work.is_completed() for work in self.works)

    def elapsed_time(self, other):
        return 1000 * (other.time - self.time)


class Touch(NamedTuple):
    """Work `number` of a stream, and the memory that it uses: spans, and whether it writes them."""

    spans: list
    number: int
    name: str


class Played:
    """The streams of one device."""

    def __init__(self):
        self.compute = self._current = Stream("compute")
        self._names, self._touches = count(1), defaultdict(list)
        self._wires = []

    # -- as torch.cuda has them (`howdah/comm/lane.py`)

    def current(self):
        return self._current

    def new(self):
        return Stream(f"lane {next(self._names)}")

    @contextmanager
    def inside(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self):
        return Event()

    # -- what they are given

    def give(self, call, spans):
        """The current stream is given a call of gloo, which begins behind those of its earlier ones
        that use the same memory.
        """
        for work in self._current.works:
            if not work.over and meet(work.spans, spans):
                work.wait()
        with _disable_current_modes():  # gloo copies to memory of its own
            self._current.works.append(Once(call(), spans))

    def touch(self, name, reads=(), writes=()):
        """The current stream touches tensors; returns their spans, and whether each is written."""
        stream = self._current
        stream.seen[stream.name] += 1
        spans = [(span_of(x), False) for x in reads] + [(span_of(x), True) for x in writes]
        new = Touch(spans, stream.seen[stream.name], name)
        for other, touches in self._touches.items():
            for old in reversed(touches if other != stream.name else []):
                if old.number <= stream.seen[other]:
                    break  # this one, and all before it, come before what the stream does now
                if meet(old.spans, spans):
                    raise Race(
                        f"{name} on {stream.name} touches what {old.name} on {other} uses, and no "
                        "event is between them"
                    )
        self._touches[stream.name].append(new)
        return spans

    @contextmanager
    def checked(self):
        """Operators inside touch memory, too."""
        with Operators(self), torch.autograd.set_multithreading_enabled(False):
            yield

    # -- the wire

    def native(self, path, rank, size):
        """A wire of this device between the ranks that name the same new file."""
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        backend = gloo(dist.FileStore(str(path), size), rank, size, options)
        wire = PlayedNative(Backend(backend, self), link=LINK)
        wire.lane = Lane(self, check=wire.check)
        self._wires.append(wire)
        return wire

    @contextmanager
    def closing(self):
        """Ends all wires."""
        try:
            yield
        finally:
            for wire in self._wires:
                wire.close()


class PlayedNative(Native):
    """Moves float32 tensors: these are the GPU's. Counts and sums of the host are in others."""

    def lane_of(self, x):
        return self.lane if x.dtype == torch.float32 else None


class PlayedBoth(Both):
    """Both wires, and those of its subgroups."""

    def __init__(self, host, played, path):
        super().__init__(host, played.native(path, host.rank, host.size))
        self.among = Among(host, played, path)

    def wire_of(self, x):
        return self.cards if self.cards.lane_of(x) else self.host


class Among:
    """Makes the wires of subgroups."""

    def __init__(self, host, played, path):
        self._host, self._played, self._path, self._times = host, played, path, Counter()
        self.wires = host.among.wires._replace(cards=LINK)

    def __call__(self, ranks):
        self._times[tuple(ranks)] += 1
        name = f"{self._path}-{'-'.join(map(str, ranks))}x{self._times[tuple(ranks)]}"
        return PlayedBoth(self._host.among(ranks), self._played, name)


class Once:
    """A work of gloo that several may wait for."""

    def __init__(self, work, spans):
        self._work, self.spans, self.over = work, spans, False

    def wait(self):
        if not self.over:
            self.over = True
            with _disable_current_modes():  # gloo copies as it is waited for
                self._work.wait()

    def is_completed(self):
        return self.over or self._work.is_completed()


class Backend:
    """gloo's backend, with works that are given to the current stream; and what they touch."""

    supports_coalescing = False

    def __init__(self, backend, played):
        self._backend, self._played = backend, played

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def _give(self, name, call, reads, writes):
        self._played.give(call, self._played.touch(name, reads, writes))

    def allreduce(self, tensors, options):
        self._give("all_reduce", lambda: self._backend.allreduce(tensors, options), (), tensors)

    def _reduce_scatter_base(self, out, x, options):
        call = lambda: self._backend._reduce_scatter_base(out, x, options)  # noqa: E731
        self._give("reduce_scatter", call, [x], [out])

    def _allgather_base(self, out, x, options):
        call = lambda: self._backend._allgather_base(out, x, options)  # noqa: E731
        self._give("all_gather", call, [x], [out])

    def broadcast(self, tensors, options):
        self._give("broadcast", lambda: self._backend.broadcast(tensors, options), (), tensors)

    def reduce(self, tensors, options):
        self._give("reduce", lambda: self._backend.reduce(tensors, options), (), tensors)

    def alltoall_base(self, out, x, *rest):
        call = lambda: self._backend.alltoall_base(out, x, *rest)  # noqa: E731
        self._give("all_to_all", call, [x], [out])

    def send(self, tensors, peer, tag):
        self._give("send", lambda: self._backend.send(tensors, peer, tag), tensors, ())

    def recv(self, tensors, peer, tag):
        self._give("receive", lambda: self._backend.recv(tensors, peer, tag), (), tensors)


class Operators(TorchDispatchMode):
    """Operators touch their tensors on the current stream, after what it was given before."""

    def __init__(self, played):
        super().__init__()
        self._played = played

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._played.current().synchronize()
        both = list(touched(func, args, kwargs or {}))
        reads, writes = ([x for x, w in both if w is kind] for kind in (False, True))
        self._played.touch(func._schema.name, reads, writes)
        return func(*args, **(kwargs or {}))


def meet(some, others):
    """Whether two works use the same memory, and one of them writes it."""
    return any(
        (writes or writing) and one.meets(other)
        for one, writes in some
        for other, writing in others
    )
