"""The TCP transport between hosts of a box: what is killed, stopped, cut or slowed is told by name,
nothing wrong is computed, and nothing is left behind. Bytes are those that the cards count.

How long each takes to be told is printed, and decides nothing.
"""

import os
import re
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]

# by its link; or by the pulse, where its kernel had no room for more when the link failed
GONE = "( does not answer| ended, or its link| has not been heard of|, which keeps the store)"


@pytest.fixture
def ranks(box, modules):
    """Ranks in a box of two hosts: each of them has ended, before the end of the box would kill it,
    and left no file (test_box.py looks for all else).
    """
    (looping,) = modules("looping")

    @contextmanager
    def make(hosts=2, profile="flat-1g", **how):
        with ExitStack() as stack, box(profile, hosts) as made:
            before = looping.files_on(made, range(hosts))
            found = looping.Ranks(made, stack, **how)
            yield found
            found.ended(range(len(found.runs)))
            after = looping.files_on(made, range(hosts))
            assert not [
                sorted(after[host] - before[host]) for host in after if after[host] - before[host]
            ]

    return make


def told(ranks, losers, pattern, since):
    """Each of these ranks has said that another one is lost; how long it took is printed."""
    for rank in losers:
        said = ranks.hear(rank)
        print(f"rank {rank} said after {time.monotonic() - since:.3f} s: {said}")
        assert re.search(pattern, said), said


@pytest.mark.parametrize("words", ["", "hierarchical pieces=2 to 64 MB, default"])
def test_a_killed_rank_is_told_to_all(ranks, words):
    with ranks(each=2, words=words) as made:
        victim, since = made.process(3), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        told(made, [0, 1, 2], r"rank 3 (\(process \d+\) )?(ended, or its link is down|died)", since)


def test_a_killed_host_is_told(ranks):
    """Its network goes with it: nobody answers any more."""
    with ranks(hosts=3) as made:
        since = time.monotonic()
        made.box.end(2)
        # the first tells the other
        told(made, [0, 1], rf"^lost (rank \d gave up: )?rank 2{GONE}", since)


def test_a_rank_that_is_stopped_for_a_second_goes_on(ranks):
    with ranks() as made:
        process = made.process(1)
        os.kill(process, signal.SIGSTOP)
        time.sleep(1)
        os.kill(process, signal.SIGCONT)
        assert made.finish() > 0


def test_a_rank_that_is_stopped_for_good_is_told(ranks):
    with ranks() as made:
        process, since = made.process(1), time.monotonic()
        os.kill(process, signal.SIGSTOP)
        told(made, [0], "^lost rank 1 (has not been heard of for 20 s|does not answer)", since)
        os.kill(process, signal.SIGCONT)
        # by the end of its connection, or by what rank 0 said before
        told(made, [1], "^lost rank (0|1 has not been heard of for 20 s, as rank 0 saw)", since)


def test_a_link_that_is_cut_for_two_seconds_loses_nothing(ranks):
    with ranks() as made:
        made.box.unplug(1)
        time.sleep(2)
        made.box.plug(1)
        assert made.finish() > 0


@pytest.mark.parametrize("seconds", [30, None])
def test_a_link_that_is_cut_for_long_is_told(ranks, seconds):
    with ranks() as made:
        made.box.unplug(1)
        since = time.monotonic()
        told(made, [0, 1], f"^lost rank [01]{GONE}", since)
        if seconds:
            time.sleep(max(seconds - (time.monotonic() - since), 0))
            made.box.plug(1)
        assert [run.wait(120) for run in made.runs] == [0, 0]


def test_a_link_that_is_cut_in_one_direction_is_told(ranks):
    """Host 1 hears all, and what it says is dropped: to host 0 it looks dead, and the other way."""
    with ranks() as made:
        made.box.mute(1)
        since = time.monotonic()
        told(made, [0, 1], f"^lost rank [01]{GONE}", since)


def test_a_link_that_is_slow_changes_no_bit(ranks):
    with ranks() as made:
        for host in (0, 1):
            # a packet of 64 KiB that waits already would never pass a smaller bucket
            shaped = "root tbf rate 10mbit burst 128kb latency 400ms"
            made.box.tc(host, f"qdisc replace dev eth0 {shaped}")
        time.sleep(3)
        assert made.finish() > 0


def test_a_slow_link_of_four_hosts_is_named_by_the_rank_that_sends_on_it(ranks):
    """What host1 sends to host3 alone is slow; the run goes on."""
    with ranks(hosts=4, elements=1 << 21) as made:
        for line in (
            "qdisc replace dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb rate 1gbit burst 128k",
            "class add dev eth0 parent 1: classid 1:2 htb rate 50mbit burst 32k",
            "filter add dev eth0 parent 1: protocol ip u32 match ip dst 10.77.0.4/32 flowid 1:2",
        ):
            made.box.tc(1, line)
        said = made.hear(1, "the link")
        print(said)
        assert said.startswith("the link from rank 1 to rank 3 delivers ")
        assert made.finish() > 0


def test_each_byte_crosses_a_card_once(ranks):
    """2 hosts of 2 ranks: an all-reduce of n bytes sends n from each card; n, not 1.5 or 3."""
    elements = 1 << 20
    with ranks(each=2, elements=elements, words="hierarchical pieces=4 to 64 MB, default") as made:
        before, first = [made.box.sent(host) for host in (0, 1)], time.monotonic()
        time.sleep(3)
        calls = made.finish() + 1
        for host in (0, 1):
            sent = made.box.sent(host) - before[host]
            # The calls were counted from a little before, and so were their bytes.
            assert sent < 1.1 * 4 * elements * calls, (sent, calls, time.monotonic() - first)
