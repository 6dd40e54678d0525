"""Parameter servers: who serves, what each keeps, and what cannot be combined with them."""

from dataclasses import replace

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import pieces
from howdah.plan.gathers import pulls
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method, Sync
from howdah.plan.plan import make_plan
from howdah.plan.servers import kept_range, server_groups, serves, summed_range
from howdah.plan.sharding import local_buffers
from howdah.plan.sums import sums_of
from howdah.plan.worker_ranks import served_ranges
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape

SHAPE = small_shape(preset("laptop"), context=16)


def plan_of(layout, **method):
    settings = replace(Method(), **method)
    return make_plan(SHAPE, parse_layout(layout), Batch(8, 1), sequence=16, method=settings)


def test_servers_are_behind_the_workers():
    layout = parse_layout("dp3 server2")
    assert (layout.workers, layout.world) == (3, 5)
    assert [serves(layout, rank) for rank in range(5)] == [False, False, False, True, True]
    assert server_groups(layout) == [(0, 1, 2, 3), (0, 1, 2, 4)]
    assert [kept_range(7, layout, rank) for rank in range(5)] == [(0, 0)] * 3 + [(0, 3), (3, 7)]


@pytest.mark.parametrize(("world", "dp"), [(3, 1), (6, 4)])
def test_the_rest_of_the_processes_are_workers(world, dp):
    assert resolve(parse_layout("dp* server2"), world) == parse_layout(f"dp{dp} server2")


def test_servers_that_only_add_keep_nothing_and_workers_everything():
    layout = parse_layout("update=workers server2 dp3")
    assert str(layout) == "dp3 server2 update=workers"
    assert [kept_range(7, layout, rank) for rank in range(5)] == [(0, 7)] * 3 + [(0, 0)] * 2
    ranges = [(0, 0)] * 3 + [(0, 3), (3, 7)]
    assert [summed_range(7, layout, rank) for rank in range(5)] == ranges


def test_who_updates_is_asked_beside_servers_alone():
    with pytest.raises(UserError, match="update=workers is for parameter servers; add server1"):
        parse_layout("dp2 update=workers")


def test_too_few_processes_for_workers_are_refused():
    with pytest.raises(UserError, match=r"a multiple of 1 and 2 processes .* the nearest is 3"):
        resolve(parse_layout("dp* server2"), 2)


def test_every_gradient_is_pushed_once():
    plan = plan_of("dp2 server2")
    lists = [sums_of(plan, rank) for rank in range(4)]
    assert lists[0] == lists[1] == lists[2] == lists[3]
    assert {row.op for row in lists[0]} == {"push"}
    names = [name for row in lists[0] for name in row.names]
    assert sorted(names) == sorted(weight.name for weight in plan.weights)


@pytest.mark.parametrize(("words", "keys"), [("tp2", 2), ("tp2 sp", 1), ("tp4", 2), ("tp4", 1)])
def test_ranks_of_a_worker_push_every_element_once_and_are_given_what_they_do_not_pull(words, keys):
    """With 1 and 2 key-value heads, some ranks of tp4 hold the same head."""
    shape, method = replace(SHAPE, heads=4, kv_heads=keys), {"sync": Sync("asp"), "grad_clip": 0.0}
    plan = make_plan(
        *(shape, parse_layout(f"{words} server2"), Batch(8, 1)),
        sequence=16,
        method=replace(Method(), **method),
    )
    pushed = {weight.name: np.zeros(weight.shape, int) for weight in plan.weights}
    for one in served_ranges(plan):
        for piece, _, _ in pieces(one.buffer, one.start, one.stop):
            inside = np.unravel_index(np.arange(piece.start, piece.stop), piece.box.size)
            corner = np.array(piece.box.corner)[:, None]
            np.add.at(pushed[piece.name], tuple(np.array(inside) + corner), 1)
    assert all((count == 1).all() for count in pushed.values())
    for rank in range(plan.layout.tp):
        for buffer in local_buffers(plan, rank):
            comes = np.zeros(buffer.length, int)
            for row in pulls(plan, rank):
                if row.unit == buffer.unit:
                    comes[row.start : row.stop] += row.root != rank
            assert (comes == 1).all()


def test_servers_and_workers_list_the_same_pulls():
    """Each server gives its range of every unit to all workers, who list it alike."""
    plan = plan_of("dp2 server2")
    rows = [[*pulls(plan, rank)] for rank in range(4)]
    assert rows[0] == rows[1] and {*rows[0]} == {*rows[2], *rows[3]} and not {*rows[2]} & {*rows[3]}
    assert {(row.axis, row.ranks, row.root) for row in rows[0]} == {
        ("dp", (0, 1, 2), 2),
        ("dp", (0, 1, 3), 3),
    }
    assert not [*pulls(plan_of("dp2 server2 update=workers"), 0)]


@pytest.mark.parametrize(
    ("layout", "method", "sentence"),
    [
        ("dp2 zero1 server1", {}, "server1 and zero1 both share out the states; drop one of them"),
        ("tp2 server1", {}, "the workers of server1 have a rank each so far; drop tp2, or server1"),
        (
            "pp2 server1",
            {"sync": Sync("asp"), "grad_clip": 0.0},
            "the workers of server1 have ranks of tp alone so far; drop pp2, or server1",
        ),
        ("dp2 server1", {"gradient_dtype": "bf16"}, "use gradient_dtype=full, or drop server1"),
        ("single", {"sync": Sync("asp"), "grad_clip": 0.0}, "needs parameter servers; add server1"),
        ("server1", {"sync": Sync("asp")}, "method.grad_clip=1 needs the norm of all gradients"),
        (
            "dp4 server1",
            {"sync": Sync("ssp", 3), "grad_clip": 0.0},
            "the layout describes one worker; drop dp4, and use method.sync.workers=4",
        ),
        (
            "server2 update=workers",
            {"sync": Sync("bsp", workers=4), "grad_clip": 0.0},
            "drop update=workers, or method.sync for a layout such as dp4 server2 update=workers",
        ),
        (
            "server1",
            {"sync": Sync("asp", 3), "grad_clip": 0.0},
            "bounds how far workers are apart, which asp does not ask; use kind=ssp, or drop bound",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(layout, method, sentence):
    with pytest.raises(UserError) as caught:
        plan_of(layout, **method)
    assert sentence in str(caught.value)
