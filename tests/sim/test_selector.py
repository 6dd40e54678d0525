"""The selector: the least price of all, by sizes and groups, and what its texts mean."""

from dataclasses import replace

import pytest
from round_steps import plan_of, wires

from howdah.base.errors import UserError
from howdah.collectives.check import problems
from howdah.collectives.choice import everywhere, program_of
from howdah.machines.cluster import Level, Tree
from howdah.plan.comm import Algorithms, Comm
from howdah.sim.chosen import collectives_of, settled_plan, shapes_in
from howdah.sim.predict import predict
from howdah.sim.programs import price
from howdah.sim.selector import (
    DEFAULT,
    SIZED,
    SIZES,
    Shape,
    best,
    candidates,
    chosen_text,
    direct,
    lines,
    places,
    settle,
)

SHAPES = (Shape(4, 1), Shape(4, 2), Shape(3, 1), Shape(2, 2))


def hosts(nodes, each, *, slow=(), levels=(), message=3e-5):
    """1 Gbit/s between hosts, 50 Gbit/s inside; 100 us of a message's way."""
    made = wires(6e9, 1.2e8, nodes=nodes, per_node=each, latency=1e-4)
    between = replace(made.between, message=message)
    return replace(made, nics=1, between=between, slow=slow, network=Tree(levels))


FLAT = hosts(4, 2)
ROUGH = hosts(4, 2, levels=(Level(2, 4.0),), slow=((1, 3e7),))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("cluster", [FLAT, ROUGH], ids=["flat", "rough"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_chosen_has_the_least_price_of_all(cluster, shape):
    """Every algorithm priced at the very size, and not by its line."""
    for op in ("all_reduce", "all_gather", "broadcast", "reduce"):
        first, *beside = places(cluster, shape)
        text = chosen_text(cluster, op, shape)
        for size in SIZES[::2]:
            each = {
                name: price(one, cluster, size=size, places=first, beside=beside).overlapped
                for name, one in candidates(op, shape)
            }
            taken = best(cluster, op, shape, size)
            assert each[taken] <= 1.001 * min(each.values()), (op, size, taken)
            said = Algorithms(**{op: f"{shape}: {text}"}) if text else Algorithms()
            found = program_of(
                said, op, size=size, ranks=shape.hosts * shape.each, per_node=shape.each
            )
            assert (found.spelled if found else DEFAULT).startswith(taken.split(" ")[0])


def test_every_algorithm_of_the_registry_is_a_candidate():
    names = {text.split(" ")[0] for op in SIZED for text, _ in candidates(op, Shape(4, 2))}
    assert {"ring", "hierarchical", "leader", "double_tree", "one_shot", "bruck"} <= names
    assert not {"torus", "mesh"} & names, "networks of switches have no dims"


@pytest.mark.parametrize("op", [*SIZED, "all_to_all"])
def test_direct_exchanges_are_proved(op):
    for ranks in (2, 3, 8):
        assert problems(direct(op, ranks)) == []


def test_a_slow_card_changes_the_choice():
    """What sends the least over it wins; between equal cards something else does."""
    even, slow = hosts(8, 1), hosts(8, 1, slow=((7, 1e7),))
    shape = Shape(8, 1)
    texts = {op: (chosen_text(even, op, shape), chosen_text(slow, op, shape)) for op in SIZED}
    assert any(one != other for one, other in texts.values()), texts
    for op in SIZED:
        for size in SIZES:
            line = {one.text: one.fixed + one.byte * size for one in lines(slow, op, shape)}
            assert line[best(slow, op, shape, size)] == min(line.values())


def test_a_measured_correction_changes_the_choice():
    shape, size = Shape(4, 1), 1 << 20
    taken = best(FLAT, "all_reduce", shape, size)
    row = ("all_reduce", taken, "4x1", size, 3.0)
    other = best(FLAT, "all_reduce", shape, size, [row])
    assert other != taken
    others = [("all_reduce", taken, "2x2", size, 3.0), ("reduce", taken, "4x1", size, 3.0)]
    assert best(FLAT, "all_reduce", shape, size, others) == taken
    assert best(FLAT, "all_reduce", shape, 4 * size, [row]) == best(
        FLAT, "all_reduce", shape, 4 * size
    )


def test_where_the_likeliest_were_measured_no_other_is_taken():
    """All of them took longer than their prices, and one that was not measured would seem cheap."""
    shape, size = Shape(4, 1), 1 << 10
    ordered = sorted(lines(FLAT, "broadcast", shape), key=lambda one: one.fixed + one.byte * size)
    likely = {*(one.text for one in ordered[:2]), "default"}
    rows = [("broadcast", text, "4x1", size, 1.5) for text in likely]
    assert ordered[2].fixed < 1.5 * ordered[0].fixed
    assert best(FLAT, "broadcast", shape, size, rows) == ordered[0].text
    assert best(FLAT, "broadcast", shape, size, rows[:0]) == ordered[0].text


def test_messages_that_cost_work_favour_few_of_them():
    """The direct way has as many messages of a rank as there are others."""
    shape = Shape(8, 1)
    free, dear = hosts(8, 1, message=0.0), hosts(8, 1, message=1e-3)
    assert best(free, "all_gather", shape, 1024) == DEFAULT
    assert best(dear, "all_gather", shape, 1024) in ("bruck", "recursive_doubling")


def test_only_what_is_left_open_is_chosen():
    said = replace(everywhere("auto"), broadcast="binomial", gather="")
    found = settle(said, FLAT, [Shape(4, 2), Shape(1, 2), Shape(4, 1)])
    assert found.broadcast == "binomial" and found.gather == ""
    assert "1x2" not in found.all_reduce, "inside a host the transport's own way stays"
    assert found.all_reduce.startswith("4x1: ") and "| 4x2: " in found.all_reduce
    alone = settle(said, None, [])
    assert alone.by_operation == {"broadcast": "binomial"}


def test_groups_that_a_cluster_has_not_are_refused():
    with pytest.raises(UserError, match="has no groups of 8x1"):
        lines(FLAT, "all_reduce", Shape(8, 1))


def test_a_plan_left_open_is_planned_as_what_is_chosen():
    plan = replace(plan_of("dp4 tp2 x1"), comm=Comm(everywhere("auto")))
    assert shapes_in(plan, 2) == {Shape(4, 1), Shape(1, 2)}
    settled = settled_plan(plan, FLAT)
    assert "4x1: " in settled.comm.algorithm.all_reduce
    calls = [call for call in collectives_of(plan, 0) if call.op == "all_reduce"]
    nodes = [[rank // 2 for rank in call.ranks] for call in calls]
    programs = [
        call.program(settled.comm.algorithm, on) for call, on in zip(calls, nodes, strict=True)
    ]
    assert any(programs)
    one, other = predict(plan, FLAT), predict(settled, FLAT)
    assert one.traffic == other.traffic and one.time.seconds == other.time.seconds
    assert one.traffic != predict(replace(plan, comm=Comm()), FLAT).traffic
    assert settled_plan(plan, None).comm.algorithm == Algorithms()


@pytest.mark.parametrize(("factor", "own"), [(1.0, True), (0.92, True), (0.5, False)])
def test_the_own_way_stays_where_nothing_measured_is_clearly_cheaper(factor, own):
    shape, size, op = Shape(4, 1), 1 << 20, "all_reduce"
    line = {one.text: one.fixed + one.byte * size for one in lines(FLAT, op, shape)}
    rows = [
        (op, "ring", "4x1", size, factor / line["ring"]),
        (op, DEFAULT, "4x1", size, 1 / line[DEFAULT]),
    ]
    assert best(FLAT, op, shape, size, rows) == (DEFAULT if own else "ring")
