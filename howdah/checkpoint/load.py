"""Checkpoint: reads any piece of any tensor, for any layout that wrote it and any that reads it.

    saved by dp2        |<--- rank-00000 --->|<--- rank-00001 --->|
    wanted by dp3       |<-- piece 0 -->|<-- piece 1 -->|<-- piece 2 -->|
                                         run | run

A wanted piece is filled from the saved pieces that overlap it, one run of elements at a time. If
an element is missing from all of them, reading fails. Only the windows of fixed size around these
runs are read from disk; elements are converted to the dtype of the destination. To a GPU they go
through two windows of pinned memory: while it copies from one, the next is read.

To resume, checkpoints are tried from the newest on, and the first with correct checksums is used.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howdah.base.errors import UserError, nearest
from howdah.base.files import kind_of, read_file
from howdah.checkpoint.folders import INDEX, best_step, numbered, step_folder, step_of
from howdah.checkpoint.index import File, Index, Stored, decode, inconsistencies
from howdah.checkpoint.safefile import Entry, Header, checksum, read_header, read_into
from howdah.comm.lane import CudaStreams, Streams
from howdah.comm.staging import pinned
from howdah.plan.boxes import Missing, Overlap, Piece, reads, whole_piece

LARGEST_INDEX = 256 << 20  # bytes: a million pieces
WINDOW = 1 << 20  # elements per read
PINNED = 64 << 20  # bytes of a window from which a GPU copies


class Checkpoint:
    """A checkpoint on disk: the facts of its index, and the elements of its tensors.

    It caches the headers of files it has read from, and keeps no file open.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self._index = path, index
        self._headers: dict[str, Header] = {}
        self._stored: dict[str, dict[str, list[Stored]]] = {}
        for item in index.stored:
            self._stored.setdefault(item.kind, {}).setdefault(item.piece.name, []).append(item)

    @property
    def step(self) -> int:
        return self._index.step

    @property
    def run(self) -> str:
        return self._index.about.run

    @property
    def layout(self) -> str:
        return self._index.about.layout

    @property
    def samples(self) -> int:
        return self._index.about.samples

    @property
    def meta(self) -> dict[str, Any]:
        return self._index.about.meta

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state in the checkpoint: "weight", and names of optimizer states."""
        return tuple(self._stored)

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of the tensors of a kind."""
        return tuple(self._stored.get(kind, ()))

    def with_weights_from(self, kind: str) -> "Checkpoint":
        """The same checkpoint, whose weights are what it holds of another kind, where it does.
        Raises UserError if it holds nothing of that kind.
        """
        if kind not in self._stored:
            raise UserError(f"{self.path} holds no {kind!r}{nearest(kind, self.kinds)}")
        other = Checkpoint(self.path, self._index)
        other._stored |= {"weight": {**self._stored["weight"], **self._stored[kind]}}
        return other

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The full tensor's shape. Raises UserError when the checkpoint does not hold it."""
        return self._find(kind, name)[0].piece.shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """The dtype in which the tensor was saved. Raises UserError when it is not there."""
        item = self._find(kind, name)[0]
        return self._entry(item).dtype

    def read(self, kind: str, piece: Piece, out: Tensor) -> None:
        """Fill `out` (1-D, any dtype and device) with the elements of `piece`.

        Raises UserError when the checkpoint does not hold the tensor, holds it in another
        shape, or lacks one of the elements.
        """
        items = self._find(kind, piece.name)
        if items[0].piece.shape != piece.shape:
            raise UserError(
                f"{piece.name} is {list(items[0].piece.shape)} in {self.path} and "
                f"{list(piece.shape)} in this model; load it into the model it was saved from"
            )
        if out.shape != (piece.elements,):
            raise ValueError(f"{piece.elements} elements do not fit {tuple(out.shape)}")
        try:
            plan = reads([piece], {index: [item.piece] for index, item in enumerate(items)})
        except Missing as missing:
            raise UserError(
                f"{self.path} is not whole: {missing}; use another checkpoint"
            ) from None
        windows = windows_of(out.device)
        for index, group in groupby(plan, key=lambda read: read.holder):
            self._copy(items[index], [read.run for read in group], out.detach(), windows)
        windows.end()

    def tensor(self, kind: str, name: str) -> Tensor:
        """Reads the full tensor to the CPU, in the dtype it was saved in; raises as `read` does."""
        shape = self.shape(kind, name)
        out = torch.empty(prod(shape), dtype=self.dtype(kind, name))
        self.read(kind, whole_piece(name, shape), out)
        return out.reshape(shape)

    def verify(self) -> list[str]:
        """Reads every byte of the files; returns a sentence for each problem."""
        problems = inconsistencies(self._index)
        for file, items in self._by_file():
            problems += _verify_file(self.path / file.name, file, items)
        return problems

    def sound(self, names: Collection[str] | None = None) -> list[str]:
        """The files that are here and undamaged, of these or of all; every byte of them is read."""
        return [
            file.name
            for file, items in self._by_file()
            if names is None or file.name in names
            if not [*_verify_file(self.path / file.name, file, items)]
        ]

    def lacks(self) -> list[File]:
        """The files that are not here, and on other hosts may be."""
        there = (file for file in self._index.files if file.host)
        return [file for file in there if kind_of(self.path / file.name) != "file"]

    def _by_file(self) -> Iterator[tuple[File, list[Stored]]]:
        by_file: dict[str, list[Stored]] = {file.name: [] for file in self._index.files}
        for item in self._index.stored:
            by_file[item.file].append(item)
        return ((file, by_file[file.name]) for file in self._index.files)

    def _find(self, kind: str, name: str) -> list[Stored]:
        if kind not in self._stored:
            raise UserError(f"{self.path} holds no {kind!r}{nearest(kind, self.kinds)}")
        if name not in self._stored[kind]:
            close = nearest(name, self._stored[kind])
            raise UserError(f"{self.path} holds no {kind} of {name!r}{close}")
        return self._stored[kind][name]

    def _entry(self, item: Stored) -> Entry:
        """The position of a piece in its file. The file's header is read at the first call."""
        if item.file not in self._headers:
            path = self.path / item.file
            if kind_of(path) != "file":
                raise UserError(f"{path} is missing; use another checkpoint")
            self._headers[item.file] = read_header(path)
        entry = self._headers[item.file].entries.get(item.entry)
        if entry is None or not _same(entry, item):
            raise UserError(f"{self.path / item.file} does not hold {item.entry} as its index says")
        return entry

    def _copy(self, item: Stored, runs: Iterable[Overlap], out: Tensor, windows: "Windows") -> None:
        entry = self._entry(item)
        with (self.path / item.file).open("rb", buffering=0) as file:
            for at, values in _parts(file, entry, runs, windows):
                there = values.to(out.device, non_blocking=True)
                out[at : at + len(values)].copy_(there)


class Windows:
    """Memory of the host through which the elements of a file pass."""

    def next(self, entry: Entry, left: int) -> Tensor:
        """Memory for a part of the `left` elements of an entry; the one before was used."""
        return torch.empty(min(WINDOW, left), dtype=entry.dtype)

    def end(self) -> None:
        """Waits until the last one was used."""


class PinnedWindows(Windows):
    """Two windows, used in turn, from which a GPU copies by itself.

    allocate  bytes → memory of the host that it can read
    nbytes    of each window
    """

    def __init__(
        self,
        streams: Streams,
        allocate: Callable[[int], Tensor] = pinned,
        nbytes: int = PINNED,
    ) -> None:
        self._streams, self._allocate, self._nbytes = streams, allocate, nbytes
        self._using: tuple[Tensor, Any] | None = None  # and an event behind its copies
        self._used: tuple[Tensor, Any] | None = None

    def next(self, entry: Entry, left: int) -> Tensor:
        """A window whose copies have ended."""
        self._mark()
        free, self._used = self._used, self._using
        size = min(self._nbytes // entry.dtype.itemsize, left) * entry.dtype.itemsize
        if free is None or len(free[0]) < size:
            free = self._allocate(size), None
        elif free[1] is not None:
            free[1].synchronize()
        self._using = free
        return free[0][:size].view(entry.dtype)

    def end(self) -> None:
        """Waits for all copies."""
        self._mark()
        for window in (self._used, self._using):
            if window is not None:
                window[1].synchronize()

    def _mark(self) -> None:
        if self._using is not None:
            event = self._streams.event()
            event.record(self._streams.current())
            self._using = self._using[0], event


def windows_of(device: torch.device) -> Windows:
    """The windows through which elements go to `device`."""
    return Windows() if device.type == "cpu" else PinnedWindows(CudaStreams(device))


def _parts(
    file: FileIO, entry: Entry, runs: Iterable[Overlap], windows: Windows
) -> Iterator[tuple[int, Tensor]]:
    """Yields (offset in the wanted piece, values) until all elements of `runs` are read.

    One read fetches a window of elements, which serves many short runs.
    """
    total = prod(entry.shape)
    first, window = 0, torch.empty(0, dtype=entry.dtype)
    for run in runs:
        there, here, end = run.there, run.here, run.there + run.length
        while there < end:
            if not first <= there < first + len(window):
                first = there
                window = windows.next(entry, total - there)
                read_into(file, entry, first=first, out=window)
            part = window[there - first : end - first]
            yield here, part
            there, here = there + len(part), here + len(part)


def _same(entry: Entry, item: Stored) -> bool:
    """Whether a file's entry has as many elements as the index records, in the same dtype."""
    return prod(entry.shape) == item.piece.elements and entry.dtype == getattr(torch, item.dtype)


def _verify_file(path: Path, file: File, items: list[Stored]) -> Iterator[str]:
    if kind_of(path) != "file":
        yield f"{file.name} is missing" + (f", which {file.host} wrote" if file.host else "")
        return
    if (size := path.stat().st_size) != file.bytes:
        yield f"{file.name} has {size} bytes instead of {file.bytes}"
        return
    try:
        header = read_header(path)
    except UserError:
        yield f"the header of {file.name} is damaged"
        return
    if header.crc32 != file.header_crc32 or {*header.entries} != {item.entry for item in items}:
        yield f"the header of {file.name} is damaged"
        return
    with path.open("rb", buffering=0) as stream:
        for item in items:
            if not _same(header.entries[item.entry], item):
                yield f"{item.entry} in {file.name} is not what the index says"
            elif checksum(stream, header.entries[item.entry]) != item.crc32:
                yield f"{item.entry} in {file.name} is damaged"


# -- choosing one --------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in the folder `path`.

    Raises UserError when its index is missing or damaged, or when the step in the index differs
    from that in the folder's name: such a folder was copied or renamed.
    """
    index = decode(read_index(path), str(path / INDEX))
    named = step_of(path)
    if named is not None and named != index.step:
        original = step_folder(path.parent, index.step).name
        raise UserError(f"{path} holds step {index.step}; rename it to {original}, or remove it")
    return Checkpoint(path, index)


def read_index(path: Path) -> bytes:
    """The index of a checkpoint, as it is written. Raises UserError when it cannot be read."""
    file = path / INDEX
    if kind_of(file) == "does not exist":
        raise UserError(f"{file} is missing; {path} is not a whole checkpoint")
    try:
        return read_file(file, LARGEST_INDEX)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; use another checkpoint") from error


def newest(folder: Path, say: Callable[[str], None], *, parts: bool = False) -> Checkpoint | None:
    """The newest checkpoint in `folder` whose checksums are correct, or None. With `parts`, also
    one of which other hosts have files; it is not read then.

    Each newer one that is damaged is skipped, and `say` is called with a sentence that gives the
    reason.
    """
    for step in reversed(numbered(folder)):
        path = step_folder(folder, step)
        try:
            checkpoint = open_checkpoint(path)
            problems = [] if parts and checkpoint.lacks() else checkpoint.verify()
        except (UserError, OSError) as error:
            problems = [str(error)]
        if not problems:
            return checkpoint
        say(f"the checkpoint {path} is passed over: {problems[0]}")
    return None


def best(folder: Path) -> Checkpoint | None:
    """The checkpoint that is marked as best, or None when none is. Its checksums are checked.

    Raises UserError when it is damaged or missing.
    """
    step = best_step(folder)
    if step is None:
        return None
    checkpoint = open_checkpoint(step_folder(folder, step))
    for problem in checkpoint.verify():
        raise UserError(f"the best checkpoint {checkpoint.path} is damaged: {problem}")
    return checkpoint
