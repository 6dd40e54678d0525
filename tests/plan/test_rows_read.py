"""Which tables of tokens are read by their rows, and how many bytes that is."""

from dataclasses import replace

import pytest
from small_cases import case_of

from howdah.plan.gather_order import gather_counts, never_whole, rows_added, rows_read
from howdah.plan.homes import moves, staged_bytes
from howdah.plan.sums import sums_of
from howdah.plan.window import window_of
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory

HOST = "weights=host gradients=host optimizer=host"


@pytest.mark.parametrize(
    ("words", "form", "unit"),
    [
        ("single x2", "laptop", "tied"),
        ("single x2", "untied", "embedding"),
        ("single x2", "gpt2", "tied"),  # positions are a unit of their own
        ("cp2 zero3 x1", "laptop", ""),  # zero3 shares the table out
        ("dp2 zero3 x1", "untied", ""),
        ("tp2 x1", "laptop", ""),
        ("pp2 x2", "untied", "embedding"),
    ],
)
def test_a_table_of_one_rank_is_read_by_its_rows(words, form, unit):
    plan = case_of(f"{words} {HOST}", form=form).plan
    assert rows_read(plan) == (unit, 32 if unit else 0)
    assert never_whole(plan) == ("embedding" if unit == "embedding" else "")
    ranks = range(plan.layout.world)
    rows = {rank: move for rank in ranks for move in moves(plan, rank) if move.what == "rows"}
    assert [*rows] == ([0] if unit else []), "the rank with the embedding"
    for move in rows.values():
        assert move.bytes == 32 * plan.shape.width * 8 and move.times == plan.micros
        assert move.unit == unit
    comes = gather_counts(plan, ranks[-1] if unit == "tied" else 0)[unit or "layers.0"]
    assert comes == (0 if unit == "embedding" else plan.micros * (1 if unit else 2))


@pytest.mark.parametrize(("words", "tokens"), [("dp2 x2", 32), ("cp2 x1", 8)])
@pytest.mark.parametrize(("form", "unit"), [("laptop", "tied"), ("untied", "embedding")])
def test_replicas_with_whole_tables_read_their_rows(words, tokens, form, unit):
    """It was asked how many replicas there are, not whether they share the table out."""
    plan = case_of(f"{words} weights=host optimizer=host", form=form).plan
    assert rows_read(plan) == (unit, tokens) and rows_added(plan) == ("", 0)
    for rank in range(2):
        (read,) = (move for move in moves(plan, rank) if move.what == "rows")
        assert read.bytes == tokens * plan.shape.width * 8 and read.times == plan.micros


def test_as_many_tokens_as_rows_and_tables_beside_it_and_disks_bring_the_whole_unit():
    plan = case_of(f"single x1 {HOST}").plan
    for tokens, unit in ((63, "tied"), (64, "")):
        batch = replace(plan.batch, micro_batch=1, global_batch=1)
        assert rows_read(replace(plan, batch=batch, sequence=tokens))[0] == unit
    positions = replace(case_of("single x1", form="gpt2").shape, tie_embeddings=False)
    there = case_of(f"single x1 {HOST}")
    assert rows_read(replace(there, shape=positions).plan) == ("", 0)
    assert rows_read(case_of(f"single x1 {HOST.replace('host', 'disk')}").plan) == ("", 0)


def test_the_window_has_no_room_for_what_is_never_whole():
    """With a vocabulary so large that the embedding is the largest unit, beside the head."""
    case = case_of(f"single x1 {HOST}", form="untied")
    plan = replace(case, shape=replace(case.shape, vocab=4096)).plan
    (gathered,) = (one for one in memory(plan, 0, kernels_of(plan)) if one.component == "gathered")
    lengths = {b: sum(w.elements for w in plan.weights if w.unit == b) for b in plan.bundles}
    assert gathered.bytes == 8 * (lengths["head"] + max(lengths["layers.0"], lengths["layers.1"]))


@pytest.mark.parametrize(
    ("words", "form", "added"),
    [
        (f"single x2 {HOST}", "untied", True),
        (f"pp2 x2 {HOST}", "untied", True),
        (f"single x2 {HOST}", "laptop", False),  # the head has a gradient for each of its rows
        (f"single x2 {HOST.replace('gradients=host', 'gradients=disk')}", "untied", False),
        ("single x2 weights=host optimizer=host", "untied", False),
    ],
)
def test_a_row_for_each_token_goes_to_the_gradient_of_a_table_that_no_head_uses(words, form, added):
    plan = case_of(words, form=form).plan
    assert rows_added(plan) == (("embedding", 32) if added else ("", 0))
    sums = [row for row in sums_of(plan, 0) if row.by_tokens]
    assert [row.names for row in sums] == [("embedding.weight",)] * added
    goes = [one for one in moves(plan, 0) if one.operation == "evict rows"]
    assert [(one.bytes, one.times, one.unit) for one in goes] == [
        (32 * plan.shape.width * 8, plan.micros, "embedding")
    ] * added
    of_table = [one for one in moves(plan, 0) if one.unit in ("tied", "embedding")]
    whole = [one for one in of_table if one.what == "gradients"]
    assert any(not one.update for one in whole) == (not added and "gradients=" in words)


def test_a_gradient_that_is_added_by_rows_needs_no_room_on_the_device():
    case = case_of(f"single x1 {HOST}", form="untied")
    plan = replace(case, shape=replace(case.shape, vocab=1 << 16)).plan
    (reduced,) = (one for one in memory(plan, 0, kernels_of(plan)) if one.component == "reduced")
    slots, length = window_of(plan, 0)
    head = sum(one.elements for one in plan.weights if one.unit == "head")
    assert length == head and reduced.bytes == 8 * slots * head
    assert staged_bytes(plan, 0) == 8 * 16 * plan.shape.width
