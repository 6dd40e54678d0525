"""comm.algorithm in a recipe: its short form, refusals before a run, and what changes on resume."""

from dataclasses import replace

import pytest

from howdah.base.errors import UserError
from howdah.config.history import FREE, changes
from howdah.config.recipe import Machine, load_run, plan_of, resolve_run
from howdah.config.save import save_run
from howdah.plan.layout import parse_layout
from howdah.train.notes import algorithm_note

HERE = Machine(world=None, local_world=None, cores=4, cuda=0, cache=None)


def chosen(recipe, *overrides):
    return load_run(recipe, overrides).comm.algorithm.by_operation


def test_one_text_is_for_every_operation_that_has_it(recipe):
    assert chosen(recipe) == {}
    ring = dict.fromkeys(("broadcast", "all_gather", "reduce_scatter", "all_reduce"), "ring")
    assert chosen(recipe, "comm.algorithm=ring") == ring
    one = chosen(recipe, "comm.algorithm=ring", "comm.algorithm.all_reduce=default")
    assert one == ring | {"all_reduce": "default"}
    sized = "recursive_doubling to 64 KiB, ring"
    both = dict.fromkeys(("all_gather", "all_reduce"), sized)
    assert chosen(recipe, f"comm.algorithm={sized}") == both
    assert chosen(recipe, "comm.algorithm=ring", "comm.algorithm=default") == {}
    assert chosen(recipe, "comm.algorithm=bruck") == {"all_gather": "bruck"}
    assert "all_to_all" not in chosen(recipe, "comm.algorithm=hierarchical")


def test_a_saved_choice_reads_back_and_is_in_the_plan(recipe, tmp_path):
    run = load_run(recipe, ["comm.algorithm.all_reduce=butterfly", "layout=dp2"])
    save_run(run, tmp_path / "run.toml")
    again = load_run(tmp_path / "run.toml")
    assert again.comm == run.comm
    assert plan_of(again, parse_layout("dp2 x1")).comm == run.comm


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("comm.algorithm=rign", "comm.algorithm: all_reduce has no algorithm 'rign'; did you"),
        ("comm.algorithm.all_reduce=rign", "comm.algorithm: all_reduce has no algorithm 'rign'"),
        ("comm.algorithm=7", r"comm.algorithm is 7; it must be a table"),
        ("comm=ring", r"comm is 'ring'; it must be a table: write comm.algorithm='ring'"),
        ("comm.algorithm.allreduce=ring", "unknown key 'comm.algorithm.allreduce'; did you mean"),
        ("comm.algorithm.all_reduce=ring to 5 kB", "says nothing of longer vectors; write 'ring t"),
        ("comm.algorithm.all_reduce=ring, tree", "'ring' ends at no size; write NAME to 64 KiB"),
        ("comm.algorithm.all_reduce=ring to 5 kB, tree to 1 kB, torus", "sizes must rise"),
        ("comm.algorithm.all_reduce=torus dims=two", "write dims=2x4"),
        ("comm.algorithm.all_reduce=ring pieces=2", "all_reduce/ring has no option 'pieces'"),
        ("comm.algorithm.all_to_all=bruck", "whose sizes they do not know in training; use pair"),
        ("comm.algorithm.all_to_all=pairwise to 1 kB, bruck", "ranks may have other sizes"),
        ("comm.server_shares=[1]", "comm.server_shares is for servers and workers of method.sync"),
        ("comm.push_chunk=4194304", "comm.push_chunk is for servers and workers of method.sync"),
        ("comm.push_order=fifo", "comm.push_order is for servers and workers of method.sync"),
        ("comm.algorithm.all_reduce=hypercube", "not 6; use 4 or 8, or all_reduce/halving_doubli"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_a_process_starts(recipe, override, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        resolve_run(load_run(recipe, ["layout=dp6", "batch.global_batch=12", override]), HERE)
    assert str(refused.value).count("comm") <= 2, "told once"


def test_a_window_of_pushes_has_a_least_size(recipe):
    served = ("layout=server1", "method.grad_clip=0.0", "method.sync.workers=2")
    run = load_run(recipe, [*served, "comm.push_window=9", "comm.push_order=fifo"])
    with pytest.raises(UserError, match=r"comm.push_window is 9; it must be at least 65,536"):
        resolve_run(run, HERE)
    run = load_run(recipe, [*served, "comm.push_chunk=8388608"])
    with pytest.raises(UserError, match=r"push_chunk is 8388608; it must be at most 4,194,304"):
        resolve_run(run, HERE)


SIZES = r"comm.server_shares=\[.*the layout has server2: write as many numbers, or drop it"


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ("[1]", SIZES),
        ("[1, 1, 1]", SIZES),
        ("[2, 0]", r"comm.server_shares\[1\] is 0; it must be at least 1"),
    ],
)
def test_every_server_keeps_a_share(recipe, sizes, told):
    served = ("layout=server2", "method.grad_clip=0.0", "method.sync.workers=2")
    run = load_run(recipe, [*served, f"comm.server_shares={sizes}"])
    with pytest.raises(UserError, match=told):
        resolve_run(run, HERE)


def test_groups_that_the_algorithm_fits_are_those_that_use_it(recipe):
    """dp2 of six ranks: only the groups along the axes sum, never all six."""
    resolve_run(load_run(recipe, ["layout=pp3 dp2 x3", "comm.algorithm=hypercube"]), HERE)


def test_on_gpus_the_choice_is_refused(recipe):
    machine = replace(HERE, cuda=2)
    with pytest.raises(UserError, match=r"where NCCL chooses itself: leave comm\.algorithm and"):
        resolve_run(load_run(recipe, ["layout=dp2", "comm.algorithm=ring"]), machine)


def test_a_run_goes_on_with_another_choice_and_says_so(recipe):
    before, after = (load_run(recipe, [f"comm.algorithm={name}"]) for name in ("ring", "tree"))
    found = changes(before, after)
    assert found and set(found) <= FREE
    told = algorithm_note(found, done=10)
    assert "comm.algorithm.all_reduce was ring and is tree" in told
    assert "comm.algorithm.broadcast was ring and is default" in told
    assert told.endswith(": from step 11 on, sums are rounded in another order")
    assert algorithm_note({"layout": ("dp2", "dp4")}, done=10) == ""
