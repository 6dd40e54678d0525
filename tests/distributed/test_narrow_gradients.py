"""Gradients that are sent as bf16: what is sent, how it is rounded, and how a run does with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from in_flight import message_for_each_unit
from small_cases import case_of
from small_runs import losses, train_on

from howdah.base.errors import UserError
from howdah.comm.group import Group
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.method import Method
from howdah.shapes.weights import weights
from howdah.sim.traffic import step_traffic
from howdah.train.report import _tensors, predicted_memory
from howdah.train.step import StepContext, train_step
from howdah.verify.evidence import _batch, gather, rate_of


def narrow_case(words, gradient_dtype):
    case = case_of(words, precision="float32")
    return replace(case, method=Method("float32", gradient_dtype=gradient_dtype))


def reduced(transport, how):
    """A float32 tensor of this rank, reduced as bf16 in each way; and the bytes sent."""
    group = Group(transport, axis="dp")
    x = torch.arange(8.0).exp() * (1 + transport.rank)
    whole, shared, out, gathered = x.clone(), x.clone(), torch.empty(4), torch.zeros(8)
    bf16 = torch.bfloat16
    group.all_reduce(whole, dtype=bf16, async_op=how).result()
    group.reduce_scatter(shared, dtype=bf16, async_op=how).result()
    group.reduce_scatter(out, x, dtype=bf16, async_op=how).result()
    group.own_shard(gathered).copy_(group.own_shard(x))
    group.all_gather(gathered, dtype=bf16, async_op=how).result()
    group.close()
    lists = [t.tolist() for t in (x, whole, shared, out, gathered)]
    return lists, sum(group.counters.sent().values())


@pytest.mark.parametrize("how", [False, True])
def test_terms_and_sums_are_rounded(workers, how):
    results = workers.run(reduced, how, ranks=2)
    terms = [torch.tensor(lists[0]) for lists, _ in results]
    total = sum(term.bfloat16().float() for term in terms).bfloat16().float()
    rounded = [term.bfloat16().float().tolist() for term in terms]
    for rank, ((x, whole, shared, out, gathered), sent) in enumerate(results):
        own = slice(4 * rank, 4 * rank + 4)
        assert whole == total.tolist() and out == total[own].tolist()
        expected = torch.tensor(x)
        expected[own] = total[own]
        assert shared == expected.tolist(), "the shares of others stay as they were, in float32"
        other = slice(4 * (1 - rank), 8 - 4 * rank)
        assert gathered[other] == rounded[1 - rank][other]
        assert sent == 2 * 4 * 5, "bf16: two halves of an all-reduce, two reductions, a gather"


def test_what_has_the_dtype_is_sent_as_it_is(workers):
    for found in workers.run(same, ranks=2):
        assert found


def same(transport):
    group = Group(transport, axis="dp")
    one, other = torch.randn(9).bfloat16(), None
    other = one.clone()
    group.all_reduce(one, dtype=torch.bfloat16)
    group.all_reduce(other)
    group.close()
    return torch.equal(one, other)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "words",
    [
        "dp2 x2",
        "dp3 zero1 x1",
        "dp2 zero2 x2",
        "dp2 zero3 x2",
        "dp4 zero2 shard2 x2",
        "dp2 tp2 sp x1",
    ],
)
def test_bytes_of_narrow_gradients_are_predicted(workers, words):
    full, narrow = narrow_case(words, "full"), narrow_case(words, "bf16")
    found = workers.run(gather, narrow, ranks=narrow.layout.world)
    (exact, *_) = workers.run(gather, full, ranks=full.layout.world)
    for rank, one in enumerate(found):
        predicted = step_traffic(narrow.plan, rank, one.wires)
        sent = {row: count for row, count in one.sent.items() if count}
        assert sent == {row: narrow.steps * count for row, count in predicted.items()}
    assert sum(found[0].sent.values()) < sum(exact.sent.values())
    for name, gradient in exact.gradients.items():
        apart = np.linalg.norm(found[0].gradients[name] - gradient)
        assert 0 < apart <= 2**-6 * np.linalg.norm(gradient), name


def held(transport, case, apart):
    """Bytes of the window and of narrow copies after a step, measured and predicted."""
    with (
        message_for_each_unit(apart),
        connect_mesh(case.layout, transport, torch.device("cpu")) as mesh,
    ):
        placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
        context = StepContext(placed, mesh, case.method, case.seed)
        train_step(context, _batch(case, 0, rank=mesh.rank), step=0, rate=rate_of(case, 0))
        predicted = predicted_memory(case.plan, mesh.rank)["reduced"]
        return _tensors(placed).get("reduced", 0), predicted, placed.sums.narrow_bytes


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("words", ["dp3 zero1 x1", "dp2 zero2 x2", "dp4 zero2 shard2 x2"])
def test_memory_of_narrow_gradients_is_predicted(workers, words, apart):
    for kind in ("full", "bf16"):
        case = narrow_case(words, kind)
        for measured, predicted, narrow in workers.run(held, case, apart, ranks=case.layout.world):
            assert measured == predicted
            assert bool(narrow) == (kind == "bf16")


def test_a_run_with_narrow_gradients_learns(workers, make_job, tmp_path):
    train_on(workers, make_job("full", "layout=dp2 zero1"))
    train_on(workers, make_job("narrow", "layout=dp2 zero1", "method.gradient_dtype=bf16"))
    one, other = losses(tmp_path / "full"), losses(tmp_path / "narrow")
    assert one != other
    assert list(other.values()) == pytest.approx(list(one.values()), rel=1e-2)


def test_float64_is_not_sent_as_bf16():
    case = case_of("dp2 x1")
    with pytest.raises(UserError, match="use gradient_dtype=full, or precision=float32"):
        print(replace(case, method=Method("float64", gradient_dtype="bf16")).plan)
