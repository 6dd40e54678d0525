"""Predicted bytes: by hand, in sum, as counted in a real run, and as the kernel saw them.

Three tables must agree. The simulator predicts what a rank sends; `comm` counts it where the
transport is told to send; the kernel counts what crossed the loopback interface. The first two
agree to the byte. The third is larger by TCP's headers and acknowledgements, and by whatever
else this machine says to itself meanwhile, so it may exceed them by 5 %, and never fall below.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.plan.flat import Buffer
from howdah.plan.layout import Layout
from howdah.sim.traffic import SCALAR_BYTES, SCALARS, Traffic, step_traffic

LENGTHS = (1, 2, 3, 5, 17, 1009)  # none divides by 2, 3 and 4 alike
DEVICES = Path("/proc/net/dev")
MIB = 2**20


def buffers(*lengths):
    return [Buffer(f"unit{number}", (), 0, length) for number, length in enumerate(lengths)]


def test_one_process_sends_nothing():
    assert step_traffic(Layout(1), buffers(*LENGTHS), rank=0, element_bytes=4) == {}


def test_an_example_by_hand():
    """Ten elements on three ranks are shares of 3, 3 and 4."""
    sent = [step_traffic(Layout(3), buffers(10), rank=rank, element_bytes=4) for rank in range(3)]
    assert [s[Traffic("dp", "reduce_scatter", "tcp")] for s in sent] == [28, 28, 24]
    assert [s[Traffic("dp", "all_gather", "tcp")] for s in sent] == [24, 24, 32]
    assert [s[Traffic("dp", "scalars", "tcp")] for s in sent] == [48, 48, 48]


def test_the_link_is_part_of_the_row():
    (row, *_) = step_traffic(Layout(2), buffers(4), rank=0, element_bytes=4, link="shared")
    assert row == Traffic("dp", "reduce_scatter", "shared")


@given(st.lists(st.integers(0, 10_000), max_size=6), st.integers(2, 70), st.sampled_from([2, 4, 8]))
def test_all_ranks_together_send_what_the_formulas_say(lengths, ranks, width):
    """2Ψwf per rank on average: Ψw(N-1) for each half over all N ranks."""
    total = dict.fromkeys(("reduce_scatter", "all_gather", "scalars"), 0)
    for rank in range(ranks):
        sent = step_traffic(Layout(ranks), buffers(*lengths), rank=rank, element_bytes=width)
        for row, count in sent.items():
            total[row.operation] += count
    half = (ranks - 1) * sum(lengths) * width
    assert total["reduce_scatter"] == total["all_gather"] == half
    assert total["scalars"] == ranks * (ranks - 1) * SCALARS * SCALAR_BYTES


def one_step(transport, lengths, dtype):
    """The calls of a training step, on buffers of these lengths; the bytes counted."""
    counters = Counters()
    group = Group(transport, axis="dp", counters=counters)
    group.sum_scalars([100.0, 0.0])
    group.all_reduce_async([torch.ones(length, dtype=dtype) for length in lengths]).result()
    group.sum_scalars([5.0])
    group.close()
    return counters.sent()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_predicted_equals_counted(workers, ranks, dtype):
    for rank, counted in enumerate(workers.run(one_step, LENGTHS, dtype, ranks=ranks)):
        predicted = step_traffic(
            Layout(ranks), buffers(*LENGTHS), rank=rank, element_bytes=dtype.itemsize
        )
        assert {row: count for row, count in predicted.items() if count} == counted


def crossed_loopback():
    """Bytes that the loopback interface has transmitted since the machine started."""
    for line in DEVICES.read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == "lo":
            return int(columns.split()[8])
    pytest.skip("there is no loopback interface")


@pytest.mark.skipif(not DEVICES.exists(), reason="only Linux counts bytes in /proc/net/dev")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernel_counts_the_same_bytes(workers, ranks):
    """Some 50 MiB cross the interface. What others send at the same time only adds to its
    count, so the best of a few tries is judged.
    """
    lengths = (24 * MIB // 4 // (ranks - 1) + 1, 1009)
    layout, excess = Layout(ranks), []
    predicted = sum(
        sum(step_traffic(layout, buffers(*lengths), rank=rank, element_bytes=4).values())
        for rank in range(ranks)
    )
    assert predicted > 45 * MIB
    for _ in range(5):
        before = crossed_loopback()
        counted = workers.run(one_step, lengths, torch.float32, ranks=ranks)
        crossed = crossed_loopback() - before
        assert sum(sum(sent.values()) for sent in counted) == predicted
        assert crossed >= predicted
        excess.append(crossed / predicted - 1)
        if excess[-1] < 0.05:
            return
    pytest.fail(f"the interface carried {min(excess):.1%} more than was predicted, at best")
