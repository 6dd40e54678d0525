"""Streams that only note what is asked of them, for code that orders the work of a GPU."""

from contextlib import contextmanager


class LoggedEvent:
    def __init__(self, streams, number):
        self._streams, self.number = streams, number

    def record(self, stream):
        self._streams.log.append(f"event {self.number} on {stream.name}")

    def synchronize(self):
        self._streams.log.append(f"the host waits for event {self.number}")


class LoggedStream:
    def __init__(self, streams, name):
        self._streams, self.name = streams, name

    def wait_event(self, event):
        self._streams.log.append(f"{self.name} waits for event {event.number}")


class LoggedStreams:
    """One stream that computes, and others by number.

    log  what was asked of them, in order
    """

    def __init__(self):
        self.log, self._events, self._streams = [], 0, 0
        self._current = LoggedStream(self, "compute")

    def current(self):
        return self._current

    def new(self):
        self._streams += 1
        return LoggedStream(self, f"stream {self._streams - 1}")

    @contextmanager
    def inside(self, stream):
        self.log.append(f"inside {stream.name}")
        yield
        self.log.append(f"outside {stream.name}")

    def event(self):
        self._events += 1
        return LoggedEvent(self, self._events - 1)
