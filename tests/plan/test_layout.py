"""The spelling of layouts: parsing reverses printing, and what is misspelt is refused."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import layouts

from howdah.base.errors import UserError
from howdah.plan.layout import (
    CHOICES,
    KNOWN,
    MEANING,
    NUMBERS,
    SCHEDULES,
    Layout,
    parse_layout,
    resolve,
)
from howdah.plan.schedule.registry import SCHEDULES as BUILDERS
from howdah.shapes.part import Part

NAMED = (Part("encoder", 0), *(Part("layers", layer) for layer in (0, 1, 7)))


@given(layouts())
def test_parsing_reverses_printing(layout):
    assert parse_layout(str(layout)) == layout


@given(layouts())
def test_the_order_of_words_and_the_spaces_do_not_matter(layout):
    backwards = "   ".join(reversed(str(layout).split()))
    assert parse_layout(f" {backwards}\n") == layout


@pytest.mark.parametrize(
    ("text", "layout", "printed"),
    [
        ("single", Layout(), "single"),
        ("dp1", Layout(), "single"),
        ("", Layout(), "single"),
        ("dp2 x4", Layout(dp=2, micros=4), "dp2 x4"),
        ("x4 dp2", Layout(dp=2, micros=4), "dp2 x4"),
        ("dp*", Layout(dp=None), "dp*"),
        ("dp* x1", Layout(dp=None, micros=1), "dp* x1"),
        ("dp02", Layout(dp=2), "dp2"),
        ("pp1 tp1", Layout(), "single"),
        ("zero1", Layout(zero=1), "single zero1"),
        ("pp2", Layout(pp=2, schedule="1f1b"), "pp2 1f1b"),
        ("pp2 v2", Layout(pp=2, virtual=2), "pp2 interleaved v2"),
        ("pp2 slices4", Layout(pp=2, slices=4), "pp2 terapipe slices4"),
        ("pp3 stages=4,4,4", Layout(pp=3, stages=(4, 4, 4)), "pp3 1f1b stages=4*3"),
        ("pp4 stages=0,3*2,0", Layout(pp=4, stages=(0, 3, 3, 0)), "pp4 1f1b stages=0,3,3,0"),
        (
            "pp2 zb-v stages=2*4",
            Layout(pp=2, schedule="zb-v", stages=(2, 2, 2, 2)),
            "pp2 zb-v stages=2*4",
        ),
        ("pp2 zb-v", Layout(pp=2, virtual=2, schedule="zb-v"), "pp2 zb-v"),
        ("dp4 zero2 accumulate=shard", Layout(dp=4, zero=2), "dp4 zero2"),
        ("dp4 zero3 shard4", Layout(dp=4, zero=3), "dp4 zero3"),
        ("server2 dp4", Layout(dp=4, server=2), "dp4 server2"),
        ("single server1", Layout(server=1), "server1"),
        ("dp2 server0", Layout(dp=2), "dp2"),
        ("cp8 context=both", Layout(cp=8, context="both", inside=4), "cp8 context=both"),
        ("cp8 context=both:4", Layout(cp=8, context="both"), "cp8 context=both"),
        ("cp8 context=both:2", Layout(cp=8, context="both", inside=2), "cp8 context=both:2"),
        *(
            (
                f"dp2 recompute=full:{names}",
                Layout(dp=2, recompute="full", recompute_blocks=NAMED),
                "dp2 recompute=full:encoder.0,layers.0-1,7",
            )
            for names in ("layers.7,0-1,encoder.0", "encoder.0,layers.0,layers.1,layers.7,0")
        ),
        ("x8 1f1b zero1 tp2 dp4 pp2", parse_layout("pp2 dp4 tp2 zero1 1f1b x8"), None),
    ],
)
def test_spellings(text, layout, printed):
    assert parse_layout(text) == layout
    assert str(layout) == (printed or "pp2 dp4 tp2 zero1 1f1b x8")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp-2", "layout 'dp-2': unknown word 'dp-2'; write 'dp2'"),
        ("dp2 zero=1", "layout 'dp2 zero=1': unknown word 'zero=1'; write 'zero1'"),
        ("ddp2", "layout 'ddp2': unknown word 'ddp2'; here it is written 'dp2'"),
        ("singel x2", "layout 'singel x2': unknown word 'singel'; did you mean 'single'?"),
        ("pp2 1fb1", "layout 'pp2 1fb1': unknown word '1fb1'; did you mean '1f1b'?"),
        ("dp", "layout 'dp': 'dp' needs a number: replicas (dp2, or dp* for the rest)"),
        ("x dp2", "layout 'x dp2': 'x' needs a number: micro-batches per step (x4)"),
        ("dp2 dp2", "layout 'dp2 dp2': 'dp2' says dp a second time; say it once"),
        ("single dp2", "layout 'single dp2': 'dp2' says dp a second time; say it once"),
        ("pp2 gpipe 1f1b", "'1f1b' says schedule a second time; say it once"),
        ("x*", "layout 'x*': only dp can be '*'; give x a number"),
        ("recompute=ful", "layout 'recompute=ful': recompute is 'ful'; did you mean 'full'?"),
        ("optimizer=moon", "optimizer is 'moon'; known are: device, disk, host"),
        ("dp0", "dp0 must be at least dp1"),
        ("dp2 x0", "x0 must be at least x1"),
        ("zero4", "zero4 must be at most zero3"),
        ("dp999999999", "dp999999999 must be at most dp1048576"),
        ("dp" + "9" * 40, "must be at most dp1048576"),
        ("pp2 x99999999", "x99999999 must be at most x16384"),
        ("tp1025", "tp1025 must be at most tp1024"),
        ("pp257", "pp257 must be at most pp256"),
        ("pp2 v999999999", "v999999999 must be at most v256"),
        ("dp1048576 tp2", "it makes 2,097,152 ranks; at most 1,048,576 are planned for"),
        ("dp2 " * 250_000, "has 1,000,000 characters; 500 are the most"),
        ("x" * 400, "the nearest are: x, context=, zero, zb-v, zb-h2"),
        ("dp6 ep4", "layout 'dp6 ep4': ep4 does not divide the 6 ranks of dp×cp; use ep3"),
        ("ep8", "ep8 takes 8 ranks of dp×cp, and the layout has 1; use dp8"),
        ("cp2 ep8", "ep8 takes 8 ranks of dp×cp, and the layout has 2; use dp4"),
        ("dp3 ep2", "ep2 does not divide the 3 ranks of dp×cp; use ep3"),
        ("dp4 zero1 shard3", "shard3 does not divide the 4 ranks of dp×cp; use shard2"),
        ("dp2 server", "'server' needs a number: parameter servers beside the replicas (server2)"),
        ("dp2 servers2", "unknown word 'servers2'; did you mean 'server'?"),
        ("dp4 shard2", "shard2 shares out nothing; add zero1, zero2 or zero3"),
        ("dp2 shard2", "shard2 shares out nothing; add zero1, zero2 or zero3"),
        ("dp2 zero1 accumulate=shard", "which begins with zero2"),
        ("dp2 sp", "sp cuts the sequence between the parts of tp; add tp2 or more, or drop sp"),
        ("dp2 context=all-to-all", "add cp2 or more"),
        ("cp3 context=both", "cp3 has none; use cp4 or a ring"),
        ("cp8 context=both:3", "use context=both:2"),
        ("cp8 context=ring:2", "groups of ranks are context=both:2"),
        ("cp8 context=both:x", "groups of ranks are context=both:2"),
        ("dp2 recompute=none:2", "recompute=none:2 recomputes nothing; use recompute=full:2"),
        ("dp2 recompute=full:0", "recompute=full:0 must have at least 1 and at most 1,000 blocks"),
        ("dp2 recompute=none:layers.1", "recomputes nothing; use recompute=full:layers.1"),
        ("dp2 recompute=full:2,layers.1", "or names (recompute=full:layers.0-3,7)"),
        ("dp2 recompute=full:layers.3-1", "layers.3-1' counts backwards; write layers.1-3"),
        ("recompute=full:layers.0-3,9-7", "layers.0-3,9-7' counts backwards; write 7-9"),
        ("dp2 recompute=full:layers.0-99999999", "or names (recompute=full:layers.0-3,7)"),
        ("dp2 recompute=full:", "or names (recompute=full:layers.0-3,7)"),
        ("dp2 recompute=all:2", "recompute is 'all'; known are: full, none, selective"),
        ("dp2 again2", "again2 is spelled recompute=full:2 now"),
        ("tp2 inputs=gathered", "inputs=gathered keeps what sp gathers; add sp, or drop it"),
        ("dp2 zero2 release=step", "keeps what zero3 gathers; add zero3, or drop it"),
        ("dp2 zero2 gather=broadcast", "sends what zero3 gathers; add zero3, or drop it"),
        ("dp2 1f1b", "1f1b needs pipeline stages; add pp2 or more, or drop it"),
        ("dp2 v2", "v2 needs pipeline stages; add pp2 or more, or drop it"),
        ("pp2 interleaved", "interleaved needs two or more stages on each rank; add v2"),
        ("pp2 gpipe v2", "gpipe has one stage on each rank, not v2; use interleaved v2"),
        ("pp2 zb-v v3", "zb-v has 2 stages on each rank, not v3; drop v3"),
        ("pp2 terapipe", "terapipe needs token slices; add slices2 or more"),
        ("dp2 stages=1,1", "stages=1,1 needs pipeline stages; add pp2 or more, or drop it"),
        ("pp4 stages=1,2", "stages=1,2 has 2 stages, and pp4 has 4; give 4"),
        ("pp2 v2 stages=1,2", "stages=1,2 has 2 stages, and pp2 with 2 stages each has 4; give 4"),
        ("pp3 stages=1,0,2", "only the first and the last may have 0"),
        ("pp2 stages=a", "'stages=a' is no list of blocks; write it stages=5,6,6,5"),
        ("pp2 stages=1*9999,1*9999", "is no list of blocks; write it stages=5,6,6,5"),
        ("pp2 1f1b slices2", "1f1b does not cut tokens; use terapipe slices2"),
    ],
)
def test_a_misspelt_layout_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(UserError) as caught:
        parse_layout(text)
    assert str(caught.value).endswith(sentence)
    assert str(caught.value).startswith("layout '") and len(str(caught.value)) < 400


@given(st.text(max_size=12))
def test_no_text_at_all_gives_a_traceback(text):
    try:
        layout = parse_layout(text)
    except UserError as problem:
        assert "\n" not in str(problem)
    else:
        assert parse_layout(str(layout)) == layout


def test_every_word_is_explained_and_every_field_has_a_word():
    assert MEANING.keys() == NUMBERS.keys()
    assert all(MEANING.values())
    named = {*NUMBERS.values(), *CHOICES, "sp", "schedule", "recompute_blocks", "inside", "stages"}
    assert named == {field.name for field in fields(Layout)}


@given(st.lists(st.sampled_from([*KNOWN, *"0123456789*=", "host", "full", "whole"]), max_size=9))
def test_any_mixture_of_words_is_a_layout_or_a_sentence(words):
    for text in (" ".join(words), "".join(words)):
        try:
            layout = parse_layout(text)
        except UserError as problem:
            assert "\n" not in str(problem)
        else:
            assert parse_layout(str(layout)) == layout


def test_the_schedules_of_a_layout_are_the_ones_that_keep_the_result():
    without_flush = {"pipedream", "pipedream-2bw"}
    assert {*SCHEDULES, *without_flush} == set(BUILDERS)


# -- resolving -----------------------------------------------------------------


def test_the_world_fills_in_the_star():
    assert resolve(parse_layout("dp* x4"), 6) == Layout(dp=6, micros=4)
    assert resolve(parse_layout("dp*"), 1) == Layout(dp=1)


def test_a_layout_that_fits_the_world_is_kept():
    assert resolve(Layout(dp=3, micros=2), 3) == Layout(dp=3, micros=2)
    assert resolve(Layout(dp=3, micros=2), None) == Layout(dp=3, micros=2)


def test_a_layout_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(UserError) as caught:
        resolve(Layout(dp=3), 4)
    assert str(caught.value) == (
        "layout 'dp3' needs 3 processes but there are 4; use dp4 or dp*, or start 3 processes"
    )
    with pytest.raises(UserError, match="needs 6 processes but there are 4; start 6"):
        resolve(Layout(dp=2, tp=3), 4)
    with pytest.raises(UserError, match=r"needs a multiple of 3 .* there are 4; the nearest is 3"):
        resolve(Layout(dp=None, tp=3), 4)


def test_a_star_without_a_world_is_refused():
    with pytest.raises(UserError, match=r"'dp\*' takes the number of processes from torchrun"):
        resolve(Layout(dp=None), None)
    with pytest.raises(ValueError, match="until it is resolved"):
        _ = Layout(dp=None).world


def test_the_world_of_a_layout_is_its_number_of_ranks():
    assert Layout(dp=4, micros=2).world == 4
    assert parse_layout("pp2 dp3 cp5 tp7").world == 2 * 3 * 5 * 7
    assert resolve(parse_layout("pp2 dp* tp2"), 16).dp == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cp4 context=both:4", "would be one group, all-to-all alone; use context=both:2 or"),
        ("cp4 context=both:1", "would be a ring alone; use context=both:2, or"),
        ("cp4 context=both:3", "context=both:3 does not divide the 4 ranks of cp; use"),
    ],
)
def test_groups_of_ranks_that_are_no_groups(text, told):
    with pytest.raises(UserError) as refused:
        parse_layout(text)
    assert told in str(refused.value)
