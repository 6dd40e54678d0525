"""Miniatures keep a run's forms and remainders; made-up text keeps its awkwardness."""

from dataclasses import replace

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.support import unsupported
from howdah.shapes.check import check_shape
from howdah.shapes.presets import PRESETS, preset
from howdah.verify.case import (
    check_case,
    corpus_of,
    full_case,
    made_up,
    miniature,
    shrink,
    small_shape,
)
from howdah.verify.verify import verify

BUILT = [name for name in PRESETS if not unsupported(preset(name), Layout())]


def test_degrees_shrink_to_two_or_three():
    assert [shrink(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 3, 2, 3, 2, 3]


@pytest.mark.parametrize("name", BUILT)
def test_a_small_shape_keeps_the_forms_and_the_remainders(name):
    shape, small = preset(name), small_shape(preset(name), context=24)
    assert check_shape(small) == []
    assert small.heads // small.k == shape.heads // shape.k
    assert (small.k % 2, small.vocab % 64) == (shape.k % 2, shape.vocab % 64)
    sizes = (
        "layers",
        "encoder_layers",
        "width",
        "heads",
        "ffn_size",
        "vocab",
        "context",
        "kv_heads",
        "head_size",
    )
    shrunk = {name: getattr(small, name) for name in (*sizes, "latent", "experts")}
    assert replace(shape, **shrunk) == small  # and nothing but the sizes is another
    assert bool(shape.latent) == bool(small.latent)
    if shape.latent:
        assert bool(shape.latent.query_rank) == bool(small.latent.query_rank)
        assert small.d > small.latent.v_size  # as in DeepSeek's
    if shape.experts:
        forms = ("scores", "normalise", "scale", "group_best", "bias", "shared_gate")
        assert all(getattr(shape.experts, f) == getattr(small.experts, f) for f in forms)
        for size in ("shared", "first_dense"):
            assert bool(getattr(shape.experts, size)) == bool(getattr(small.experts, size))
        assert (shape.experts.groups > 1) == (small.experts.groups > 1)
        assert any(small.sparse(layer) for layer in range(small.layers))


@pytest.mark.parametrize(
    ("layout", "small", "samples"),
    [
        ("single", "single x1", 2),
        ("dp4", "dp2 x1", 3),
        ("dp5 x4", "dp3 x2", 11),
        ("dp2 x3", "dp2 x3", 11),
    ],
)
def test_a_miniature_keeps_the_layouts_axes(make_job, layout, small, samples):
    """A batch of two or more ranks does not divide, so that padding is always seen."""
    size = {"dp5 x4": 20, "single": 1}.get(layout, 12)
    job = make_job("a", f"layout={layout}", f"batch.global_batch={size}", "method.dropout=0.25")
    case = miniature(job, precision="bf16", steps=3)
    assert (str(case.layout), case.samples) == (small, samples)
    assert (case.method.precision, case.method.dropout, case.steps) == ("bf16", 0.25, 3)
    assert case.shape.layers == 2 and case.text is None and case.seed == job.seed


@pytest.mark.parametrize(
    ("layout", "small"),
    [
        ("dp4 zero2 shard2", "dp4 zero2 shard2 x1"),
        ("dp8 zero2 shard2", "dp4 zero2 shard2 x1"),
        ("dp8 zero2 shard4", "dp4 zero2 shard2 x1"),
        ("dp6 zero3 shard3", "dp6 zero3 shard3 x1"),
    ],
)
def test_a_miniature_keeps_both_cuts_of_the_replicas(make_job, layout, small):
    """It was two ranks, without groups that hold copies of one another, or a sentence that refused
    a good layout.
    """
    job = make_job("a", f"layout={layout}", "batch.global_batch=24")
    case = miniature(job, precision="float64", steps=1)
    assert str(case.layout) == small
    assert axis(case.layout, "shard").size > 1 and axis(case.layout, "across").size > 1


@pytest.mark.parametrize("blocks", ["2", "layers.1"])
def test_of_a_miniature_one_block_is_recomputed_where_not_all_are(make_job, blocks):
    """`recompute=full:20` of a large model was over the two blocks of its miniature."""
    job = make_job("a", f"layout=dp2 recompute=full:{blocks}")
    case = miniature(job, precision="float64", steps=1)
    assert [*case.plan.recompute.values()] == ["full", "none"]


@pytest.mark.parametrize(
    ("given", "small"),
    [
        ("pp2 stages=1,1 x3", "pp2 1f1b x3 stages=3,1"),
        ("pp4 stages=0,1,1,0 x3", "pp2 1f1b x3 stages=0,4"),
        ("pp3 stages=1,1,0 x3", "pp3 1f1b x3 stages=3,1,0"),
    ],
)
def test_a_miniature_has_blocks_for_chosen_stages(make_job, given, small):
    case = miniature(make_job("a", f"layout={given}"), precision="float64", steps=1)
    assert str(case.layout) == small
    assert case.plan.shape.layers == sum(case.layout.stages or ())


def test_full_is_the_run_itself(make_job):
    job = make_job("a", "layout=dp2", "batch.micro_batch=2")
    case = full_case(job, precision="float64", steps=1)
    assert (case.shape, case.layout, case.samples, case.micro) == (job.shape, job.layout, 6, 2)
    assert case.layout == Layout(dp=2, micros=2)
    assert case.text == (job.data, job.cache)
    assert len(corpus_of(case).sources[0].ids) > 10_000  # the run's own text


def test_made_up_text_has_documents_of_every_length():
    tokens = made_up(100, length=20_000)
    lengths = np.diff(tokens.starts)
    assert (lengths.min(), lengths.max()) == (1, 40)
    assert tokens.starts[0] == 0 and tokens.starts[-1] < 20_000
    assert (tokens.ids[tokens.starts] == 0).all()
    assert (np.delete(tokens.ids, tokens.starts) > 0).all()
    assert tokens.ids.max() == 99
    np.testing.assert_array_equal(tokens.ids[:500], made_up(100, length=500).ids)


def test_made_up_text_is_enough_for_every_step(make_job):
    case = miniature(make_job("a", "layout=dp2"), precision="float64", steps=4)
    (tokens,) = corpus_of(case).sources
    assert tokens.samples(case.sequence) >= case.samples * case.steps


def test_what_cannot_be_compared_is_refused():
    assert check_case("float32", steps=1) == "float32"
    with pytest.raises(UserError, match="'fp16' is unknown; use float64, float32 or bf16"):
        check_case("fp16", steps=1)
    with pytest.raises(UserError, match="--steps 0 compares nothing"):
        check_case("bf16", steps=0)


@pytest.fixture
def of_conversations(make_job):
    """Makes a miniature of a run on conversations."""

    def make(layout, steps):
        job = make_job("a", f"layout={layout}")
        job = replace(job, data=replace(job.data, chat="answers"))
        return miniature(job, precision="float64", steps=steps)

    return make


def test_a_miniature_of_conversations_has_tokens_that_are_not_trained_on(of_conversations):
    case = of_conversations("dp2", 4)
    (tokens,) = corpus_of(case).sources
    assert tokens.trained is not None and 0.4 < tokens.trained.mean() < 0.6
    assert not tokens.trained[tokens.starts].any()
    assert tokens.samples(case.sequence) >= case.samples * case.steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 zero2", "cp2", "tp2 sp"])
def test_miniatures_of_conversations_are_proved(of_conversations, workers, layout):
    """With controls: an uneven count of labels, and documents that a cut goes through."""
    verdict = verify(of_conversations(layout, 2), workers)
    assert verdict.proved, verdict.problems
