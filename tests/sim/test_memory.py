"""Memory against the papers' tables, against schedules, and against tensors that exist."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans

from howdah.comm.transport import SingleRank
from howdah.model.loss import cross_entropy_sum
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.saved_bytes import SavedTensorMeter
from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import buffers
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import make_plan
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.registry import SCHEDULES, build
from howdah.plan.sharding import local_buffers
from howdah.plan.stages import even, looped
from howdah.shapes.activations import CLASSIC, FLASH, howdah
from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, ModelShape
from howdah.shapes.weights import parts, parts_of, weights
from howdah.sim.memory import Width, memory, peak, states

# The ZeRO paper's: 2-byte gradients, and K = 12 of a master and two moments.
PAPER = Width(2, 4, 2, 8, gathered=2, reduced=2)
GPT = ModelShape(
    layers=8,
    width=32,
    heads=8,
    ffn_size=128,
    vocab=64,
    context=64,
    feedforward="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
)
STATES = ("weights", "masters", "gradients", "moments")


def plan_of(layout, shape=GPT, *, sequence=64, micro=1, precision="bf16"):
    return make_plan(
        shape,
        parse_layout(layout),
        Batch(micro_batch=micro),
        sequence=sequence,
        method=Method(precision=precision),
    )


def held(plan, rank=0, kernels=CLASSIC, width=None):
    """component -> bytes, in whichever homes"""
    rows = memory(plan, rank, kernels, width)
    assert len({(row.component, row.home) for row in rows}) == len(rows)
    names = [row.component for row in rows]
    return {one: sum(row.bytes for row in rows if row.component == one) for one in names}


# -- the tables of the papers ------------------------------------------------------

# https://arxiv.org/abs/1910.02054, table 1, in GB: stages 1, 2, 3 for each number of replicas.
ZERO = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


def of_states(elements, n, zero, width=PAPER):
    """Bytes on one of n replicas."""
    layout = Layout(dp=n, zero=zero)
    own = elements / n if zero else elements
    return sum(row.bytes for row in states(elements, own, layout, width))


def one_digit(printed):
    """One unit of the last printed digit; the paper truncates some cells."""
    return 10.0 ** -len(str(printed).partition(".")[2])


@pytest.mark.parametrize("elements", ZERO)
def test_the_table_of_zero(elements):
    for n, printed in ZERO[elements].items():
        for zero, cell in enumerate(printed, start=1):
            found = of_states(elements, n, zero) / 1e9
            assert found == pytest.approx(cell, abs=one_digit(cell)), (n, zero)


def test_without_sharding_replicas_save_nothing():
    assert [of_states(7.5e9, n, 0) for n in (1, 64, 1024)] == [120e9] * 3


def test_savings_are_four_eight_and_n_fold():
    saving = [of_states(1e9, 1024, 0) / of_states(1e9, 1024, zero) for zero in (1, 2, 3)]
    assert [round(one) for one in saving] == [4, 8, 1024]


def test_what_64_devices_of_32_gb_reach():
    """7.5B, 14B and 128B for the three stages; a trillion on 1024."""
    for zero, elements in ((1, 7.5e9), (2, 14e9), (3, 128e9)):
        assert of_states(elements, 64, zero) <= 32e9 < of_states(1.05 * elements, 64, zero)
    assert of_states(1e12, 1024, 3) <= 32e9


def test_replicas_alone_do_not_reach_1_5_billion_on_32_gb():
    """The paper's batch of 32 sequences of 1024, with every block recomputed."""

    def need(words):
        plan = plan_of(f"{words} x1 recompute=full", preset("gpt2-1.5b"), sequence=1024, micro=32)
        return peak(memory(plan, 0, CLASSIC, PAPER))

    assert need("dp64") > 32e9 > need("dp64 zero1")


def test_175_billion_parameters():
    rows = {row.component: row.bytes / 1e9 for row in states(175 * 10**9, 0, Layout(), PAPER)}
    assert rows == {"weights": 350, "masters": 700, "gradients": 350, "moments": 1400}


def test_7_5_billion_parameters_take_15_gb_and_120_to_train():
    rows = states(75 * 10**8, 0, Layout(), PAPER)
    assert (rows[0].bytes, sum(row.bytes for row in rows)) == (15e9, 120e9)


@pytest.mark.parametrize(("layout", "devices"), [("pp3 x1", 1), ("pp3 tp2 x1", 2)])
def test_an_embedding_of_64000_words(layout, devices):
    """64,000 rows of 5120 in float32, on a stage of its own; half of it on each of two devices."""
    shape = replace(GPT, layers=1, width=5120, heads=40, vocab=64_000, positions="rotary")
    plan = plan_of(layout, shape, precision="float32")
    assert plan.stages.parts[0] == ("embedding",)
    found = held(plan)
    assert found["weights"] == found["gradients"] == 1250 * 2**20 // devices


def test_maverick_s_weights_are_800_gb_of_bf16():
    shape = preset("llama4-maverick")
    assert held(plan_of("single x1", shape))["weights"] == pytest.approx(800e9, rel=0.005)
    expert = 3 * 5120 * 8192  # of each of 24 blocks, 128 of them on 128 ranks
    whole, cut = (held(plan_of(f"dp128 x1 {ep}", shape))["weights"] for ep in ("", "ep128"))
    assert whole - cut == 24 * 127 * expert * 2


# -- activations -------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 4])
def test_activations_of_a_block_of_gpt(t):
    """https://arxiv.org/abs/2205.05198, equations 1 to 6, on a stage of blocks alone."""
    s, b, h, a = 64, 2, GPT.width, GPT.heads
    unit, scores = s * b * h, 5 * a * s / h
    rows = {
        "": 10 + 24 / t + scores / t,
        " recompute=selective": 10 + 24 / t,
        " recompute=full": 2,
    }
    if t > 1:
        rows |= {" sp": (34 + scores) / t, " sp recompute=selective": 34 / t}
        rows[" sp recompute=full"] = 2 / t
    for words, factor in rows.items():
        plan = plan_of(f"pp4 tp{t} naive x1{words}", micro=b)
        blocks = plan.stages.parts[1]
        assert all(part.startswith("layers.") for part in blocks)
        assert held(plan, rank=t)["activations"] == len(blocks) * unit * factor, words


def test_the_backward_pass_makes_one_block_again():
    plain, full, part = (
        held(plan_of(f"pp4 naive x1{words}"), rank=1)
        for words in ("", " recompute=full", " recompute=selective")
    )
    blocks = len(plan_of("pp4 naive x1").stages.parts[1])
    for again in (full, part):
        assert plain["activations"] == again["activations"] + blocks * again["recomputed"]
    assert "recomputed" not in plain


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [1, 3, 4, 40])
def test_micro_batches_in_flight(p, m):
    shape = replace(GPT, layers=16)
    for i in range(p):
        one = held(plan_of(f"pp{p} naive x{m}", shape), rank=i)["activations"]
        assert held(plan_of(f"pp{p} 1f1b x{m}", shape), i)["activations"] == min(m, p - i) * one
        assert held(plan_of(f"pp{p} gpipe x{m}", shape), i)["activations"] == m * one


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3)])
def test_the_first_rank_of_an_interleaved_pipeline(p, v):
    """p(1 + (p - 1)/(pv)) micro-batches of all its stages, where those are equal."""
    shape = replace(GPT, layers=p * v * 4)
    plan = plan_of(f"pp{p} interleaved v{v} x{4 * p}", shape)
    plan = replace(plan, stages=even(parts(shape), looped(p, v)))
    one = plan_of("pp4 naive x1", shape)
    block = held(one, rank=1)["activations"] / len(one.stages.parts[1])
    blocks = p * (1 + (p - 1) / (p * v)) * 4 * v * block
    mask = 64 * GPT.width  # behind the embedding, in the first of its stages
    assert blocks < held(plan)["activations"] <= blocks + 2 * p * mask


@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.steady])
def test_steady_schedules_hold_no_more_from_some_micro_batches_on(name):
    virtual, slices = SCHEDULES[name].stages, 3 if name == "terapipe" else 1
    for p in (2, 3, 5):
        enough = 4 * p * virtual
        for rank in range(p):
            few, many = (
                peak_held(build(name, ranks=p, micros=m, virtual=virtual, slices=slices), rank)
                for m in (enough, 2 * enough + 1)
            )
            assert few == many


# -- homes and windows -------------------------------------------------------------


def test_homes_move_bytes():
    base = {row.component: row for row in memory(plan_of("dp2 x1"), 0, FLASH)}
    for home in ("host", "disk"):
        rows = memory(plan_of(f"dp2 x1 optimizer={home}"), 0, FLASH)
        (staged,) = (row for row in rows if row.component == "staged")
        assert staged.home == "host"  # what an update moves at a time
        rows.remove(staged)
        for row in rows:
            moved = row.component in ("masters", "moments")
            assert row == base[row.component]._replace(home=home if moved else "device")
        assert peak(rows, home) == base["masters"].bytes + base["moments"].bytes


@settings(max_examples=60)
@given(plans())
def test_homes_conserve_all_but_windows(plan):
    at_home = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), "device")
    home = replace(plan, layout=replace(plan.layout, **at_home))
    windows = ("gathered", "reduced", "recomputed", "staged")
    if plan.layout.weights != plan.layout.optimizer:
        windows += ("masters",)  # which are the weights themselves in float32, at one home
    before, after = (held(one, kernels=FLASH) for one in (home, plan))
    for component in {*before, *after} - {*windows}:
        assert before[component] == after[component]
    assert all(after.get(name, 0) >= before.get(name, 0) for name in windows)


@pytest.mark.parametrize("words", ["dp2 zero3", "weights=host gradients=disk"])
def test_two_units_are_gathered_and_one_reduced(words):
    """What is not kept whole on the device comes there by units: the largest, and the next."""
    lengths = sorted(unit.length for unit in buffers(weights(GPT)))
    found = held(plan_of(f"{words} x1"))
    assert found["gathered"] == 2 * (lengths[-1] + lengths[-2])
    assert found["reduced"] == 4 * sum(lengths)  # one bucket, of less than 4 MiB


def test_whole_gradients_have_a_window_of_a_few_buckets():
    """Two; one more from the tied head to the embedding; one while parts of tp are summed."""
    tied = replace(GPT, width=1024, heads=8, ffn_size=4096, layers=8, tie_embeddings=True)
    apart = replace(tied, tie_embeddings=False)

    def slots(words, shape=tied):
        plan = plan_of(words, shape)
        longest = max(unit.length for unit in local_buffers(plan, 0))
        return held(plan).get("reduced", 0) // (4 * longest)

    assert slots("dp2 zero2 x2") == 3 and slots("dp2 zero2 x2", apart) == 2
    assert slots("pp2 dp2 zero2 x4") == 2  # embedding and head are on two ranks
    assert slots("pp2 dp2 zero2 zb-v x4") == 3
    assert slots("dp2 tp2 sp zero2 x2", apart) == 3
    assert slots("dp2 zero2 accumulate=whole x2") == slots("zero2 x2") == 0


def test_all_units_are_gathered_where_they_stay_for_the_step():
    total = sum(unit.length for unit in buffers(weights(GPT)))
    assert held(plan_of("dp2 zero3 release=step x1"))["gathered"] == 2 * total


def test_experts_that_live_on_one_rank_each_are_not_gathered():
    shape = replace(GPT, bias=False, experts=Experts(4, 1, ffn_size=4096))
    expert = 2 * 32 * 4096
    assert held(plan_of("dp4 ep4 zero3 x1", shape))["gathered"] < expert
    assert held(plan_of("dp4 ep2 zero3 x1", shape))["gathered"] > 2 * expert
    assert not {"gathered", "reduced"} & {*held(plan_of("zero3 x1", shape))}


def test_an_update_needs_no_activations():
    rows = memory(plan_of("dp2 zero3 x1 recompute=full"), 0, CLASSIC)
    kept = [row for row in rows if row.component in STATES]
    assert all(row.moments == ("passes", "update") for row in kept)
    assert all(row.moments == ("passes",) for row in rows if row not in kept)
    assert peak(rows) == sum(row.bytes for row in rows)
    assert peak(kept) == sum(row.bytes for row in kept)


# -- for all plans -----------------------------------------------------------------


@settings(max_examples=60)
@given(plans(), st.sampled_from([CLASSIC, FLASH, howdah(compute=2)]))
def test_nothing_is_negative(plan, kernels):
    for rank in {0, plan.layout.world // 2, plan.layout.world - 1}:
        assert all(row.bytes > 0 for row in memory(plan, rank, kernels))


@settings(max_examples=60)
@given(plans())
def test_shares_of_all_ranks_are_the_model(plan):
    """Padding included; what is tied lies on each of its stages."""
    words = {"tp": 1, "sp": False, "ep": 1, "zero": 3, "shard": None, "accumulate": None}
    words["inputs"] = "sliced"
    plan = replace(plan, layout=replace(plan.layout, **words))
    total = sum(held(plan, rank, FLASH).get("weights", 0) for rank in range(plan.layout.world))
    units = buffers(weights(plan.shape))
    model = sum(
        unit.length * len({plan.rank_of_part[part] for part in parts_of(unit.unit, plan.shape)})
        for unit in units
    )
    assert total == model * plan.compute_bytes


@settings(max_examples=60)
@given(plans())
def test_more_sharding_never_needs_more_states(plan):
    needs = []
    for zero in range(4):
        layout = replace(plan.layout, zero=zero, accumulate=None, shard=None, release="use")
        rows = held(replace(plan, layout=layout), 0, FLASH)
        needs.append(sum(rows.get(name, 0) for name in STATES))
    assert needs == sorted(needs, reverse=True)


# -- tensors that exist ------------------------------------------------------------


def nbytes(tensors):
    """Bytes of the storages behind them, each once."""
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["bf16", "float32", "float64"])
def test_the_laptop_s_recipe_allocates_what_is_planned(precision, optimizer):
    shape, rows, length = preset("laptop"), 4, 256
    method = Method(precision, Optimizer(optimizer))
    plan = make_plan(
        shape, Layout(), Batch(micro_batch=rows, global_batch=rows), sequence=length, method=method
    )
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(shape), 1))
    mesh.close()
    units = placed.units.values()
    found = held(plan, kernels=howdah(compute=plan.compute_bytes))
    assert found["weights"] == nbytes(unit.weights for unit in units)
    assert found["gradients"] == nbytes(unit.gradients for unit in units)
    both = [tensor for unit in units for tensor in (unit.weights, unit.masters)]
    assert found["weights"] + found.get("masters", 0) == nbytes(both)  # in float32 they are one
    kept = [t for state in placed.optimizer.state.values() for t in state.values() if t.ndim]
    assert found["moments"] == sum(tensor.nbytes for tensor in kept)

    tokens = torch.randint(shape.vocab, (rows, length + 1), generator=torch.manual_seed(0))
    positions = torch.arange(length).expand(rows, length).contiguous()
    with SavedTensorMeter(placed.model.parameters()) as saved:
        hidden = placed.model(tokens[:, :-1].contiguous(), positions, None, noise=None)
        labels = tokens[:, 1:].contiguous()
        loss = cross_entropy_sum(hidden, placed.model.head_weight, labels)
    assert found["activations"] == saved.count(loss)
