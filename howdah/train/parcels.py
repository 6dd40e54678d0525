"""Checkpoints of servers that do not see the run folder: each sends its part to the coordinator.

server 0   part ── rank-00000.safetensors, .done ──┐
server 1   part ── rank-00001.safetensors, .done ──┴──> coordinator: the draft of the step, and
                                                        when it is whole, the checkpoint
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread

from howdah.base.atomic import write_text
from howdah.base.errors import UserError
from howdah.checkpoint.folders import after, draft_folder, prune, rank_file
from howdah.checkpoint.index import MOST_STEPS, About, decode, encode
from howdah.checkpoint.publish import publish
from howdah.checkpoint.save import write_part
from howdah.checkpoint.sites import one_site
from howdah.checkpoint.snapshot import InMemory as Entry
from howdah.checkpoint.snapshot import Snapshots
from howdah.train.console import Say

Send = Callable[[Path, str], None]  # a file, under the name that it has in the other's folder


class Parcel:
    """Saves one shard: copies its pieces, and writes and sends them in the background.

    folder  for what is sent, which is removed then
    send    hands a file to the line
    """

    def __init__(self, folder: Path, shard: int, send: Send) -> None:
        self._folder, self._shard, self._send = folder / f"shard-{shard}", shard, send
        self._thread: Thread | None = None
        self.failed: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a part is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, *, step: int, entries: Iterable[Entry], about: About) -> None:
        """Copies the pieces as they are; sends them under the step's name."""
        self.wait()
        snapshot = Snapshots().take([*entries], apart=True)

        def write() -> None:
            self.failed = None
            folder = draft_folder(self._folder, step)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                part, done = (
                    folder / rank_file(self._shard, end) for end in ("safetensors", "done")
                )
                write_text(done, encode(write_part(part, step, snapshot.entries, about=about)))
                for path in (part, done):
                    self._send(path, f"{folder.name}/{path.name}")
            except OSError as error:
                self.failed = error.strerror or str(error)
            finally:
                rmtree(folder, ignore_errors=True)  # what is sent is still mapped

        self._thread = Thread(target=write, daemon=True, name="parcel")
        self._thread.start()

    def cancel(self) -> None:
        """Nothing: a part awaits nobody."""

    def wait(self) -> None:
        """Waits until the last part is on its way."""
        if self._thread:
            self._thread.join()


class Parcels:
    """The coordinator's end: makes checkpoints of the parts that have come.

    folder   RUN/checkpoints, into which files of the line land
    servers  how many parts there are
    keep     number of checkpoints to keep
    start    the step of the checkpoint that the run goes on from
    saved    the last step that was saved
    failed   why the last one that was not could not be
    """

    def __init__(
        self, folder: Path, servers: int, *, keep: int, say: Say, start: int = MOST_STEPS
    ) -> None:
        self.folder, self._servers, self._keep, self._say = folder, servers, keep, say
        self._come: dict[str, set[str]] = {}
        self.saved, self.failed = -1, ""
        self._damaged = after(folder, start)

    def take(self, name: str) -> None:
        """A file has come; the last one of a checkpoint completes it, or says why not."""
        draft, _, file = name.partition("/")
        ranks = self._come.setdefault(draft, set())
        ranks.add(file)
        if {rank_file(rank, "done") for rank in range(self._servers)} <= ranks:
            del self._come[draft]
            self._publish(self.folder / draft)

    def miss(self, name: str, why: str) -> None:
        """A file could not be written: its checkpoint is not saved."""
        if why != self.failed:
            self._say(f"{name} was not written, so that its step is not saved: {why}")
        self.failed = why

    def _publish(self, draft: Path) -> None:
        first, named = draft / rank_file(0, "done"), draft.name.removesuffix(".tmp")
        team = one_site(0, self._servers)
        try:
            own = decode(first.read_bytes(), str(first))
            first.unlink()
            publish(self.folder, own, team, deadline=1.0, cancelled=Event())
            self._damaged.discard(own.step)
            prune(self.folder, own.step, keep=self._keep, best=set(), damaged=self._damaged)
        except (OSError, UserError) as error:
            self.failed = str(error)
            step = int(named.removeprefix("step-"))
            self._say(f"the checkpoint of step {step} was not saved: {error}")
            return
        self.saved = max(self.saved, own.step)
