"""Parts of tensor parallelism: what they keep, sum and skip; the whole is proved in
tests/distributed/test_tensor_parallel.py.
"""

from dataclasses import replace

import pytest
import torch
from small_cases import case_of

from howdah.base.stopwatch import Stopwatch
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.ops import Handle
from howdah.parallel.saved_bytes import SavedTensorMeter
from howdah.parallel.tensor import Column, Columns, VocabEmbedding
from howdah.parallel.tensor_border import TpRegion
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.train.feed import arrays_of
from howdah.train.step import StepContext
from howdah.verify.evidence import global_batch


def first_micro(case):
    """The first two rows of the case's text, whose documents are of different length."""
    rows = global_batch(case, 0)
    arrays = {name: array for name, array in vars(rows).items() if name != "more"}
    return replace(rows, **{name: array[:2].copy() for name, array in arrays.items()})


def on_ranks(transport, case, function):
    """`function(context, micro)` on every rank of the case's layout."""
    mesh = connect_mesh(case.layout, transport, torch.device("cpu"))
    placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
    try:
        return function(StepContext(placed, mesh, case.method, case.seed), first_micro(case))
    finally:
        mesh.close()


def run(workers, case, function):
    return workers.run(on_ranks, case, function, ranks=case.layout.world)


# -- memory ----------------------------------------------------------------------


def kept_and_planned(context, micro):
    placed = context.placed
    with SavedTensorMeter([*placed.model.parameters(), *placed.multiplied]) as kept:
        given = arrays_of(micro, placed.mesh.device)
        loss = placed.executor.alone(0, given, placed.loss)["loss"]
    plan = placed.plan
    rows = memory(plan, context.mesh.rank, kernels_of(plan))
    return kept.count(loss), sum(row.bytes for row in rows if row.component == "activations")


KEPT = "tp2 sp x2 inputs=gathered"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", ["tp2 x2", "tp2 sp x2", "tp4 sp x2", KEPT])
@pytest.mark.parametrize("form", ["qwen3", "gpt2", "laptop"])
def test_saved_activations_are_those_that_were_planned(workers, form, layout, precision):
    if form == "gpt2" and "tp4" in layout:
        layout = layout.replace("tp4", "tp2")  # it has two heads
    case = case_of(layout, form=form, precision=precision)
    for kept, planned in run(workers, case, kept_and_planned):
        assert kept == planned


@pytest.mark.parametrize("layout", ["tp3 x2", "tp3 sp x2"])
def test_parts_of_other_sizes_keep_what_was_planned_for_each(workers, layout):
    """16 positions are slices of 5, 5 and 6; four heads are 1, 1 and 2; 29 columns 9, 10, 10."""
    case = case_of(layout, form="qwen3")
    sizes = {"heads": 8, "kv_heads": 4, "width": 40, "head_size": 8, "ffn_size": 29, "vocab": 67}
    case = replace(case, shape=replace(case.shape, **sizes))
    found = run(workers, case, kept_and_planned)
    assert [kept for kept, _ in found] == [planned for _, planned in found]
    assert len({kept for kept, _ in found}) > 1


# -- one operation, watched --------------------------------------------------------


class Log:
    """Keeps tensors, and notes the order in which things happen."""

    def __init__(self, **tensors):
        self.tensors, self.events = tensors, []
        self.sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def value(self, name):
        return self.tensors[name]

    def expect_gradient(self, name):
        self.events.append(f"use {name}")

    def add(self, name, add, *, now=False):
        self.events.append(f"add {name}")
        add(self.sums[name])


class Watched(TpRegion):
    """A region with nobody on the other side, which notes in a log when it is crossed."""

    def __init__(self, log, *, length, sliced):
        waited = Stopwatch()
        super().__init__(group=None, length=length, sliced=sliced, keeps=False, waited=waited)
        object.__setattr__(self, "log", log)

    def gather_in(self, x, *, now=False):
        self.log.events.append("gather")
        return lambda: self.log.events.append("gathered") or x

    def reduce_out(self, x, *, now=False):
        self.log.events.append("sum")
        return lambda: self.log.events.append("summed") or x


def test_weights_are_given_their_gradients_while_the_inputs_is_summed():
    log = Log(q=torch.randn(4, 3), k=torch.randn(2, 3), b=torch.randn(2))
    region = Watched(log, length=5, sliced=True)
    together = Columns([(Handle("q", log), None), (Handle("k", log), Handle("b", log))], region)
    q, k = Column(together, 0), Column(together, 1)
    x = torch.randn(2, 5, 3, requires_grad=True)
    log.events.clear()
    queries, keys = q(x), k(x)
    torch.testing.assert_close(keys, x @ log.tensors["k"].T + log.tensors["b"])
    assert log.events == ["use q", "use k", "use b", "gather", "gathered"]
    log.events.clear()
    (queries.sum() + keys.square().sum()).backward()
    assert log.events == ["gather", "sum", "gathered", "add q", "add b", "add k", "summed"]
    wanted = torch.ones(2, 5, 4) @ log.tensors["q"] + 2 * keys.detach() @ log.tensors["k"]
    torch.testing.assert_close(x.grad, wanted)


def test_tokens_of_other_parts_have_no_row_here():
    log = Log(rows=torch.randn(3, 2))
    region = Watched(log, length=4, sliced=False)
    part = VocabEmbedding(Handle("rows", log), region, first=5)
    out = part(torch.tensor([[4, 5, 7, 8]]))
    wanted = torch.stack([torch.zeros(2), log.tensors["rows"][0], log.tensors["rows"][2]])
    torch.testing.assert_close(out[0], wanted[[0, 1, 2, 0]])
    out.sum().backward()
    assert log.sums["rows"].tolist() == [[1, 1], [0, 0], [1, 1]]
