"""Parallel equals single where some weights are frozen, and where adapters are trained beside them.

Every case compares losses, norms, gradients of what is trained and all weights after two steps with
plain PyTorch on one device, and predicted bytes with those that were sent and held.
"""

from dataclasses import replace

import pytest
import torch
from small_cases import case_of, prove

from howdah.plan.method import Adapter

SLOW = pytest.mark.slow
TOP = ("layers.1.*", "norm.*=0.5")  # the first block has no backward pass
ALL = Adapter(rank=3, targets=("q", "k", "v", "o", "up", "down"))
DORA = replace(ALL, kind="dora")
LOW = ("layers.0.attention.q.weight", "layers.1.feedforward.*=3")  # the head keeps nothing


def trained(layout, form="laptop", train=(), adapter=None, precision="float64"):
    case = case_of(layout, form=form, precision=precision)
    return replace(case, method=replace(case.method, train=train, adapter=adapter))


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        ("dp2 zero3 x2", LOW),
        ("tp2 sp", LOW),
        ("pp2 1f1b x3", TOP),
        *(
            pytest.param(layout, train, marks=SLOW)
            for train in (TOP, LOW)
            for layout in (
                *("single", "dp2 x2", "dp2 zero1 x2", "dp2 zero2 x2", "tp2", "pp2 zb-h1 x3"),
                *("dp2 recompute=full x2", "tp2 sp recompute=full", "tp2 recompute=selective"),
                *("dp2 zero3 release=step", "dp2 zero3 gather=broadcast", "dp4 zero2 shard2 x2"),
                *("dp2 tp2 sp zero3 recompute=full", "cp2", "cp2 context=all-to-all"),
                *("tp2 sp inputs=gathered", "pp2 interleaved v2 x2"),
            )
        ),
    ],
)
@pytest.mark.parametrize("form", ["laptop", pytest.param("gpt2", marks=SLOW)])
def test_parts_of_a_model_are_trained_alike(workers, layout, train, form):
    prove(trained(layout, form, train), workers)


HOST = "weights=host gradients=host optimizer=host activations=host"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("train", [(), LOW])
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        (f"single x2 {HOST}", "untied"),
        (f"dp2 zero3 x2 {HOST.replace('host', 'disk')}", "laptop"),
        *(
            pytest.param(layout, form, marks=SLOW)
            for form in ("laptop", "gpt2")
            for layout in (
                "single x2 optimizer=host",
                "single x2 activations=host",
                "dp2 zero1 x2 optimizer=disk",
                "dp2 zero2 x2 gradients=host optimizer=host",
                f"dp2 zero3 gather=broadcast x2 {HOST}",
                f"pp2 1f1b x3 {HOST}",
                f"tp2 sp x2 {HOST}",
            )
        ),
    ],
)
def test_what_is_frozen_comes_from_its_home(workers, layout, form, train):
    """It comes as often as what is trained beside it, and nothing of it goes back."""
    adapter = None if train else ALL
    prove(trained(layout, form, train, adapter), workers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 zero3", "tp2 sp", "pp2 1f1b x3", "pp2 zb-h1 x3"])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=3, targets=("q", "o", "down")), DORA])
def test_breaks_are_noticed(workers, layout, adapter):
    verdict = prove(trained(layout, "qwen3", TOP, adapter), workers, controls=True)
    assert len(verdict.controls) >= 3 and all(failing for _, failing in verdict.controls)
    in_part = "rows measured in part" in dict(verdict.controls)
    assert in_part == (adapter is DORA and layout == "tp2 sp")


SOME = Adapter(rank=2, targets=("layers.1.*.o.weight", "layers.1.attention.v.weight"))


@pytest.mark.parametrize(
    ("layout", "adapter", "train"),
    [
        ("tp2 sp", ALL, ()),
        ("dp2 zero3 recompute=full x2", ALL, ()),
        *(
            pytest.param(layout, adapter, train, marks=SLOW)
            for adapter, train in ((ALL, ()), (SOME, ("*.lora_b.*=4", "layers.1.attention_norm.*")))
            for layout in (
                *("single", "dp2 x2", "dp2 zero1 x2", "dp2 zero2 x2", "tp2", "pp2 zb-h1 x3"),
                *("tp2 sp recompute=selective", "tp2 sp inputs=gathered", "pp2 tp2 sp x2"),
                *("dp2 tp2 sp zero2 recompute=full", "cp2", "pp2 1f1b x3"),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "form", ["laptop", *(pytest.param(f, marks=SLOW) for f in ("gpt2", "qwen3"))]
)
def test_adapters_are_trained_alike(workers, layout, adapter, train, form):
    prove(trained(layout, form, train, adapter), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "adapter", "train"),
    [
        ("tp2 sp", DORA, ()),
        ("dp2 zero3 recompute=full x2", DORA, ()),
        *(
            pytest.param(layout, adapter, train, marks=SLOW)
            for adapter, train in (
                (DORA, ()),
                (replace(SOME, kind="dora"), ("*.lora_magnitude.*=4", "layers.1.attention_norm.*")),
            )
            for layout in (
                *("single", "dp2 x2", "dp2 zero1 x2", "dp2 zero2 x2", "tp2", "pp2 zb-h1 x3"),
                *("tp2 sp recompute=selective", "tp2 sp inputs=gathered", "pp2 tp2 sp x2"),
                *("dp2 tp2 sp zero2 recompute=full", "cp2", "pp2 1f1b x3", "dp2 zero3"),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "form", ["laptop", *(pytest.param(f, marks=SLOW) for f in ("gpt2", "qwen3"))]
)
def test_lengths_of_rows_are_trained_alike(workers, layout, adapter, train, form):
    """DoRA: with the lengths of rows of which ranks have columns, and bytes of their sums."""
    prove(trained(layout, form, train, adapter), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("adapter", [ALL, DORA])
def test_key_value_heads_that_ranks_share_have_adapters(workers, adapter):
    """Four ranks, two key-value heads: B and lengths of a key are the same on two of them."""
    prove(trained("tp4", "laptop", (), adapter), workers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "dp2 zero3 x2", "tp2 sp"])
@pytest.mark.parametrize("adapter", [ALL, DORA])
def test_adapters_in_bf16_are_within_their_rounding(workers, layout, adapter):
    prove(trained(layout, "laptop", (), adapter, "bf16"), workers)


def test_frozen_weights_have_no_gradient():
    from howdah.comm.transport import SingleRank
    from howdah.parallel.apply import apply
    from howdah.parallel.flat_params import random_init
    from howdah.parallel.mesh import connect_mesh

    case = trained("single", "laptop", TOP)
    with connect_mesh(case.layout, SingleRank(), torch.device("cpu")) as mesh:
        placed = apply(case.plan, mesh=mesh, fill=random_init(case.plan.weights, 3))
        frozen = placed.units["frozen.layers.0"]
        assert frozen.gradients is None and not len(frozen.masters) and not len(frozen.summed)
        named = dict(placed.model.named_parameters())
        assert {n for n, one in named.items() if one.requires_grad} == {
            weight.name for weight in case.plan.weights if weight.rate
        }


def test_adapters_begin_as_those_of_peft():
    """A is spread evenly over ±1/√in, whoever draws which part of it; B is zero."""
    from howdah.parallel.flat_params import random_init
    from howdah.plan.boxes import Box, Piece

    case = trained("single", "laptop", (), replace(ALL, rank=8))
    a, b = (case.plan.weight(f"layers.0.attention.q.lora_{one}.weight") for one in "ab")
    fill, reach = random_init(case.plan.weights, 3), a.shape[1] ** -0.5
    whole = torch.empty(a.elements)
    fill(Piece(a.name, a.shape, Box((0, 0), a.shape), 0, a.elements), whole)
    assert whole.abs().max() < reach and whole.unique().numel() > 0.9 * a.elements
    assert abs(whole.std() / (reach / 3**0.5) - 1) < 0.1 and abs(whole.mean()) < 0.15 * reach
    box = Box((0, 8), (8, 8))  # a rank's columns
    part = torch.empty(64)
    fill(Piece(a.name, a.shape, box, 0, 64), part)
    assert torch.equal(part.view(8, 8), whole.view(a.shape)[:, 8:16])
    zeros = torch.ones(b.elements)
    fill(Piece(b.name, b.shape, Box((0, 0), b.shape), 0, b.elements), zeros)
    assert not zeros.any()
