"""Waits of computation for other ranks, as a mesh notes them."""

import torch

from howdah.comm.transport import SingleRank
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import parse_layout
from howdah.plan.recording import IDLE


def test_waits_for_other_ranks_are_in_the_trace_of_a_step():
    """What waits in a pass of tp or zero3 was drawn as computing."""
    mesh = connect_mesh(parse_layout("dp1"), SingleRank(), torch.device("cpu"))
    with mesh.waited:
        pass
    with mesh.counters.recorder.step(1), mesh.waited:
        torch.ones(1)
    mesh.close()
    (step,) = mesh.counters.recorder.steps
    ((axis, operation, sent, start, end),) = step.calls
    assert (axis, operation, sent) == ("ranks", IDLE, 0)
    assert 0 <= start <= end and end - start <= mesh.waited.seconds
