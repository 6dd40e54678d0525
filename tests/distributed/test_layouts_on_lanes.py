"""Whole layouts whose messages run on lanes, as on GPUs: streams are played on the CPU
(`played_streams.py`), and gloo's collectives move the data in NCCL's place.

    equal     losses, gradients and weights are those of the engine, with equal bits where no sum
              has more than two terms
    bytes     predicted are counted, on the link of the GPUs
    ordered   no two streams touch the same memory without an event between them
    breaks    a lane that does not wait, a result that is not waited for: noticed
"""

from collections import Counter
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import pytest
from in_flight import message_for_each_unit
from played_streams import Played, PlayedBoth
from small_cases import case_of

from howdah.comm.lane import Landing
from howdah.sim.traffic import step_traffic
from howdah.verify.evidence import gather

LAYOUTS = [
    "dp2 zero2 x3",
    "dp2 zero3 recompute=full x2",
    "tp2 sp x1",
    "pp2 zb-h1 x4",
    "dp2 pp2 zero1 1f1b x4",
]
MORE = [  # made of the same messages
    "dp2 x2",
    "dp2 zero1 x2",
    "dp2 zero3 x2",
    "tp2 x2",
    "pp2 1f1b x4",
    "dp2 tp2 zero2 x2",
    "dp4 zero3 shard2 x2",
]


def on_lanes(transport, case, path):
    played = Played()
    both = PlayedBoth(transport, played, path)
    with played.closing(), message_for_each_unit(), played.checked():
        return gather(both, case)


def on_engine(transport, case):
    with message_for_each_unit():
        return gather(transport, case)


def beside_links(rows, *, times):
    """The bytes that were sent, those of scalars over any link: here no GPU has loss and norm."""
    sent = Counter()
    for row, count in rows.items():
        sent[row._replace(link="any") if row.operation == "scalars" else row] += count * times
    return +sent


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)]
)
def test_a_layout_on_lanes_equals_the_engine(workers, tmp_path, words):
    case = case_of(words, precision="float32")
    ranks, path = case.layout.world, str(tmp_path / uuid4().hex)
    found = workers.run(on_lanes, case, path, ranks=ranks)
    expected = workers.run(on_engine, case, ranks=ranks)
    exact = ranks == 2
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        compare = np.testing.assert_array_equal if exact else np.testing.assert_allclose
        how = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
        compare(one.losses, other.losses, **how)
        for name in ("gradients", "parameters"):
            for weight, x in getattr(one, name).items():
                compare(x, getattr(other, name)[weight], **how)
        with message_for_each_unit():
            predicted = step_traffic(case.plan, rank, one.wires)
        sent = beside_links(one.sent, times=1)
        assert sent == beside_links(predicted, times=case.steps)
        assert {row.link for row in sent if row.operation != "scalars"} == {"played"}


# -- breaks


def broken(transport, case, path, kind):
    if kind == "result":
        patched = patch.object(Landing, "result", lambda self: None)
    else:
        patched = patch("played_streams.Stream.wait_stream", lambda *_: None)
    with patched, pytest.raises(AssertionError) as said:
        on_lanes(transport, case, path)
    transport.abort()
    return str(said.value)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("words", "kind"), [("dp2 zero2 x2", "result"), ("tp2 sp x1", "start")])
def test_an_edge_that_is_missing_is_noticed(ended_workers, tmp_path, words, kind):
    case = case_of(words, precision="float32")
    for said in ended_workers.run(broken, case, str(tmp_path / uuid4().hex), kind, ranks=2):
        assert "and no event is between them" in said
