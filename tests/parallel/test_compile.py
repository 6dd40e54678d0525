"""Compiled models: how often torch.compile compiles, where it breaks, and that nothing changes.

Every block was compiled by itself, because its name stood in what was compiled: from the ninth on,
torch gave up and ran them eagerly. Rows packed in another way, and each step's noise, were reasons
to compile again too; and a block of own operations was broken into sixteen graphs.
"""

from dataclasses import fields, replace

import pytest
import torch
from tiny import plan_of

from howdah.comm.transport import SingleRank
from howdah.model.islands import PLAIN
from howdah.model.noise import Noise
from howdah.parallel.apply import apply
from howdah.parallel.compile import compile_model
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.ops import own_operations
from howdah.parallel.stages import Given
from howdah.parallel.weight_store import UnitWeightStore
from howdah.plan.method import Method
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights

SHAPE = ModelShape(layers=10, width=16, heads=2, ffn_size=32, vocab=20, context=16)
GPT = replace(
    SHAPE, norm="layernorm", positions="learned", feedforward="gelu", bias=True, norm_at="after"
)
TOKENS = torch.arange(32).reshape(2, 16) % 20
POSITIONS = torch.arange(16).expand(2, 16).contiguous()
CUTS = range(1, 12)


def packed(step):
    """Documents of two rows, cut elsewhere at each step."""
    return (torch.arange(16) > torch.tensor([[step], [15 - step]])).long()


def placed_model(shape, words, *, dropout, own=False, precision="float64"):
    plan = plan_of(shape, words, Method(precision, dropout=dropout))
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 5))
    if own:
        store = UnitWeightStore(placed.units, placed.sums.target, lambda name: None)
        own_operations(placed.model, store)
        placed = replace(placed, store=store)
    return placed


def trained(placed, step):
    """The loss and the gradients of a step."""
    for unit in placed.units.values():
        unit.gradients.zero_()
    noise = Noise(1, step, torch.tensor([2 * step, 2 * step + 1]))
    given = Given(TOKENS, TOKENS.roll(1, 1), POSITIONS, packed(step), noise)
    loss = placed.executor.alone(0, given, placed.loss)["loss"]
    loss.backward()
    return [loss.detach(), *(unit.gradients.clone() for unit in placed.units.values())]


@pytest.fixture
def counters():
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


def graphs(counters):
    assert not counters["graph_break"]
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at tensors in ways that warn
@pytest.mark.parametrize("own", [False, True], ids=["whole", "islands"])
@pytest.mark.parametrize("shape", [SHAPE, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_one_compilation_for_all_cuts_blocks_and_steps(counters, own, shape, dropout):
    compiled = placed_model(shape, "dp1", dropout=dropout, own=own)
    compile_model(compiled.model, whole=not own, backend="aot_eager")
    plain = placed_model(shape, "dp1", dropout=dropout, own=own)
    first = trained(compiled, 0)
    made = graphs(counters)
    # a block, the loss and its gradient, and the last norm and its gradient where there is one
    assert own or made == (5 if shape is SHAPE else 3)
    assert made <= len(fields(PLAIN)) + 3  # rotation back; norms of a head's size
    found = [first, *(trained(compiled, step) for step in CUTS)]
    assert graphs(counters) == made
    for step, mine in zip([0, *CUTS], found, strict=True):
        for one, two in zip(mine, trained(plain, step), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [False, True], ids=["whole", "islands"])
def test_gradients_that_are_wider_than_weights_break_no_graph(counters, own):
    """bf16 weights have gradients in float32, which the compiler refuses."""
    words = {"dropout": 0.0, "own": own, "precision": "bf16"}
    compiled, plain = (placed_model(SHAPE, "dp1", **words) for _ in range(2))
    compile_model(compiled.model, whole=not own, backend="aot_eager")
    trained(compiled, 0)
    made = graphs(counters)
    for step in (0, *CUTS):
        mine, other = trained(compiled, step), trained(plain, step)
        for one, two in zip(mine, other, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-3)
        assert any(one.abs().max() > 0 for one in mine[1:])
    assert graphs(counters) == made
