"""The watcher: ends all waits of the GPUs' wires when a rank is lost.

A kernel of NCCL that waits for another GPU never learns that the process there has ended, and torch
would end this process without a sentence. So a thread of each process looks, every EVERY seconds:

    a process of this machine has ended     pidfd
    another rank has said who is lost       the store: one rank's finding is told to all
    a wire reports an error                 NCCL's own, such as a link that is down
    an operation is not over in `seconds`   the oldest on each lane; the ledgers of all ranks tell
                                            who has not made which call

On trouble it aborts all wires of this process. Their kernels end, the host wakes where it waits for
the GPU, and the next operation, or `check`, raises the PeerLost that names the rank and the call. A
rank of another machine that is stopped is found by the pulse (`pulse.py`), which calls `lose` too.
"""

import json
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, main_thread
from time import monotonic

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from howdah.comm.lane import Landing
from howdah.comm.ledger import Entry, behind
from howdah.comm.native import Native
from howdah.comm.watch import Patience, ended, release, watch

EVERY = 0.5  # seconds between two looks
ANSWER = 5.0  # seconds in which the other ranks tell their ledgers
LOST, WANTED, LEFT = "cards/lost", "cards/ledgers wanted", "cards/left"  # keys of the store


class Watcher:
    """The thread that watches for the wires of one process.

    store      a separate connection: on a shared one it would wait for other threads' requests
    processes  by rank, the processes of the other ranks of this machine
    seconds    after which an operation counts as hung
    device     that of the wires
    folder     where ledgers, and torch's record of the flights, are written when a rank is lost
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        processes: dict[int, int],
        seconds: float,
        device: torch.device | None = None,
    ) -> None:
        self._store, self._rank, self._seconds, self._device = store, rank, seconds, device
        self._processes = processes
        self._watched = dict(zip(processes, watch(list(processes.values())), strict=True))
        self._wires: dict[str, Native] = {}
        self._oldest: dict[str, tuple[Landing, Patience]] = {}
        self._told = False  # whether this rank's ledgers are in the store
        self._closed = Event()
        self.folder: Path | None = None
        self._thread = Thread(target=self._run, name="watcher")

    def add(self, name: str, wire: Native) -> None:
        """Watches for one more wire, which has the same name on all of its ranks."""
        self._wires[name] = wire

    def start(self) -> None:
        """Starts the thread. It runs until `close`, or until a rank is lost."""
        self._thread.start()

    def look(self) -> str:
        """Looks once; returns a sentence about the rank that is lost, or ""."""
        if self._store.check([LOST]):
            return self._store.get(LOST).decode(errors="replace")
        if not self._told and self._store.check([WANTED]):
            self._tell()
        return self._gone() or self._broken() or self._hung()

    def lose(self, said: str) -> None:
        """Ends all waits of this process with the error `said`, and tells the other ranks."""
        with suppress(RuntimeError):  # the store may be what failed
            self._store.set(LOST, said)
        self._write()
        # All at once: the abort of one communicator may wait for a kernel that waits for another.
        wires = [wire for wire in list(self._wires.values()) if not wire.lost]
        for wire in wires:
            wire.lost = said
        aborts = [Thread(target=wire.end_waits, name="abort") for wire in wires]
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join(ANSWER)

    def close(self) -> None:
        """Ends the thread. The end of this process is not a loss for the others any more."""
        self._closed.set()
        with suppress(RuntimeError):  # the launcher may have ended first
            self._store.set(f"{LEFT}/{self._rank}", "")
        if self._thread.is_alive():
            self._thread.join(ANSWER)
        release(list(self._watched.values()))
        self._watched = {}

    # -- what can be wrong

    def _gone(self) -> str:
        while (index := ended(list(self._watched.values()))) is not None:
            rank = list(self._watched)[index]
            if not self._store.check([f"{LEFT}/{rank}"]):
                process = self._processes[rank]
                return f"rank {rank} (process {process}) ended, as rank {self._rank} saw"
            release([self._watched.pop(rank)])
        return ""

    def _broken(self) -> str:
        for name, wire in list(self._wires.items()):
            if error := wire.error():
                return f"the wire of ranks {name} reports {error}, as rank {self._rank} saw"
        return ""

    def _hung(self) -> str:
        for name, wire in list(self._wires.items()):
            oldest = wire.lane.oldest() if wire.lane else None
            if oldest is None:
                self._oldest.pop(name, None)
            elif name not in self._oldest or self._oldest[name][0] is not oldest:
                self._oldest[name] = oldest, Patience(self._seconds, every=EVERY)
            elif not self._oldest[name][1].look():
                return self._who_is_late(name, oldest)
        return ""

    def _who_is_late(self, name: str, oldest: Landing) -> str:
        said = f"an operation of rank {self._rank} was not over in {self._seconds:g} s"
        where = f" ({oldest.site})" if oldest.site else ""
        entries = self._ask(name)
        late = behind(entries)
        silent = [str(rank) for rank in self._members(name) if rank not in entries]
        if silent:
            late = f"rank {', '.join(silent)} did not say what it called: it may be stopped"
        return f"{said}{where}: {late or 'all of its ranks had called it'}"

    # -- ledgers

    def _members(self, name: str) -> list[int]:
        return [int(rank) for rank in name.split("/", maxsplit=1)[0].split("-")]

    def _tell(self) -> None:
        """Writes this rank's ledgers to the store."""
        self._told = True
        entries = {name: wire.ledger.entry for name, wire in list(self._wires.items())}
        self._store.set(f"cards/ledger/{self._rank}", json.dumps(entries))

    def _ask(self, name: str) -> dict[int, Entry]:
        """The ledgers of a wire, of those ranks that answer."""
        self._store.set(WANTED, "")
        self._tell()
        members, until = self._members(name), monotonic() + ANSWER
        keys = {rank: f"cards/ledger/{rank}" for rank in members}
        while monotonic() < until and not self._store.check(list(keys.values())):
            self._closed.wait(0.05)
        found: dict[int, Entry] = {}
        for rank, key in keys.items():
            if self._store.check([key]):
                told = json.loads(self._store.get(key)).get(name)
                found |= {rank: Entry(*told)} if told else {}
        return found

    def _write(self) -> None:
        """Writes what may explain the loss, for people, beside the run."""
        if self.folder is None:
            return
        lines = [
            line
            for name, wire in list(self._wires.items())
            for line in (f"ranks {name}", *(f"    {call}" for call in wire.ledger.kept))
        ]
        with suppress(OSError):
            path = self.folder / f"calls-of-rank-{self._rank}.txt"
            path.write_text("\n".join([*lines, ""]), "utf-8")
            if record := flight_record():
                (self.folder / f"flights-of-rank-{self._rank}.pickle").write_bytes(record)

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the device of a new thread is the first
        # Not a daemon thread: Python must not exit while one runs code of torch.
        while not self._closed.wait(EVERY) and main_thread().is_alive():
            try:
                said = self.look()
            except RuntimeError as error:
                said = f"the launcher's store is gone: {str(error).splitlines()[0]}"
            if said:
                self.lose(said)
                return


def flight_record() -> bytes:
    """Torch's flight recorder: what NCCL was given last, pickled; empty where torch has none."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)  # private; not on CPUs
    return bytes(dump()) if dump else b""
