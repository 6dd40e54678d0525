"""Numbers of steps: on the way to the host, over the ranks, and when they are reported."""

from unittest.mock import patch

import pytest
import torch
from logged_streams import LoggedStreams

from howdah.comm.group import Group
from howdah.comm.lane import streams_of
from howdah.comm.transport import PeerLost, SingleRank
from howdah.plan.recording import Traffic
from howdah.train import tell as telling
from howdah.train.tell import Untold, over_ranks, steps_late, tell

ALONE = Group(SingleRank())


def test_the_cpu_tells_at_once_and_a_gpu_one_step_late():
    assert [steps_late(torch.device(kind)) for kind in ("cpu", "cuda")] == [0, 1]
    assert streams_of(torch.device("cpu")) is None
    told = tell(torch.tensor([2.5, 4.0], dtype=torch.float64), ALONE, streams=None)
    assert told.values() == [2.5, 4.0]


def test_numbers_of_a_gpu_wait_for_their_copy_and_keep_its_memory():
    streams, kept = LoggedStreams(), object()
    values = torch.tensor([2.5, 4.0], dtype=torch.float64)
    with patch.object(telling, "pinned_like", torch.empty_like):
        told = tell(values, ALONE, streams=streams, keep=kept)
    assert streams.log == ["event 0 on compute"]  # nothing waits yet
    assert told._keep is kept
    assert told.values() == [2.5, 4.0]
    assert streams.log == ["event 0 on compute", "the host waits for event 0"]
    assert told._keep is None and told.values() == [2.5, 4.0]
    assert len(streams.log) == 2  # once


@pytest.mark.parametrize("late", [0, 1, 2])
def test_reports_come_in_order_and_late(late):
    seen, untold = [], Untold(late)
    for step in range(5):
        untold.add(lambda step=step: seen.append(step))
        assert seen == list(range(max(step + 1 - late, 0)))
    untold.settle()
    assert seen == [0, 1, 2, 3, 4]
    untold.settle()
    assert seen == [0, 1, 2, 3, 4]


VALUES = [0.1, 1e-17, 3.0e8]


def sums_both_ways(transport):
    """For workers: sums through the host; those of an all-gather of scalars; the bytes of each."""
    group = Group(transport, axis="world")
    mine = torch.tensor([value * (group.rank + 1) / 3 for value in VALUES], dtype=torch.float64)
    through_host = over_ranks(group, mine)
    before = group.counters.sent()
    every = mine.new_empty(group.size, len(mine))
    group.gather_scalars(every, mine, async_op=True).result()
    gathered = sum(every.unbind())
    sent = [group.counters.sent()[row] - before[row] for row in before]
    group.close()
    return torch.equal(through_host, gathered), [*before.items()], sent


def test_both_ways_over_the_ranks_have_equal_bits_and_bytes(workers):
    for equal, before, sent in workers.run(sums_both_ways, ranks=3):
        ((row, count),) = before
        assert equal and row == Traffic("world", "scalars", row.link)
        assert sent == [count] == [3 * 8 * 2]


def test_one_rank_sums_alone():
    values = torch.tensor(VALUES, dtype=torch.float64)
    assert torch.equal(over_ranks(ALONE, values), values)


def test_a_host_that_waited_hears_that_a_rank_was_lost():
    """Its GPU has stopped, and what it had computed until then is no number of a step."""
    with (
        patch.object(telling, "pinned_like", torch.empty_like),
        patch.object(ALONE, "check", side_effect=PeerLost("rank 1 ended")),
    ):
        told = tell(torch.zeros(2), ALONE, streams=LoggedStreams())
        with pytest.raises(PeerLost, match="rank 1 ended"):
            told.values()
