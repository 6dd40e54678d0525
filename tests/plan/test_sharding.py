"""Who holds what: every element once per replica, and what is summed follows from equal boxes."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from random_plans import plans

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.mesh_axes import axis
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.sharding import (
    heads,
    held,
    kv_heads,
    local_buffers,
    placement,
    replicas_of,
    tokens,
)
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import weights

SHAPE = ModelShape(layers=4, width=12, heads=6, kv_heads=2, ffn_size=20, vocab=50, context=32)


def plan_of(layout, shape=SHAPE, *, sequence=32):
    return make_plan(
        shape, parse_layout(layout), Batch(micro_batch=1), sequence=sequence, method=Method()
    )


def table(plan, rank=0):
    """name -> placement of one rank."""
    return {weight.name: placement(weight, plan, rank) for weight in weights(plan.shape)}


@settings(max_examples=40)
@given(plans())
def test_the_pieces_of_all_ranks_cover_every_tensor_once_per_replica(plan):
    for weight in weights(plan.shape):
        placements = [placement(weight, plan, rank) for rank in range(plan.layout.world)]
        counts = np.zeros(weight.shape, np.int64)
        for rank, placed in enumerate(placements):
            if placed and placed.owner == rank:
                counts[window(placed.box)] += 1
        assert (counts == 1).all(), weight


def window(box):
    return tuple(slice(c, c + n) for c, n in zip(box.corner, box.size, strict=True))


@settings(max_examples=40)
@given(plans())
def test_holders_are_the_ranks_with_equal_boxes_and_sums_are_parts_of_them(plan):
    for weight in weights(plan.shape):
        placements = {
            rank: placed
            for rank in range(plan.layout.world)
            if (placed := placement(weight, plan, rank))
        }
        equal = defaultdict(list)
        for rank, placed in placements.items():
            assert placed.box.elements > 0
            equal[placed.box].append(rank)
        for rank, placed in placements.items():
            assert list(placed.holders) == equal[placed.box], weight
            assert rank in placed.summed and set(placed.summed) <= set(placed.holders)
            # whoever is in a sum sees the same sum, and no holder has a gradient of its own
            assert all(placements[other].summed == placed.summed for other in placed.summed)
            assert len(placed.holders) % len(placed.summed) == 0
            # ranks that saw other tokens are always summed over
            copies = axis(plan.layout, replicas_of(weight.unit)).group(rank)
            assert set(copies) <= set(placed.summed)


@settings(max_examples=25)
@given(plans())
def test_a_rank_holds_what_is_placed_on_it(plan):
    for rank in range(plan.layout.world):
        boxes = held(plan, rank)
        placed = {
            weight.name: where.box
            for weight in weights(plan.shape)
            if (where := placement(weight, plan, rank))
        }
        assert boxes == placed
        laid = {s.name: s.box for b in local_buffers(plan, rank) for s in b.segments}
        assert laid == boxes


@settings(max_examples=25)
@given(plans())
def test_the_ranks_of_cp_share_out_every_position(plan):
    for rank in range(plan.layout.world):
        group = axis(plan.layout, "cp").group(rank)
        counts = [tokens(plan, other) for other in group]
        assert sum(counts) == plan.sequence
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("kv", range(1, 7))
@pytest.mark.parametrize("group", range(1, 4))
@pytest.mark.parametrize("ways", range(1, 13))
def test_a_query_head_lives_with_its_key_value_head(kv, group, ways):
    shape = ModelShape(
        layers=1,
        width=8,
        heads=kv * group,
        kv_heads=kv,
        head_size=2,
        ffn_size=8,
        vocab=8,
        context=8,
    )
    if ways > kv and (ways % kv or ways // kv > group):
        return  # refused by `check_plan`
    seen = []
    for part in range(ways):
        first, last = heads(shape, ways, part)
        own = kv_heads(shape, ways, part)
        assert last > first
        assert {head // group for head in range(first, last)} == set(range(*own))
        seen += range(first, last)
    assert seen == list(range(shape.heads))


# -- what is summed over whom ------------------------------------------------------


def test_data_parallel_replicas_hold_all_and_sum_all():
    for placed in table(plan_of("dp3")).values():
        assert placed.holders == placed.summed == (0, 1, 2)


def test_a_slice_of_tp_is_its_own_and_a_norm_is_the_same_everywhere():
    found = table(plan_of("dp2 tp2"))
    assert found["layers.0.attention.q.weight"].box.size == (6, 12)
    assert found["layers.0.attention.o.weight"].box.size == (12, 6)
    assert found["layers.0.attention.q.weight"].holders == (0, 2)
    norm = found["layers.0.attention_norm.weight"]
    assert (norm.holders, norm.summed) == ((0, 1, 2, 3), (0, 2))


def test_under_sp_a_norm_saw_other_tokens_on_every_part():
    norm = table(plan_of("dp2 tp2 sp"))["layers.0.attention_norm.weight"]
    assert norm.holders == norm.summed == (0, 1, 2, 3)


def test_key_value_heads_are_shared_by_a_part_of_tp():
    key = {rank: table(plan_of("tp6"), rank)["layers.0.attention.k.weight"] for rank in range(6)}
    assert [key[rank].box.corner[0] for rank in range(6)] == [0, 0, 0, 2, 2, 2]
    assert key[1].holders == key[1].summed == (0, 1, 2)
    assert key[4].holders == key[4].summed == (3, 4, 5)


def test_the_norm_of_each_head_and_the_router_are_parts_of_a_sum_on_every_part_of_tp():
    shape = ModelShape(
        layers=2,
        width=12,
        heads=6,
        ffn_size=20,
        vocab=50,
        context=32,
        qk_norm=True,
        experts=Experts(count=4, top_k=2, ffn_size=8),
    )
    found = table(plan_of("tp2", shape))
    for name in ("attention.q_norm.weight", "attention.k_norm.weight", "router.weight"):
        assert found[f"layers.0.{name}"].summed == (0, 1), name
    assert found["layers.0.feedforward_norm.weight"].summed == (0,)


def test_latent_projections_get_gradients_from_other_heads():
    shape = ModelShape(
        layers=2,
        width=12,
        heads=6,
        ffn_size=20,
        vocab=50,
        context=32,
        latent=Latent(kv_rank=5, query_rank=3, qk_nope_size=4, qk_rope_size=2, v_size=3),
    )
    found = table(plan_of("tp2", shape))
    for name in ("q_down", "q_norm", "kv_down", "kv_norm"):
        placed = found[f"layers.0.attention.{name}.weight"]
        assert placed.holders == placed.summed == (0, 1), name
    assert found["layers.0.attention.kv_up.weight"].box.size == (21, 5)


def test_experts_live_once_in_dp_over_ep_and_are_sliced_by_tp():
    shape = ModelShape(
        layers=2,
        width=12,
        heads=6,
        ffn_size=20,
        vocab=50,
        context=32,
        experts=Experts(count=5, top_k=2, ffn_size=7),
    )
    plan = plan_of("dp4 tp2 ep2", shape)
    name = "layers.1.experts.up.weight"
    boxes = {rank: table(plan, rank)[name] for rank in range(8)}
    assert [boxes[rank].box.size[:2] for rank in range(4)] == [(2, 3), (2, 4), (3, 3), (3, 4)]
    assert boxes[0].holders == boxes[0].summed == (0, 4)
    assert boxes[3].holders == boxes[3].summed == (3, 7)
    assert table(plan, 0)["layers.1.router.weight"].summed == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_tied_embedding_lives_on_both_end_stages_and_is_summed_over_them():
    shape = ModelShape(
        layers=4,
        width=12,
        heads=6,
        ffn_size=20,
        vocab=51,
        context=32,
        tie_embeddings=True,
        positions="learned",
    )
    plan = plan_of("pp2 dp2 tp2", shape)
    tied = table(plan)["embedding.weight"]
    assert tied.box.size == (25, 12)
    assert tied.holders == tied.summed == (0, 2, 4, 6)
    assert table(plan, 5)["embedding.weight"].box.corner == (25, 0)
    assert table(plan, 4)["positions.weight"] is None
    assert table(plan, 0)["norm.weight"] is None


def test_relative_positions_live_on_every_stage_of_their_stack():
    shape = ModelShape(
        family="encoder-decoder",
        layers=3,
        encoder_layers=3,
        width=12,
        heads=4,
        ffn_size=20,
        vocab=11,
        context=32,
        positions="relative",
    )
    plan = plan_of("pp2", shape)
    ends = {part: plan.rank_of_part[part] for part in ("encoder.0", "layers.2")}
    assert ends == {"encoder.0": 0, "layers.2": 1}
    biases = [name for name in table(plan) if name.startswith("relative")]
    holders = {name: (table(plan, 0)[name] or table(plan, 1)[name]).holders for name in biases}
    homes = {
        f"relative.{stack}.weight": tuple(
            sorted({plan.rank_of_part[p] for p in plan.rank_of_part if p.startswith(prefix)})
        )
        for stack, prefix in (("encoder", "encoder."), ("decoder", "layers."))
    }
    assert holders == homes
