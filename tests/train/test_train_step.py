"""A training step whose gradient is not finite, and what it says."""

from dataclasses import replace
from math import isnan

import numpy as np
import pytest
import torch
from flight import Race
from played_streams import Played
from small_cases import FORMS, case_of

from howdah.base.errors import UserError
from howdah.checkpoint.snapshot import Snapshots
from howdah.comm.transport import SingleRank
from howdah.optim.clip import squared_norm
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.shapes.weights import weights
from howdah.text.batches import micros, order_of, rows_of
from howdah.train.loop import refuse_divergence
from howdah.train.state import entries
from howdah.train.step import StepContext, train_step
from howdah.verify.case import corpus_of


def stepper(case):
    mesh = connect_mesh(case.layout, SingleRank(), torch.device("cpu"))
    placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
    return StepContext(placed, mesh, case.method, case.seed)


def batch_of(case):
    corpus = corpus_of(case)
    order = order_of(corpus, sequence=case.sequence, seed=case.seed)
    rows = rows_of(case.layout, 0, micro=case.plan.micro_batch)
    return micros(corpus, order, rows, first=0, size=case.samples)


def tensors(placed):
    units = placed.units.values()
    states = [x for state in placed.optimizer.state.values() for x in state.values()]
    every = [*(u.weights for u in units), *(u.masters for u in units), *states]
    return [tensor.clone() for tensor in every]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(precision):
    """It made all weights NaN; the run ended just so, but nothing was left to look at."""
    case = case_of("single x2", precision=precision)
    context, batch = stepper(case), batch_of(case)
    train_step(context, batch, step=0, rate=1e-2)
    before = tensors(context.placed)

    def spoilt(gradients):
        every = list(gradients)
        every[1][3] = float("nan")
        return squared_norm(every)

    result = train_step(replace(context, square=spoilt), batch, step=1, rate=1e-2)
    assert isnan(result.norm) and np.isfinite(result.loss)
    assert all(map(torch.equal, tensors(context.placed), before))
    with pytest.raises(UserError, match="training diverged: the gradient norm of step 2 is nan"):
        refuse_divergence(result, 2)
    train_step(context, batch, step=1, rate=1e-2)
    assert not torch.equal(tensors(context.placed)[0], before[0])


def test_a_step_knows_its_counts_before_its_numbers():
    case = case_of("single x2")
    result = train_step(stepper(case), batch_of(case), step=0, rate=1e-2, stop=True)
    assert (result.tokens, result.stop) == (case.samples * case.sequence, True)
    total, square = result.told.values()
    assert (result.loss, result.norm) == (total / result.tokens, square**0.5)
    assert result.loss < 2 * np.log(FORMS["laptop"].vocab)


def test_an_update_comes_behind_the_copies_of_a_snapshot():
    """On a GPU they are made beside the forward and backward of the next step."""
    played, case = Played(), case_of("single x2")
    snapshots = Snapshots(streams=played, allocate=lambda n: torch.empty(n, dtype=torch.uint8))
    context = replace(stepper(case), snapshots=snapshots)
    with played.checked():
        for step in range(2):
            taken = snapshots.take(entries(context.placed), apart=True)
            before = [tensor.clone() for _, _, tensor in entries(context.placed)]
            train_step(context, batch_of(case), step=step, rate=0.1)
            copies = [tensor for _, _, tensor in taken.entries.values()]
            assert all(map(torch.equal, copies, before))
        snapshots.take(entries(context.placed), apart=True)
        snapshots.settle = lambda: None
        with pytest.raises(Race, match=r"on compute touches what aten::copy_ on lane 1 uses"):
            train_step(context, batch_of(case), step=2, rate=0.1)
