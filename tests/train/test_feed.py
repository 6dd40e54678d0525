"""Micro-batches on their way to a device, and what ranks exchange before a step."""

from contextlib import nullcontext
from threading import Event, Lock
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flight import Race
from logged_streams import LoggedStreams
from played_streams import Played, PlayedBoth

from howdah.comm.transport import OneLink
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import MASKED
from howdah.plan.layout import parse_layout
from howdah.text.batches import Micro
from howdah.text.prefetch import Prefetch
from howdah.train import feed
from howdah.train.feed import Counts, Fed, Feeder, Supply, feeder_of, on_device, with_noise
from howdah.train.step import count_tokens

CPU, META = torch.device("cpu"), torch.device("meta")


def micro(step=0, *, documents=1, rows=2, length=8):
    tokens = np.arange(rows * length).reshape(rows, length) + 100 * step
    at = np.arange(length)
    labels = np.where(at < step + 1, tokens, MASKED)  # step s labels s + 1 tokens of each row
    number = np.tile(at * documents // length, (rows, 1)).astype(np.int32)
    return Micro(tokens, labels, np.tile(at, (rows, 1)), number, np.arange(rows) + step)


def test_on_the_cpu_nothing_is_copied():
    given = micro(documents=2)
    fed = feeder_of(CPU)([given])
    (tensors,) = fed.tensors
    arrays = given.tokens, given.labels, given.positions, given.documents, given.samples
    found = tensors.given
    places = found.tokens, found.labels, found.positions, found.documents, tensors.samples
    for array, x in zip(arrays, places, strict=True):
        assert x.data_ptr() == array.ctypes.data
    assert (fed.ready, fed.counts) == (None, None)
    assert list(fed) == [given] and len(fed) == 1 and fed[0] is given and fed[:1] == [given]
    fed.wait(None)


def test_on_a_gpu_copies_are_made_beside_the_compute_stream_which_waits_for_them():
    streams, copied = LoggedStreams(), []

    def pinned(x):
        copied.append((x.shape, [*streams.log]))
        return x

    with patch.object(feed, "pinned", pinned):
        fed = Feeder(META, streams)([micro(documents=2), micro(documents=1)])
    made = ["inside stream 0", "event 0 on stream 0", "outside stream 0"]
    assert streams.log == made
    assert all(log == made[:1] for _, log in copied)  # pinned, and copied, inside the stream
    assert [one.given.documents is None for one in fed.tensors] == [False, True]
    assert {x.device for one in fed.tensors for x in (one.given.tokens, one.samples)} == {META}
    fed.wait(streams)
    assert streams.log == [*made, "compute waits for event 0"]


@pytest.mark.parametrize("waits", [True, False])
def test_compute_that_does_not_wait_for_its_copies_is_a_race(waits):
    """On streams that know which work lies before which (`played_streams.py`)."""
    played = Played()

    def copied(micro, device, columns):
        one = on_device(micro, device, columns)
        there = torch.empty_like(one.samples)
        return one._replace(samples=there.copy_(one.samples))

    with patch.object(feed, "on_device", copied), played.checked():
        fed = Feeder(CPU, played)([micro()])
        if waits:
            fed.wait(played)
        with nullcontext() if waits else pytest.raises(Race, match="no event is between them"):
            assert (fed.tensors[0].samples + 1).tolist() == [1, 2]


@pytest.mark.parametrize("words", ["tp2", "tp2 sp"])
def test_noise_is_on_the_device_and_of_the_positions_of_the_rank(words):
    class Region:
        sliced, slice, length = "sp" in words, (3, 8), 8

    with patch.object(feed, "pinned", lambda x: x):
        noise = with_noise(on_device(micro(), META), seed=1, step=2, region=Region()).noise
    assert noise.samples.device == META and (noise.seed, noise.step) == (1, 2)
    if Region.sliced:
        assert noise.positions.device == META and (len(noise.positions), noise.length) == (5, 8)
    else:
        assert noise.positions is noise.length is None


def supplied(transport, ahead):
    """For workers: the counts of four steps, with a request to stop on rank 1 in the third; and how
    many steps were read before each was handed out.
    """
    read, asked = [], []

    def feeding(step):
        read.append(step)
        return feeder_of(CPU)([micro(step)])

    with (
        connect_mesh(parse_layout("dp2"), transport, CPU) as mesh,
        patch.object(feed, "steps_late", lambda device: ahead),
    ):
        batches = Prefetch(feeding)
        supply = Supply(
            batches,
            mesh,
            steps=4,
            labels=count_tokens,
            asked=lambda: mesh.rank == 1 and bool(asked),
        )
        found = []
        for step in range(4):
            if step == 2:
                asked.append(True)
            batch = supply.next()
            assert isinstance(batch, Fed) and batch[0].tokens[0, 0] == 100 * step
            found.append(batch.counts)
        batches.close()
    return found


def test_counts_are_those_of_all_ranks_and_a_request_is_heard_one_step_later(workers):
    every = [Counts(4.0 * (step + 1), step == 3) for step in range(4)]
    assert workers.run(supplied, 1, ranks=2) == [every, every]


def test_without_a_delay_the_step_itself_exchanges(workers):
    assert workers.run(supplied, 0, ranks=2) == [[None] * 4] * 2


class OneAtATime(OneLink):
    """The wire of the hosts, whose operations last until another one comes in, or a moment."""

    def __init__(self, wire):
        self._wire, self._here, self._second = wire, Lock(), Event()
        self.overlapped, self.site = False, ""

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def all_gather(self, out, x, counts):
        if not self._here.acquire(blocking=False):
            self.overlapped = True
            self._second.set()
            self._here.acquire()
        self._second.wait(0.02)
        try:
            return self._wire.all_gather(out, x, counts)
        finally:
            self._here.release()


def compared(transport, path):
    """Each step's counts, beside sums on a wire of GPUs whose calls are compared one by one."""
    host, played = OneAtATime(transport), Played()
    both = PlayedBoth(host, played, path)
    both.checked, both.cards.agree = True, both.compare
    found, layout = [], parse_layout("dp2")
    with (
        patch.object(feed, "steps_late", lambda device: 1),
        played.checked(),
        connect_mesh(layout, both, CPU) as mesh,
    ):
        batches = Prefetch(lambda step: feeder_of(CPU)([micro(step)]))
        supply = Supply(batches, mesh, steps=3, labels=count_tokens, asked=lambda: False)
        for _ in range(3):
            counts = supply.next().counts  # the exchange of the next step is under way
            mesh.world.compare_calls()
            x = torch.full((4,), counts.tokens)
            mesh.world.all_reduce(x, async_op=True).result()
            mesh.world.compare_calls()
            found.append((counts.tokens, x.tolist()))
        batches.close()
    both.close()
    return found, host.overlapped


def test_the_exchange_of_a_feed_and_the_comparison_of_calls_take_turns_on_one_wire(
    workers, tmp_path
):
    expected = [(4.0 * step, [8.0 * step] * 4) for step in (1, 2, 3)]
    for found in workers.run(compared, str(tmp_path / "meet"), ranks=2):
        assert found == (expected, False)
