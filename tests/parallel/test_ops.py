"""Own operations compute what torch's do, add gradients where they are kept, and can wait."""

import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPE, TIED, loss_of, micro, plan_of

from howdah.comm.transport import SingleRank
from howdah.model.norm import LayerNorm, RMSNorm
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.ops import Handle, embedding, head_loss, linear, norm, own_operations
from howdah.parallel.weight_store import UnitWeightStore
from howdah.plan.method import Method
from howdah.shapes.weights import weights


class Shelf:
    """Keeps a few tensors and the sums of their gradients."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.sums = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in tensors.items()}
        self.uses = []

    def value(self, name):
        return self.tensors[name]

    def rows(self, name, index):
        return self.tensors[name][index]

    def expect_gradient(self, name):
        self.uses.append(name)

    def add(self, name, add, *, now=False):
        add(self.sums[name])

    def add_rows(self, name, index, rows):
        self.sums[name].index_add_(0, index, rows)

    def handle(self, name):
        return Handle(name, self) if name in self.tensors else None


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torch_s(bias):
    x, weight, added = random(2, 3, 5), random(4, 5), random(4)
    tensors = {"weight": weight.detach(), **({"bias": added.detach()} if bias else {})}
    shelf, grad = Shelf(**tensors), torch.randn(2, 3, 4, dtype=torch.float64)
    own = linear(x, shelf.handle("weight"), shelf.handle("bias"))
    plain = F.linear(x, weight, added if bias else None)
    torch.testing.assert_close(own, plain)
    (d_x,) = torch.autograd.grad(own, x, grad)
    wanted = torch.autograd.grad(plain, [x, weight, *([added] if bias else [])], grad)
    for mine, other in zip([d_x, *shelf.sums.values()], wanted, strict=True):
        torch.testing.assert_close(mine, other)
    assert shelf.uses == list(tensors)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_is_the_model_s(kind):
    plain = kind(6, 1e-5).double()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    shelf = Shelf(**{name: p.detach() for name, p in plain.named_parameters()})
    x, grad = random(2, 3, 6), torch.randn(2, 3, 6, dtype=torch.float64)
    own = norm(x, shelf.handle("weight"), shelf.handle("bias"), 1e-5)
    torch.testing.assert_close(own, plain(x))
    (d_x,) = torch.autograd.grad(own, x, grad)
    wanted = torch.autograd.grad(plain(x), [x, *plain.parameters()], grad)
    for mine, other in zip([d_x, *shelf.sums.values()], wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_embedding_adds_up_rows_that_occur_often():
    shelf, table = Shelf(weight=torch.randn(7, 3, dtype=torch.float64)), torch.zeros(())
    tokens, grad = torch.tensor([[1, 1, 4], [1, 0, 4]]), torch.randn(2, 3, 3, dtype=torch.float64)
    out = embedding(tokens, shelf.handle("weight"), table.requires_grad_())
    out.backward(grad)
    wanted = torch.zeros(7, 3, dtype=torch.float64)
    for token, row in zip(tokens.flatten(), grad.flatten(0, 1), strict=True):
        wanted[token] += row
    torch.testing.assert_close(shelf.sums["weight"], wanted)


def test_nothing_is_awaited_where_no_backward_follows():
    shelf = Shelf(weight=torch.randn(4, 5, dtype=torch.float64))
    with torch.no_grad():
        linear(random(2, 5), shelf.handle("weight"))
        head_loss(random(2, 5), shelf.handle("weight"), torch.tensor([1, 2]))
    linear(random(2, 5).detach(), shelf.handle("weight"))
    assert shelf.uses == []


# -- a whole model


def both(shape, precision="float64"):
    """A placed model, and the same with own operations and the names that became ready."""
    method = Method(precision)
    plan = plan_of(shape, "dp1", method)
    mesh, placed = connect_mesh(plan.layout, SingleRank(), torch.device("cpu")), []
    for _ in range(2):
        placed.append(apply(plan, mesh=mesh, fill=random_init(weights(shape), 5)))
    ready = []
    units, target = placed[1].units, placed[1].sums.target
    store = UnitWeightStore(units, target, ready.append)
    own_operations(placed[1].model, store)
    return *placed, store, ready


def loss_with_handles(placed, given):
    arrays = given.tokens, given.positions, given.documents, given.labels
    tokens, positions, documents, labels = map(torch.from_numpy, arrays)
    hidden = placed.model(tokens, positions, documents)
    return head_loss(hidden, placed.model.head_weight, labels)


@pytest.mark.parametrize("precision", ["float64", "float32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["plain", "tied"])
def test_a_model_of_own_operations_has_the_same_gradients(shape, precision):
    plain, own, _, ready = both(shape, precision)
    for number in range(2):
        first = loss_of(plain.model, micro(number, shape=shape))
        second = loss_with_handles(own, micro(number, shape=shape))
        near = {"float64": 1e-12, "float32": 1e-5, "bf16": 3e-2}[precision]
        torch.testing.assert_close(first, second, rtol=near, atol=near)
        first.backward()
        second.backward()
    assert not list(own.model.parameters())
    assert sorted(ready) == sorted([w.name for w in weights(shape)] * 2)
    for name, unit in plain.units.items():
        mine, other = own.units[name].gradients, unit.gradients
        assert (mine - other).norm() <= near * other.norm(), name


def kept_by(function):
    """The tensors that a function keeps in its closure, and the functions in it in theirs."""
    found = []
    for cell in function.__closure__ or ():
        inside = cell.cell_contents
        found += [inside] if isinstance(inside, torch.Tensor) else []
        found += kept_by(inside) if hasattr(inside, "__closure__") else []
    return found


def test_weight_gradients_can_wait():
    plain, own, store, ready = both(SHAPE)
    loss_of(plain.model, micro(0)).backward()
    store.defer()
    loss_with_handles(own, micro(0)).backward()
    waiting = store.take_deferred()
    done = {
        name
        for unit in own.units.values()
        for name, view in unit.views(unit.gradients).items()
        if view.any()
    }
    assert not ready and done == {"head.weight"}
    matrices = [w for w in weights(SHAPE) if w.name.startswith("layers.") and len(w.shape) > 1]
    kept = [tensor for add in waiting for tensor in kept_by(add) if tensor.ndim > 1]
    # inputs and gradients of outputs, and the embedding's rows; of logits, none
    assert len(kept) == 2 * len(matrices) + 1
    assert all(tensor.shape[1] <= max(SHAPE.width, SHAPE.ffn_size) < SHAPE.vocab for tensor in kept)
    for add in reversed(waiting):
        add()
    assert len(ready) == len(weights(SHAPE))
    for name, unit in plain.units.items():
        torch.testing.assert_close(own.units[name].gradients, unit.gradients)
