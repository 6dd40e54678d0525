"""Snapshots: on a lane or at once, in bounded memory, and the files that they end in."""

from contextlib import closing
from threading import Event as Flag
from threading import Lock

import pytest
import torch
from flight import Race
from played_streams import Played
from sample_state import about, only, parts, silent, state

from howdah.checkpoint import load, save, snapshot
from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.load import PinnedWindows, newest, open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.checkpoint.snapshot import Snapshots
from howdah.comm.lane import Lane
from howdah.plan.boxes import whole_piece


def plain(nbytes):
    """Memory that nobody has written: NaN in every dtype of a checkpoint."""
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


class LateLane(Lane):
    """Does its work when it is waited for: by the host, or by the compute stream."""

    def start(self, work, tensors, **how):
        landing = super().start(lambda: None, tensors, **how)
        landing.ended, landing.left, self._one = self, [work], Lock()
        self.last = landing
        return landing

    def synchronize(self):
        with self._one:  # who comes while another does the work waits for it
            while self.last.left:
                self.last.left.pop()()

    def query(self):
        return not self.last.left

    @property
    def seen(self):  # what a stream asks of an event that it waits for
        return {}


def saver_of(folder, snapshots=None, said=silent):
    return Saver(folder, rank=0, world=1, keep=9, say=said, snapshots=snapshots)


def files(folder, step):
    """The bytes of all files of a checkpoint."""
    return {path.name: path.read_bytes() for path in step_folder(folder, step).iterdir()}


def entries_of(tensors):
    return parts({key: tensor.clone() for key, tensor in tensors.items()}, 1)[0]


def late(monkeypatch):
    monkeypatch.setattr(snapshot, "Lane", LateLane)
    return Snapshots(streams=Played(), allocate=plain)


@pytest.mark.parametrize("first", ["thread", "update"])
def test_a_snapshot_of_a_gpu_has_the_bits_of_a_blocking_save(tmp_path, monkeypatch, first):
    """The thread waits for the copies, and so does an update, whichever comes first."""
    snapshots = late(monkeypatch)
    for step in (1, 2):  # the second in the memory of the first
        tensors, saver = state(seed=step), saver_of(tmp_path / "a", snapshots)
        with monkeypatch.context() as held_back, closing(Held()) as held:
            held_back.setattr(save, "write_part", held.back(save.write_part))
            entries = entries_of(tensors)
            saver.save(step=step, entries=entries, about=about())
            if first == "thread":
                held.close()
                saver.wait()
            snapshots.settle()
            assert snapshots._lane.query()
            for _, _, tensor in entries:
                tensor.fill_(99.0)  # the update
        saver.wait()
        whole = saver_of(tmp_path / "b")
        whole.save(step=step, entries=entries_of(tensors), about=about(), beside=False)
        whole.wait()
        assert files(tmp_path / "a", step) == files(tmp_path / "b", step)


class Held:
    """Holds a function back until it is closed."""

    def __init__(self):
        self._flag = Flag()
        self.close = self._flag.set

    def back(self, function):
        return lambda *args, **rest: self._flag.wait() and function(*args, **rest)


def test_an_update_that_does_not_wait_for_the_copies_is_a_race():
    played, (entries,) = Played(), parts(state(), 1)
    snapshots = Snapshots(streams=played, allocate=plain)
    with played.checked():
        snapshots.take(entries, apart=True)
        with pytest.raises(Race, match=r"aten::add_ on compute touches what aten::copy_ on lane 1"):
            entries[0][2].add_(1)
        entries[0][2].clone()  # forward and backward only read
        snapshots.settle()
        entries[0][2].add_(1)


# -- memory --------------------------------------------------------------------


def test_what_does_not_fit_is_written_before_training_goes_on(tmp_path):
    (entries,) = parts(state(), 1)
    taken = sum(tensor.nbytes for _, _, tensor in entries)
    for room in (taken - 1, taken):
        said, folder = [], tmp_path / str(room)
        snapshots = Snapshots(room)
        saver = saver_of(folder, snapshots, said.append)
        for step in (1, 2):
            saver.save(step=step, entries=entries, about=about())
            assert room == taken or saver._written.is_set()
        saver.wait()
        assert bool(snapshots._buffers) == (room == taken)
        assert len(said) == (room < taken)
        assert all(
            "a copy would take 336 B of the host's memory, 335 B are left" in x for x in said
        )
    assert files(tmp_path / str(taken), 2) == files(tmp_path / str(taken - 1), 2)


def test_nobody_copies_for_a_save_that_is_waited_for(tmp_path):
    snapshots, (entries,) = Snapshots(), parts(state(), 1)
    saver = saver_of(tmp_path, snapshots)
    saver.save(step=1, entries=entries, about=about(), beside=False)
    assert saver.part()
    assert not snapshots._buffers
    saver.wait()
    assert only(tmp_path) == ["step-00000001"]


def test_a_blocking_save_that_fails_returns_too(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    saver = saver_of(tmp_path / "file" / "checkpoints", said=said.append)
    saver.save(step=1, entries=parts(state(), 1)[0], about=about(), beside=False)
    saver.wait()
    assert said == [
        f"the checkpoint of step 1 was not saved: {saver.failed}; older ones are untouched"
    ]


def test_pinned_memory_counts_as_torch_takes_it():
    entries = [("weight", whole_piece("w", (n,)), torch.zeros(n)) for n in (0, 1, 5, 16)]
    assert Snapshots().size(entries) == 4 * 22
    pinned = Snapshots(streams=Played(), allocate=plain, on_card=lambda x: True)
    assert pinned.size(entries) == 4 + 32 + 64


# -- windows -------------------------------------------------------------------


class Logged:
    """An event that tells when it is waited for."""

    def __init__(self, log):
        self._log = log

    def record(self, stream):
        self.number = len([row for row in self._log if row[0] == "record"])
        self._log.append(("record", self.number))

    def synchronize(self):
        self._log.append(("wait", self.number))


def test_a_window_is_read_into_when_its_copies_have_ended(tmp_path, monkeypatch):
    """A checkpoint in windows of three elements, two in turn."""
    tensors, log, made = state(), [], []
    saver = saver_of(tmp_path)
    saver.save(step=1, entries=parts(tensors, 1)[0], about=about())
    saver.wait()
    played = Played()
    monkeypatch.setattr(played, "event", lambda: Logged(log))
    read = load.read_into

    def reading(file, entry, *, first, out):
        log.append(("read", out.data_ptr()))
        read(file, entry, first=first, out=out)

    monkeypatch.setattr(load, "read_into", reading)
    windows = PinnedWindows(played, lambda n: made.append(plain(n)) or made[-1], nbytes=12)
    monkeypatch.setattr(load, "windows_of", lambda device: windows)
    out = torch.empty(35)
    newest(tmp_path, silent).read("weight", whole_piece("layers.0.q.weight", (5, 7)), out)
    assert torch.equal(out, tensors["weight", "layers.0.q.weight"].reshape(-1))
    assert len(made) == 2
    reads = [row[1] for row in log if row[0] == "read"]
    assert reads == [made[n % 2].data_ptr() for n in range(12)]
    for number in range(10):  # window n is waited for before it is read into again
        waited = log.index(("wait", number))
        assert waited < [n for n, row in enumerate(log) if row[0] == "read"][number + 2]
    assert log[-2:] == [("wait", 10), ("wait", 11)]  # nothing is on its way at the end


def test_windows_grow_for_a_larger_entry(tmp_path):
    saver = saver_of(tmp_path)
    tensors = state({"a": (2,), "b": (50,), "c": (3,)}, dtype=torch.float64)
    saver.save(step=1, entries=parts(tensors, 1)[0], about=about())
    saver.wait()
    checkpoint, windows = open_checkpoint(step_folder(tmp_path, 1)), PinnedWindows(Played(), plain)
    for name in "abc":
        (item,) = checkpoint._find("weight", name)
        assert len(windows.next(checkpoint._entry(item), 50)) == 50
