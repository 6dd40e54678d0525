"""A line between a member of a run (a server or a worker) and the coordinator, on any machine.

    member                                        coordinator
      hello: role, run, settings, code     ──>      a door: who has the run's secret
                                           <──      SAID   its number, and what it starts with
      SAID   reports, mistakes             <─>      SAID   who has died, what follows
      FILE   its part of a checkpoint      <─>      FILE   the checkpoint that it starts from
      PING                                 <─>      PING

SAID is JSON; FILE has a name, a place in the file, and bytes. Each end notices when the other is
gone: the connection ends, or nothing comes for SILENCE seconds.
"""

import json
import mmap
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from howdah.base.errors import brief
from howdah.comm.frames import FrameError, Frames, is_damage, own_room
from howdah.server.messages import FILE, REFUSED, SAID, SILENCE
from howdah.server.outbox import Letter, Outbox

OWN = {"ended", "file", "unwritten"}  # what a line tells its own end
PIECE = 4 << 20  # bytes of a file in one frame
MOST = 64 << 20  # bytes of one message
NAMES = re.compile(r"step-[0-9]{8,12}\.tmp/(index\.json|rank-[0-9]{5}\.(safetensors|done))")
FAREWELL = 10.0  # seconds
PATIENT = 3 * SILENCE  # a member computes, or its machine is busy

Said = Mapping[str, Any]
# what is called with every message, in the line's own thread: {"ended": why} is the last one;
# {"file": name} is one that has come, {"unwritten": name, "why": …} one that cannot be kept
Take = Callable[[dict[str, Any]], None]


class Line:
    """One end of a line. Any thread may tell; one thread of its own hears.

    peer     as errors name it
    folder   where files land
    refused  whether it has ended because of what the other end has sent
    """

    def __init__(self, sock: socket.socket, peer: str, *, take: Take, folder: Path | None) -> None:
        self._frames = Frames(sock, peer, seconds=PATIENT, most=MOST)
        self._outbox = Outbox(window=1 << 62, fifo=True)
        self._take, self._folder, self.refused = take, folder, False
        self._unwritten: set[str] = set()  # files that are coming, for which there is no room
        self._sender = Thread(
            target=self._outbox.carry, args=(self._frames,), daemon=True, name=f"to {peer}"
        )
        self._reader = Thread(target=self._hear, daemon=True, name=f"from {peer}")

    def start(self) -> "Line":
        """Begins to hear and to tell."""
        self._sender.start()
        self._reader.start()
        return self

    def tell(self, said: Said) -> None:
        """Sends a message; nothing once the line has ended."""
        self._outbox.post(Letter(SAID, buffers=[memoryview(json.dumps(said).encode())]))

    def send_file(self, path: Path, name: str) -> None:
        """Sends a file, which lands as `name` in the other end's folder, and is told there."""
        size = path.stat().st_size
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) if size else b""
        for offset in range(0, max(size, 1), PIECE):
            said = json.dumps({"name": name, "offset": offset, "size": size}).encode()
            part = memoryview(whole)[offset : offset + PIECE]
            self._outbox.post(Letter(FILE, said, [part] if size else []))

    def refuse(self, why: str) -> None:
        """Sends why the peer is refused; it ends the line."""
        self._outbox.post(Letter(REFUSED, why.encode(errors="replace")[: 1 << 12]))

    def flush(self) -> None:
        """Waits until all is sent; nothing more can be told then."""
        self._outbox.finish()
        self._sender.join()

    def end(self) -> None:
        """Ends the line at once; its thread hears of it."""
        self._outbox.close()
        with suppress(OSError):
            self._frames.sock.shutdown(socket.SHUT_RDWR)

    def finish(self, seconds: float = FAREWELL) -> None:
        """Gives the other end time to end the line, which has read then what it was told."""
        self._reader.join(seconds)
        self.close()

    def close(self) -> None:
        """Ends the line, and waits for its threads."""
        self.end()
        for thread in (self._sender, self._reader):
            if thread.is_alive():
                thread.join()
        self._frames.close()

    def _hear(self) -> None:
        why = "it has ended"
        try:
            while True:
                frame = self._frames.receive(own_room)
                if frame.kind == SAID:
                    self._take(_said(frame.payload))
                elif frame.kind == FILE:
                    self._land(json.loads(frame.fields), frame.payload)
                elif frame.kind == REFUSED:
                    self._take({"refused": frame.fields.decode()})
        except (OSError, FrameError) as error:
            why, self.refused = str(error), self.refused or is_damage(error)
        except Exception as error:  # whatever no sound end sends: the line must end, and be told
            why, self.refused = brief(error), True
        self._outbox.close()
        self._take({"ended": why})

    def _land(self, head: dict[str, Any], part: bytes) -> None:
        """Writes a piece of a file; tells when the file is whole, or cannot be written. Raises
        ValueError.
        """
        name, offset, size = str(head["name"]), int(head["offset"]), int(head["size"])
        path = landing(self._folder, name)
        draft = path.with_name(f"{path.name}.coming")
        if offset and name in self._unwritten:
            return
        self._unwritten.discard(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("ab" if offset else "wb") as file:
                if file.tell() != offset:
                    raise ValueError(f"a piece of {name} at {offset}, and {file.tell()} was next")
                file.write(part)
                whole = file.tell() == size
            if whole:
                draft.replace(path)
        except OSError as error:  # of the disk here, and no mistake of the other end
            self._unwritten.add(name)
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            self._take({"unwritten": name, "why": error.strerror or str(error)})
            return
        if whole:
            self._take({"file": name})


def _said(payload: bytes) -> dict[str, Any]:
    """A message, whose texts can be written: what stands for no letter is replaced. Raises
    ValueError for one that is none, or that the line itself would tell.
    """
    said = json.loads(payload)
    said = json.loads(json.dumps(said, ensure_ascii=False).encode(errors="replace"))
    if not isinstance(said, dict) or OWN & {*said}:
        raise ValueError(f"no message: {str(said)[:80]}")
    return said


def landing(folder: Path | None, name: str) -> Path:
    """Where a peer's file of a checkpoint lands. Raises ValueError for any other name."""
    if folder is None or not NAMES.fullmatch(name):
        raise ValueError(f"a file that nobody asked for: {name[:80]!r}")
    return folder / name
