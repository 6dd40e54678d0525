"""Memory as text and as SVG: golden drawings, and that no byte of any plan is left out."""

import pytest
from drawn_svg import numbers, outside, read
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans

from howdah.draw.memory import BAR, LETTERS, draw_memory, panels
from howdah.draw.memory_svg import COLORS, PLOT, draw_memory_svg
from howdah.draw.mesh import stage_labels
from howdah.plan.mesh_axes import axis
from howdah.shapes.activations import FLASH
from howdah.sim.memory import BOTH, PASSES, Held, memory, peak

GB = 10**9
STAGES = {
    "stage 0": [
        Held("weights", "device", BOTH, 4 * GB),
        Held("masters", "host", BOTH, 8 * GB),
        Held("gradients", "device", BOTH, 8 * GB),
        Held("moments", "host", BOTH, 16 * GB),
        Held("activations", "device", PASSES, 20 * GB),
    ],
    "stage 1": [
        Held("weights", "device", BOTH, 3 * GB),
        Held("masters", "host", BOTH, 6 * GB),
        Held("gradients", "device", BOTH, 6 * GB),
        Held("moments", "host", BOTH, 12 * GB),
        Held("reduced", "device", PASSES, 1 * GB),
        Held("activations", "device", PASSES, 11 * GB),
    ],
}
OVER = """\
memory of a step

device, in GB                                  24 GB
stage 0  WWWWWWWGGGGGGGGGGGGGGAAAAAAAAAAAAAAAAAAAAA|AAAAAAAAAAAAAA  32.00  8 GB over
stage 1  WWWWWGGGGGGGGGGGRRAAAAAAAAAAAAAAAAAAA·····|··············  21.00  3 GB free

            W     G     R      A  passes  update
stage 0  4.00  8.00  0.00  20.00   32.00   12.00
stage 1  3.00  6.00  1.00  11.00   21.00    9.00
W weights, G gradients, R reduced, A activations

host, in GB
stage 0  MMMMMMMMMMMMMMMMMMMOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO  24.00
stage 1  MMMMMMMMMMMMMMOOOOOOOOOOOOOOOOOOOOOOOOOOOO··············  18.00

            M      O  passes  update
stage 0  8.00  16.00   24.00   24.00
stage 1  6.00  12.00   18.00   18.00
M masters, O moments"""
FAR = """\
tiny

device, in kB, of 16 GB
rank 0  WWWWWWWWWWWWWWWWWWWAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA  3.00  16 GB free

           W     A  passes  update
rank 0  1.00  2.00    3.00    1.00
W weights, A activations"""


def test_a_stage_over_and_one_under_and_another_home_apart():
    assert draw_memory(STAGES, 24 * GB) == OVER


def test_room_to_spare_moves_the_mark_to_the_end():
    line = draw_memory(STAGES, 64 * GB).splitlines()[3]
    bar = line.removeprefix("stage 0  ").removesuffix("  32.00  32 GB free")
    assert bar == "W" * 4 + "G" * 7 + "A" * 17 + "·" * 28 + "|"


def test_a_capacity_far_away_is_only_told():
    rows = [Held("weights", "device", BOTH, 1000), Held("activations", "device", PASSES, 2000)]
    assert draw_memory({"rank 0": rows}, 16 * GB, title="tiny") == FAR


def test_the_bar_is_the_moment_that_needs_more():
    rows = [Held("activations", "device", PASSES, 10), Held("moments", "device", ("update",), 30)]
    line = draw_memory({"rank 0": rows}).splitlines()[3]
    assert line == f"rank 0  {'O' * BAR}  30.00"


counts = st.dictionaries(st.sampled_from(sorted(LETTERS)), st.integers(0, 10**15), min_size=1)


@given(counts)
def test_letters_are_to_scale(found):
    rows = [Held(name, "device", BOTH, count) for name, count in found.items()]
    other = Held("weights", "device", BOTH, 10**15)
    _, bar, *_ = draw_memory({"a": rows, "b": [other]}).splitlines()[3].split()
    scale = max(10**15, sum(found.values())) / BAR
    assert len(bar) == BAR
    assert BAR - bar.count("·") == round(sum(found.values()) / scale)
    for name, count in found.items():
        assert abs(bar.count(LETTERS[name]) - count / scale) < 1


@pytest.mark.slow
@settings(max_examples=60)
@given(plans())
def test_every_byte_of_every_plan_is_drawn(plan):
    ranks = axis(plan.layout, "pp").group(0)
    rows = [memory(plan, rank, FLASH) for rank in ranks]
    stages = dict(zip(stage_labels(plan), rows, strict=True))
    assert len(stages) == plan.layout.pp
    drawn = {panel.home: panel for panel in panels(stages, None)}
    for label, rows in stages.items():
        for home in ("device", "host", "disk"):
            need = max(drawn[home].total(label, moment) for moment in BOTH) if home in drawn else 0
            assert need == peak(rows, home)


# -- as SVG ----------------------------------------------------------------------


def test_every_component_of_both_moments_is_a_box_to_scale():
    _, hinted, texts = read(draw_memory_svg(STAGES, 24 * GB))
    assert len(hinted) == 3 + 2 + 2 + 2 + 4 + 2 + 2 + 2
    passes = hinted["stage 0, passes: activations 20 GB (20,000,000,000 bytes)"]
    update = hinted["stage 0, update: gradients 8 GB (8,000,000,000 bytes)"]
    assert float(passes.get("width")) == pytest.approx(PLOT * 20 / 32 - 1, abs=0.01)
    assert float(update.get("width")) == pytest.approx(PLOT * 8 / 32 - 1, abs=0.01)
    assert float(update.get("y")) > float(passes.get("y")) + float(passes.get("height"))
    assert passes.get("fill") == COLORS["activations"]
    assert {"device", "host", "24 GB", "8 GB over", "3 GB free", "32.00", "12.00"} <= set(texts)
    assert "at most 32 GB, on stage 0: 8 GB over" in texts


def test_the_capacity_is_a_line_at_its_bytes():
    drawn = read(draw_memory_svg(STAGES, 24 * GB))
    (left,) = numbers(drawn.boxes["stage 0, passes: weights 4 GB (4,000,000,000 bytes)"], "x")
    (line,) = (line for line in drawn.all("line") if line.get("stroke-width") == "2")
    assert numbers(line, "x1") == pytest.approx([left + PLOT * 24 / 32], abs=0.01)
    without = read(draw_memory_svg(STAGES, None)).all("line")
    assert not any(line.get("stroke-width") == "2" for line in without)


def test_components_have_a_letter_and_a_color_each():
    assert set(LETTERS) == set(COLORS)
    assert len(set(LETTERS.values())) == len(set(COLORS.values())) == len(LETTERS)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_nothing_leaves_the_page(count):
    rows = STAGES["stage 0"]
    assert outside(draw_memory_svg({f"stage {n}": rows for n in range(count)}, 80 * GB)) == []
