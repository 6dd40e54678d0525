"""Groups against brute force: the ranks whose coordinates differ along one axis alone."""

from itertools import product
from typing import get_args

import pytest

from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, axis


def divisors(total):
    return [n for n in range(1, total + 1) if total % n == 0]


def worlds(world):
    """Every pp, dp, cp, tp with that many ranks."""
    for pp in divisors(world):
        for cp in divisors(world // pp):
            for tp in divisors(world // pp // cp):
                yield pp, world // (pp * cp * tp), cp, tp


def split(wanted, key, ranks):
    """The ranks that agree with `wanted` in `key`."""
    return [rank for rank in ranks if key(ranks[rank]) == key(ranks[wanted])]


@pytest.mark.parametrize("world", range(1, 65))
def test_mesh_groups_are_those_of_the_coordinates(world):
    for pp, dp, cp, tp in worlds(world):
        layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
        ranks = dict(enumerate(product(range(pp), range(dp), range(cp), range(tp))))
        keys = {
            "pp": lambda c: c[1:],
            "dp": lambda c: (c[0], c[2], c[3]),
            "cp": lambda c: (c[0], c[1], c[3]),
            "tp": lambda c: c[:3],
            "replicas": lambda c: (c[0], c[3]),
        }
        for name, key in keys.items():
            for rank in {0, world // 3, world - 1}:
                assert list(axis(layout, name).group(rank)) == split(rank, key, ranks)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("world", [1, 2, 6, 8, 12, 16, 24, 48, 64])
def test_expert_and_shard_groups_are_those_of_the_coordinates(world):
    for pp, dp, cp, tp in worlds(world):
        for ep, shard in product(divisors(dp * cp), divisors(dp * cp)):
            layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, zero=1, shard=shard)
            outer = product(range(pp), range(dp * cp), range(tp))
            ranks = dict(enumerate(outer))
            keys = {
                "ep": lambda c, ep=ep: (c[0], c[1] // ep, c[2]),
                "expert_replicas": lambda c, ep=ep: (c[0], c[1] % ep, c[2]),
                "shard": lambda c, g=shard: (c[0], c[1] // g, c[2]),
                "across": lambda c, g=shard: (c[0], c[1] % g, c[2]),
            }
            for name, key in keys.items():
                for rank in {0, world // 2, world - 1}:
                    assert list(axis(layout, name).group(rank)) == split(rank, key, ranks)


@pytest.mark.parametrize("name", get_args(Axis))
def test_the_groups_of_an_axis_share_out_the_world(name):
    layout = Layout(pp=2, dp=6, cp=2, tp=3, ep=4, zero=1, shard=6)
    groups = {tuple(axis(layout, name).group(rank)) for rank in range(layout.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert [axis(layout, name).index_of(rank) for rank in group] == list(range(len(group)))


def test_the_copies_of_an_expert_are_shared_out_inside_the_groups_of_the_dense_states():
    layout = Layout(dp=8, ep=2, zero=1, shard=4)
    assert list(axis(layout, "shard").group(0)) == [0, 1, 2, 3]
    assert list(axis(layout, "expert_shard").group(0)) == [0, 2]
    assert list(axis(layout, "expert_across").group(0)) == [0, 4]
