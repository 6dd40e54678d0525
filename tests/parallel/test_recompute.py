"""Recomputation: the same numbers from fewer tensors, which the plan lists to the byte."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from small_cases import FORMS
from tiny import plan_of

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.model.noise import Noise
from howdah.parallel import recompute as module
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.recompute import again
from howdah.parallel.saved_bytes import SavedTensorMeter
from howdah.plan.method import Method
from howdah.plan.sharding import local_of
from howdah.shapes.activations import bytes_of, made_again
from howdah.shapes.weights import parts, weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.text.batches import Micro
from howdah.train.feed import arrays_of

KINDS = ["full", "selective"]


def placed_on(words, *, form="laptop", precision="float64", dropout=0.0):
    method, shape = Method(precision, dropout=dropout), FORMS[form]
    plan = plan_of(shape, words, method)
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    return apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))


def micro(shape, *, packed=False, length=9):
    """Two rows; packed, the second has two documents."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, shape.vocab, (2, length + 1), generator=draw).numpy()
    documents = torch.zeros(2, length, dtype=torch.int32)
    positions = torch.arange(length).expand(2, length).clone()
    if packed:
        documents[1, 4:], positions[1, 4:] = 1, torch.arange(length - 4)
    samples = torch.arange(2).numpy()
    labels, positions = tokens[:, 1:].copy(), positions.numpy()
    return Micro(tokens[:, :-1].copy(), labels, positions, documents.numpy(), samples)


def made_loss(placed, *, packed=False):
    given = micro(placed.plan.shape, packed=packed)
    noise = Noise(5, 0, torch.from_numpy(given.samples))
    whole = replace(arrays_of(given, placed.mesh.device), noise=noise)
    return placed.executor.alone(0, whole, placed.loss)["loss"]


def gradients(placed):
    loss = made_loss(placed, packed=True)
    loss.backward()
    return loss.detach(), [unit.gradients for unit in placed.units.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_changes_but_what_is_kept(kind, form):
    """Not even a bit: the second run computes what the first did, dropout and all."""
    plain = placed_on("recompute=full", form=form, dropout=0.1)
    for block in plain.model.layers.values():
        block.run = None
    other = placed_on(f"recompute={kind}", form=form, dropout=0.1)
    (loss, mine), (plain_loss, theirs) = gradients(other), gradients(plain)
    assert loss == plain_loss
    for one, two in zip(mine, theirs, strict=True):
        assert two.any() and torch.equal(one, two)


# -- how often a block runs ----------------------------------------------------------


class Runs(torch.nn.Module):
    """Counts the runs of a part, and those with a graph."""

    def __init__(self, forward):
        super().__init__()
        self.forward_of, self.runs = forward, []

    def __call__(self, *inputs):
        self.runs.append(torch.is_grad_enabled())
        return self.forward_of(*inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_runs_exactly_once_more_and_only_then_with_a_graph(kind, monkeypatch):
    placed = placed_on("single")
    counted = []
    for block in placed.model.layers.values():
        for owner, name in (
            (block, "sublayers"),
            (block.attention, "core"),
            (block.attention.q, "forward"),
        ):
            counted.append((owner, Runs(getattr(owner, name))))
            object.__setattr__(owner, name, counted[-1][1])
    twice = replace(placed.plan, layout=replace(placed.plan.layout, recompute=kind))
    module.recompute(placed.model, twice)
    loss = made_loss(placed)
    first, both = [False], [False, True]
    wanted = {"full": (first, first, first), "selective": ([True], first, [True])}[kind]
    assert [runs.runs for _, runs in counted] == [*wanted] * len(placed.model.layers)
    loss.backward()
    wanted = {"full": (both, both, both), "selective": ([True], both, [True])}[kind]
    assert [runs.runs for _, runs in counted] == [*wanted] * len(placed.model.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_awaited_once(kind):
    placed = placed_on(f"recompute={kind}", form="untied")
    loss = made_loss(placed)
    in_blocks = [n for n in placed.store._awaited if n.startswith("layers.")]
    assert bool(in_blocks) is (kind == "selective")
    ready = []
    placed.store._ready = ready.append
    loss.backward()
    assert sorted(ready) == sorted(weight.name for weight in placed.plan.weights)


def test_without_a_graph_nothing_is_kept_and_nothing_runs_twice():
    runs = []

    def run(x):
        runs.append(x)
        return x * 2

    with torch.no_grad():
        out = again(run, torch.ones(2, requires_grad=True))
    assert not out.requires_grad and len(runs) == 1


def test_gradients_reach_the_inputs_that_want_them():
    x, y, rotary = (
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True),
        torch.ones(3),
    )
    again(lambda x, y, rotary: (x * y * rotary * 3).sum(), x, y * 2, rotary).backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0)) and torch.equal(y.grad, x.grad)
    assert rotary.grad is None


# -- bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "float32", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept_is_what_the_plan_lists(form, kind, packed, precision):
    words = f"recompute={kind}" if kind != "none" else "zero3"  # own operations there too
    placed = placed_on(words, form=form, precision=precision, dropout=0.1)
    kernels = replace(kernels_of(placed.plan), packed=packed)
    with SavedTensorMeter(placed.multiplied) as kept:
        loss = made_loss(placed, packed=packed)
    rows = {row.component: row.bytes for row in memory(placed.plan, 0, kernels)}
    assert kept.count(loss) == rows["activations"]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_second_run_makes_is_what_the_plan_lists(form, kind, packed, precision, monkeypatch):
    """Each second run is measured by itself; what was kept for it does not count again."""
    found = []

    def measured(run, besides, *tensors):
        if not torch.is_grad_enabled():
            return run(*tensors)
        with SavedTensorMeter([*besides, *tensors]) as kept:
            out = run(*tensors)
        found.append(kept.count(out))
        return out

    plain, weights_of = again, []
    watched = lambda run, *tensors: plain(partial(measured, run, weights_of), *tensors)  # noqa: E731
    monkeypatch.setattr(module, "again", watched)
    placed = placed_on(f"recompute={kind}", form=form, precision=precision, dropout=0.1)
    weights_of.extend(placed.multiplied)
    made_loss(placed, packed=packed).backward()
    plan, kernels = placed.plan, replace(kernels_of(placed.plan), packed=packed)
    lists = [made_again(plan.shape, part, kernels, kind) for part in parts(plan.shape)]
    sizes = [
        bytes_of(made, local_of(plan, 0), compute=plan.compute_bytes) for made in lists if made
    ]
    assert found == sizes
    rows = {row.component: row.bytes for row in memory(plan, 0, kernels)}
    assert rows["recomputed"] == max(sizes)


def test_the_first_blocks_of_each_stage_can_be_all_that_is_made_again():
    shape = replace(FORMS["laptop"], layers=6)
    plan = plan_of(shape, "pp2 recompute=selective:1 x2", Method())
    firsts = [next(p for p in parts if "." in p) for parts in plan.stages.parts]
    assert [p for p, how in plan.recompute.items() if how == "selective"] == firsts
    assert {how for p, how in plan.recompute.items() if p not in firsts} == {"none"}
    with pytest.raises(
        UserError, match="recompute=full:7 is over the 6 blocks; use recompute=full:6, or"
    ):
        plan_of(shape, "single x1 recompute=full:7", Method())


def test_blocks_can_be_named():
    shape = replace(FORMS["laptop"], layers=6)
    plan = plan_of(shape, "pp2 recompute=full:layers.0-1,4 x2", Method())
    again = [part for part, how in plan.recompute.items() if how == "full"]
    assert again == ["layers.0", "layers.1", "layers.4"]
    with pytest.raises(UserError, match=r"names layers.6, but the model's blocks are layers.0-5"):
        plan_of(shape, "single x1 recompute=full:layers.5-6", Method())
