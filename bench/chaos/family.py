"""A run as the outside sees it: started in a session of its own, struck, and looked over.

Every process of the run belongs to one session, so that nothing of it can hide, and what a session
leaves in the system can be told: processes, files under /dev/shm and /tmp, locks that are still
held, sockets that still listen.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HOWDAH = (sys.executable, "-m", "howdah")
LIMIT = 120.0  # seconds after which a run that does not end is given up


@dataclass
class Family:
    """A started run."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def members(self) -> dict[int, int]:
        """The live processes of the session, with their parents."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and (fields := _stat(int(path.name))):
                state, parent, session = fields
                if session == self.process.pid and state not in "ZX":
                    found[int(path.name)] = parent
        return found

    def server(self) -> int:
        """The fork server; 0 before it is there."""
        return next((pid for pid, up in self.members().items() if up == self.process.pid), 0)

    def ranks(self) -> list[int]:
        """The rank processes, in the order in which they were started."""
        server = self.server()
        return sorted(pid for pid, up in self.members().items() if server and up == server)

    def said(self) -> str:
        """Standard output so far."""
        return self.out.read_text(errors="replace")

    def wait_for(self, text: str) -> bool:
        """Until standard output holds `text`; whether it does before the run ends."""
        until = time.monotonic() + LIMIT
        while text not in self.said():
            if self.process.poll() is not None or time.monotonic() > until:
                return text in self.said()
            time.sleep(0.005)
        return True

    def end(self, seconds: float = LIMIT) -> float:
        """Seconds until nothing of the session lives; negative when something does to the end."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self.process.poll() is not None and not self.members():
                return time.monotonic() - began
            time.sleep(0.01)
        return -1.0


def _stat(pid: int) -> tuple[str, int, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])


@contextmanager
def started(
    words: Sequence[object], folder: Path, *, environment: dict[str, str] | None = None
) -> Iterator[Family]:
    """A command in a session of its own. Whatever happens, nothing of it lives on."""
    folder.mkdir(parents=True, exist_ok=True)
    out, err = folder / "out", folder / "err"
    with out.open("wb") as to, err.open("wb") as also:
        process = subprocess.Popen(
            [*map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=also,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    family = Family(process, out, err)
    try:
        yield family
    finally:
        for pid in family.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def names() -> set[str]:
    """What a run could leave in the system's own folders."""
    found = set()
    for folder in ("/dev/shm", "/tmp", "/dev/mqueue"):
        with suppress(OSError):
            found |= {f"{folder}/{name}" for name in os.listdir(folder)}
    return found


def is_locked(run: Path) -> bool:
    """Whether somebody still holds a run folder's lock."""
    try:
        with (run / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
