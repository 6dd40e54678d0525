"""Traps that others fell into: forms that are right alone, and silently wrong together.

Each test is one of them, with what happened and where it is told, on layouts that meet it here;
the judge is one device, in float64. None of them stopped a run: the loss fell, to another place.

    the loss       label smoothing over parts of a vocabulary; logits that all parts have
    its divisor    micro-batches with different numbers of tokens
    sums           norms that saw a slice of the sequence; an embedding on two stages
    the norm       what parts hold alike, counted twice; what each has of its own, left out
    the data       the next sample after dp has changed
"""

from dataclasses import replace

import pytest
import torch
from small_cases import FORMS, case_of, prove
from small_runs import losses, samples_of, train_watched

from howdah.optim.clip import squared_norm
from howdah.plan.batch import MASKED
from howdah.plan.program import tied_stages
from howdah.plan.sharding import summed_over_tp
from howdah.verify.compare import compare
from howdah.verify.evidence import gather, global_batch
from howdah.verify.reference import reference

# Neither two nor three divides the vocabulary; three divides no heads.
ODD = replace(FORMS["qwen3"], heads=8, kv_heads=4, width=40, head_size=8, vocab=67)


# -- the loss ----------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp2 x2", "tp3 sp x1", "dp2 tp2 zero1 x1", "pp2 tp2 x2"])
def test_labels_are_smoothed_over_the_whole_vocabulary(workers, layout):
    """Megatron-LM spread the smoothing over a part's own rows and took the mean of its own
    logits: at tp > 1 loss and gradients were wrong, and differed between the parts (#737, #7464).
    """
    case = replace(case_of(layout), shape=ODD)
    prove(replace(case, method=replace(case.method, label_smoothing=0.1)), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp2 x2", "tp3 sp x1", "dp2 tp2 zero1 x1", "pp2 tp2 x2"])
def test_every_logit_is_in_the_sum_of_exponentials_once(workers, layout):
    """Megatron-LM gave logits that were gathered already to the loss that sums over the parts:
    each was counted tp times, and the loss was log(tp) too high (#7452). The z-loss is a
    function of that very sum.
    """
    case = replace(case_of(layout), shape=ODD)
    prove(replace(case, method=replace(case.method, z_loss=1e-2)), workers)


# -- its divisor -------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 x3", "dp2 tp2 sp x3", "dp2 pp2 x3", "dp2 zero3 x3"])
def test_micro_batches_with_other_numbers_of_tokens_are_not_averaged(workers, layout):
    """torchtune and torchtitan took a mean for each micro-batch, then the mean of these: tokens of
    short ones weighed more, and accumulation changed the loss (torchtune #1875, torchtitan #2206).
    """
    case = case_of(layout)
    labels = global_batch(case, 0).labels
    sizes = {int((labels[a : a + 2] != MASKED).sum()) for a in range(0, len(labels), case.micro)}
    assert len(sizes) > 1
    prove(case, workers)


# -- sums --------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp2 sp x2", "tp4 sp x1", "pp2 tp2 sp x2", "dp2 tp2 zero3 sp"])
def test_norms_saw_a_slice_of_the_sequence_alone(workers, layout):
    """In Megatron-LM under sequence slices, the final norm's gradient was another on each part of
    tp when the optimizer took it: nobody had summed it (#1446).
    """
    case = case_of(layout, form="qwen3")
    last = case.plan.layout.world - 1  # holds the final norm, in a pipeline too
    summed = [w.name for w in case.plan.weights if len(summed_over_tp(w, case.plan, last)) > 1]
    assert {"norm.weight", "layers.1.attention_norm.weight"} < set(summed)
    prove(case, workers)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("zero", ["", "zero1 ", "zero2 ", "zero3 "])
@pytest.mark.parametrize("ranks", ["dp2 pp2", "pp2 tp2"])
def test_an_embedding_on_two_stages_has_the_gradients_of_both(workers, ranks, zero):
    """Megatron-LM cut the gradients into shares of the replicas before it added up the embedding's
    over its two stages. The shares lay elsewhere on each, so parts of sums were added (#844).
    """
    case = case_of(f"{ranks} {zero}x2")
    assert tied_stages(case.plan) == (0, 1)
    prove(case, workers)


# -- the norm ----------------------------------------------------------------------


def count_all_that_is_here(context):
    """Every rank counts all it holds, and asks nobody who else holds the same."""
    return replace(context, square=lambda _: squared_norm(context.placed.gradients()))


def count_on_the_first_part(context):
    """Only the first part of tp counts, as if all that there is were held alike."""
    first = context.mesh.index_of("tp") == 0
    return replace(
        context,
        square=lambda some: squared_norm(some) if first else torch.zeros((), dtype=torch.float64),
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("count", [count_all_that_is_here, count_on_the_first_part])
@pytest.mark.parametrize("layout", ["tp2 x2", "tp2 sp x2", "pp2 tp2 x2"])
def test_the_norm_has_every_element_once(workers, layout, count):
    """Megatron-LM left experts and attention sinks of other parts out of the gradient norm (#5916,
    #7530), Transformer Engine had weights that all parts hold alike in it tp times (ROCm's #715):
    clipping was another, and every gradient right.
    """
    case = case_of(layout)
    prove(case, workers)
    broken = workers.run(gather, case, count, ranks=case.layout.world)[0]
    failing = {d.what for d in compare(case, broken, reference(case), None) if d.used > 1}
    assert "gradient norm of step 1" in failing and "loss of step 1" not in failing
    assert not [what for what in failing if what.startswith("gradient of")]


# -- the data ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_next_sample_comes_next_when_dp_has_changed(workers, make_job, tmp_path):
    """torchtitan kept a place in the text for each replica. With fewer of them a run went on, and
    what the others were to read next was lost (#811, #816); Megatron-Bridge the same (#5637).
    """
    settings = ["batch.global_batch=7", "batch.micro_batch=1", "method.lr.schedule=constant"]
    never = make_job("never", "train.steps=8", *settings)
    read = samples_of(workers.run(train_watched, [never], ranks=1))
    changing = {}
    for steps, layout in ((2, "dp4"), (4, "dp2 zero1"), (6, "dp3 zero2"), (8, "single")):
        job = make_job("always", f"layout={layout}", f"train.steps={steps}", *settings)
        changing |= samples_of(workers.run(train_watched, [job], ranks=job.layout.world))
    assert [number for step in range(8) for number, _ in changing[step]] == list(range(7 * 8))
    assert changing == read
    assert losses(tmp_path / "always") == pytest.approx(losses(tmp_path / "never"), rel=1e-6)
