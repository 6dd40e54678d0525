"""A rank of several machines that stops beating is named by the one that watches it."""

from threading import Event

import pytest
import torch.distributed as dist

from howdah.comm import pulse, watch
from howdah.comm.meeting import meet, own_hello
from howdah.comm.pulse import EVERY, SILENT, Pulse
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience


class Told:
    """Stands where transports do: the sentence it is told."""

    said = ""

    def lose(self, said):
        self.said = said


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test lets pass."""
    now = [0.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[0])
    return now


def pulses(size):
    store = dist.HashStore()
    return [Pulse(store, rank=rank, size=size) for rank in range(size)]


def rounds(clock, ranks, seconds):
    """The ranks beat for so long; the last sentence of each."""
    said = []
    for _ in range(round(seconds / EVERY)):
        clock[0] += EVERY
        said = [one.look() for one in ranks]
    return said


def test_ranks_that_beat_are_not_missed(clock):
    assert rounds(clock, pulses(3), 10 * SILENT) == ["", "", ""]


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_the_one_that_stops_is_named_to_all(clock, silent):
    ranks = pulses(3)
    rounds(clock, ranks, 20)
    others = [one for rank, one in enumerate(ranks) if rank != silent]
    assert rounds(clock, others, SILENT - 2 * EVERY) == ["", ""]
    rounds(clock, others, 3 * EVERY)  # who is told may have looked just before
    first, second = rounds(clock, others, EVERY)
    assert first == second
    assert first == (
        f"rank {silent} has not been heard of for 20 s, as rank {(silent - 1) % 3} saw: it is "
        "stopped, or its machine is"
    )


def test_who_waits_for_a_meeting_is_told_too(clock):
    """The others of a group that is joined later, as by stages of a pipeline, may be gone."""
    ranks, store = pulses(3), dist.HashStore()
    rounds(clock, ranks, 20)
    ranks[1].heed()
    rounds(clock, [ranks[0], ranks[2]], SILENT + 2 * EVERY)
    for one in (ranks[0], ranks[2]):
        with pytest.raises(PeerLost, match="rank 1 has not been heard of for 20 s, as rank 0 saw"):
            meet(store, own_hello("torch"), rank=0, size=2, seconds=600, heed=one.heed)
        with pytest.raises(PeerLost, match="rank 1 has not been heard of"):
            Patience(600, every=0.1, heed=one.heed).look()


def test_a_rank_that_never_came_to_beat_is_named_too(clock):
    (alone, _) = pulses(2)
    assert rounds(clock, [alone], SILENT + 2 * EVERY) != [""]


def test_the_silence_of_ones_own_suspension_does_not_count(clock):
    """All were suspended for an hour; whoever wakes up first would name the next one."""
    ranks = pulses(2)
    rounds(clock, ranks, 20)
    clock[0] += 3600
    assert ranks[0].look() == ""
    assert rounds(clock, ranks, 2 * SILENT) == ["", ""]


def test_a_rank_that_has_closed_is_not_missed(clock, monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    stays, leaves = pulses(2)
    leaves.start()
    leaves.close()
    assert rounds(clock, [stays], 10 * SILENT) == [""]


def test_behind_a_rank_that_has_closed_the_next_one_is_watched(clock):
    """So a rank that stops is named though the one that watched it has gone."""
    ranks = pulses(4)
    rounds(clock, ranks, 20)
    for gone in (1, 2):
        ranks[gone].start()
        ranks[gone].close()
    rounds(clock, [ranks[0], ranks[3]], 20)
    said = rounds(clock, [ranks[0]], SILENT + 2 * EVERY)
    assert said[0].startswith("rank 3 has not been heard of for 20 s, as rank 0 saw")
    (last, *others) = pulses(3)
    for one in others:
        one.start()
        one.close()
    assert rounds(clock, [last], 10 * SILENT) == [""], "nobody is left"


def test_who_sees_a_connection_end_asks_for_the_cause_at_once(monkeypatch):
    """With nothing to wait for but the store: the thread would look in ten minutes."""
    monkeypatch.setattr(pulse, "EVERY", 600)
    monkeypatch.setattr(pulse, "ANSWER", 600)
    one, other = pulses(2)
    assert one.cause("rank 3 ended") == "rank 3 ended", "it does not run yet"
    one.start()
    other._store.set("lost", "rank 2 is stopped")
    assert one.cause("rank 3 ended") == one.cause("rank 4 ended") == "rank 2 is stopped"
    one._thread.join()


def test_all_name_who_was_lost_first(monkeypatch):
    """Rank 1 has lost rank 2, and ends in the middle of a frame: rank 0 sees no more than that."""
    monkeypatch.setattr(pulse, "EVERY", 600)
    monkeypatch.setattr(pulse, "ANSWER", 600)
    zero, one = pulses(2)
    for each in (zero, one):
        each.start()
    assert one.cause("rank 2 died, as rank 1 saw") == "rank 2 died, as rank 1 saw"
    assert zero.cause("rank 1 ended, as rank 0 saw") == "rank 2 died, as rank 1 saw"
    assert zero._lost == "", "whether others still can go on is theirs to find"
    for each in (zero, one):
        each.close()


def test_no_free_descriptor_does_not_end_the_thread(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 600)
    monkeypatch.setattr(pulse, "ANSWER", 600)

    def none_free(*_, **__):
        raise OSError("Too many open files")

    monkeypatch.setattr(pulse, "ease", none_free)
    one, _ = pulses(2)
    one.start()
    assert one.cause("rank 1 ended") == one.cause("rank 7 ended") == "rank 1 ended"
    assert one._thread.is_alive()
    one.close()


def test_rank_0_keeps_the_store_until_all_others_have_read_who_was_lost(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    monkeypatch.setattr(pulse, "STAYS", 600)
    keeps, reads, _ = pulses(3)  # the third is the one that is stopped
    told = Told()
    keeps.tell(told)
    keeps._store.set("lost", "rank 2 is stopped")
    keeps.start()
    while not told.said:
        keeps._thread.join(0.001)
    keeps._thread.join(0.2)
    assert keeps._thread.is_alive()
    reads.start()
    for one in (reads, keeps):
        one._thread.join()


def test_rank_0_does_not_stay_for_those_that_have_left(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    monkeypatch.setattr(pulse, "STAYS", 600)
    keeps, leaves, _ = pulses(3)  # the third is the one that is stopped
    leaves.start()
    leaves.close()
    keeps._store.set("lost", "rank 2 is stopped")
    keeps.start()
    keeps._thread.join()


def test_of_two_that_are_lost_at_once_all_are_told_of_the_same_one():
    first, _, second, _ = pulses(4)
    said = first._say()
    assert said.startswith("rank 1 has") and second._say() == second._lost == said


@pytest.mark.parametrize("kept", [True, False])
def test_a_store_that_answers_no_more_is_that_of_a_stopped_rank_0(monkeypatch, kept):
    """Or of a launcher: its ranks may go on."""
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    monkeypatch.setattr(pulse, "SILENT", 0.05)
    answers = Event()
    monkeypatch.setattr(Pulse, "look", lambda self: answers.wait() and "")
    monkeypatch.setattr(pulse, "hang_up", lambda names: answers.set())
    one, told = Pulse(dist.HashStore(), rank=1, size=2, kept=kept), Told()
    one.tell(told)
    one.start()
    one._second.join()
    assert told.said.startswith("rank 0, which keeps the store of the run" if kept else "")
    assert bool(told.said) is kept and answers.is_set() is kept
    one.close()
    one._thread.join()


def test_a_store_that_has_gone_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 600)
    monkeypatch.setattr(pulse, "ANSWER", 600)

    def gone(self):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Pulse, "look", gone)
    (one, _) = pulses(2)
    one.start()
    assert one.cause("rank 1 ended") == "rank 1 ended"
    assert one.cause("rank 7 ended") == "rank 7 ended"


def test_transports_are_told_once_and_not_kept(monkeypatch):
    """The thread ends with it."""
    monkeypatch.setattr(pulse, "EVERY", 0.001)
    monkeypatch.setattr(Pulse, "look", lambda self: "rank 1 is lost")
    (one, _) = pulses(2)
    stays, let_go = Told(), Told()
    one.tell(stays)
    one.tell(let_go)
    del let_go
    assert len(one._told) == 1
    one.start()
    one._thread.join()
    assert stays.said == "rank 1 is lost"


def test_a_store_that_has_gone_ends_the_thread_and_nothing_else(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY", 0.001)

    def gone(self):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Pulse, "look", gone)
    (one, _) = pulses(2)
    told = Told()
    one.tell(told)
    one.start()
    one._thread.join()
    assert told.said == ""
    one.close()
