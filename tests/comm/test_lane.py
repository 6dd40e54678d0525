"""Lanes: their two edges, on streams that are played on the CPU (`played_streams.py`)."""

import pytest
import torch
from flight import Race
from played_streams import Played

from howdah.comm.lane import Landing, Lane, Streams
from howdah.comm.transport import PeerLost


def doubled(played, lane, x, **how):
    """An operation on the lane that doubles x."""

    def work():
        x.mul_(2)

    return lane.start(work, [x], **how)


def test_work_on_a_lane_comes_between_what_is_before_its_start_and_after_its_result():
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    with played.checked():
        x.add_(1)
        handle = doubled(played, lane, x)
        handle.result()
        x.add_(1)
    assert x.tolist() == [5.0] * 3


def test_without_result_the_compute_stream_is_not_behind_the_lane():
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    with played.checked():
        doubled(played, lane, x)
        with pytest.raises(Race, match=r"aten::add_ on compute touches what aten::mul_ on lane 1"):
            x.add_(1)


def test_without_its_start_a_lane_is_not_behind_the_compute_stream(monkeypatch):
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    monkeypatch.setattr(type(lane._stream), "wait_stream", lambda *_: None)
    with played.checked():
        x.add_(1)
        with pytest.raises(Race, match=r"aten::mul_ on lane 1 touches what aten::add_ on compute"):
            doubled(played, lane, x)


def test_an_operation_follows_one_of_another_lane():
    played = Played()
    one, other, x = Lane(played), Lane(played), torch.ones(3)
    with played.checked():
        first = doubled(played, one, x)
        doubled(played, other, x, after=first).result()
        x.add_(1)
    assert x.tolist() == [5.0] * 3


def test_two_lanes_are_not_in_order_by_themselves():
    played = Played()
    one, other, x = Lane(played), Lane(played), torch.ones(3)
    with played.checked():
        doubled(played, one, x)
        with pytest.raises(Race, match="on lane 2 touches what aten::mul_ on lane 1"):
            doubled(played, other, x)


def test_a_handle_holds_its_tensors_until_its_result():
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    handle = doubled(played, lane, x)
    assert handle._held[0] is x
    handle.result()
    assert not handle._held


def test_marks_of_a_lane_tell_the_seconds_between_its_ends():
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    handle = doubled(played, lane, x)
    ends = []
    handle.then(ends.append)
    assert ends == [handle.ended]
    assert lane.clock.seconds(handle.began, handle.ended) >= 0


def test_the_oldest_operation_that_has_not_ended_is_known():
    played = Played()
    lane, x = Lane(played), torch.ones(3)
    ended, running = doubled(played, lane, x), doubled(played, lane, x, site="net.py:7")
    running.ended = Pending()
    assert ended.done() and lane.oldest() is running and running.site == "net.py:7"


class Pending:
    """An event that the GPU has not reached."""

    def query(self):
        return False


def test_a_lane_of_an_aborted_wire_raises_its_error():
    def check():
        raise PeerLost("rank 1 ended")

    played = Played()
    lane = Lane(played, check=check)
    with pytest.raises(PeerLost, match="rank 1 ended"):
        doubled(played, lane, torch.ones(3))


def test_the_doubles_have_the_interface_of_cuda():
    from howdah.comm.lane import CudaStreams

    names = {name for name in vars(Streams) if not name.startswith("_")}
    assert all(hasattr(kind, name) for kind in (CudaStreams, Played) for name in names)
    assert {"result", "then", "done"} <= set(vars(Landing))
