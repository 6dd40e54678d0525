"""Traffic as text and as SVG: golden drawings, and bars to scale."""

import pytest
from drawn_svg import numbers, outside, read
from hypothesis import given
from hypothesis import strategies as st

from howdah.draw.traffic import BAR, draw_traffic, in_order
from howdah.draw.traffic_svg import PLOT, draw_traffic_svg
from howdah.plan.recording import Traffic

GB = 10**9
SENT = {
    Traffic("dp", "reduce_scatter", "nvlink"): 6 * GB,
    Traffic("dp", "reduce_scatter", "ib"): 12 * GB,
    Traffic("dp", "all_gather", "ib"): 4 * GB,
    Traffic("tp", "all_gather", "nvlink"): 16 * GB,
    Traffic("tp", "reduce_scatter", "nvlink"): 10 * GB,
    Traffic("pp", "send", "ib"): 2 * GB,
    Traffic("world", "scalars", "ib"): 256,
}
GOLDEN = """\
rank 0 sends in a step
50 GB, 64.0% nvlink, 36.0% ib

tp     all_gather      nvlink  16 GB  32.0%  ████████████████████████████████████████
       reduce_scatter  nvlink  10 GB  20.0%  █████████████████████████
dp     reduce_scatter  ib      12 GB  24.0%  ██████████████████████████████
                       nvlink   6 GB  12.0%  ███████████████
       all_gather      ib       4 GB   8.0%  ██████████
pp     send            ib       2 GB   4.0%  █████
world  scalars         ib      256 B   0.0%  ▏"""

rows = st.builds(
    Traffic,
    st.sampled_from(["tp", "cp", "dp", "pp"]),
    st.sampled_from(["all_gather", "send", "all_to_all"]),
    st.sampled_from(["tcp", "shared"]),
)
tables = st.dictionaries(rows, st.integers(0, 10**15))


def test_golden():
    assert draw_traffic(SENT, title="rank 0 sends in a step") == GOLDEN


def test_one_process_sends_nothing():
    assert draw_traffic({}) == "sent in a step\nnothing is sent"
    assert "nothing is sent" in draw_traffic_svg({})


@given(tables)
def test_every_row_with_bytes_is_drawn_to_scale(traffic):
    sent = {row: count for row, count in traffic.items() if count}
    lines = draw_traffic(traffic).splitlines()[3:]
    assert len(lines) == len(sent)
    for row, line in zip(in_order(traffic), lines, strict=True):
        length = line.count("█") + (line[-1] != "█")
        assert row.link in line
        assert length - 1.07 <= sent[row] / max(sent.values()) * BAR <= max(length + 0.07, 1)


@given(tables)
def test_the_axis_that_sends_most_comes_first(traffic):
    names = [row.axis for row in in_order(traffic)]
    total = {name: sum(n for row, n in traffic.items() if row.axis == name) for name in names}
    assert sorted(names, key=lambda name: (-total[name], name)) == names


# -- as SVG ----------------------------------------------------------------------


def test_links_of_an_operation_stand_behind_one_another_in_their_colors():
    _, hinted, texts = read(draw_traffic_svg(SENT))
    assert len(hinted) == len(SENT)
    first = hinted["dp reduce_scatter over ib: 12,000,000,000 bytes"]
    second = hinted["dp reduce_scatter over nvlink: 6,000,000,000 bytes"]
    (x, y, width), (start, lane, rest) = (numbers(r, "x", "y", "width") for r in (first, second))
    assert lane == y
    assert start == pytest.approx(x + PLOT * 12 / 18, abs=0.01)
    assert width == pytest.approx(PLOT * 12 / 18 - 1, abs=0.01)
    assert rest == pytest.approx(PLOT * 6 / 18 - 1, abs=0.01)
    other = hinted["pp send over ib: 2,000,000,000 bytes"]
    assert first.get("fill") == other.get("fill") != second.get("fill")
    assert {"18 GB", "36.0%", "reduce_scatter", "50 GB, 64.0% nvlink, 36.0% ib"} <= set(texts)
    assert [text for text in texts if text in ("tp", "dp", "pp")] == ["tp", "dp", "pp"]


@given(tables)
def test_nothing_leaves_the_page(traffic):
    assert outside(draw_traffic_svg(traffic)) == []
