"""The heat map of experts, and where they would best be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from howdah.cli.commands import app
from howdah.draw.experts import Heat, heat_svg, heat_text
from howdah.plan.expert_places import busiest, by_load, by_number

HEAT = Heat({"layers.1": [0, 20, 10, 10], "layers.2": [10, 10, 10, 10]}, 5, 20, 4)


def test_a_row_for_each_block_and_a_shade_for_each_expert():
    assert heat_text(HEAT, [2]).splitlines() == [
        "tokens of each expert, 4 steps from 5 to 20",
        "",
        "layers.1  | @++|    0% to 200%",
        "layers.2  |++++|  100% to 100%",
        "",
        "the busiest rank beside the mean, over all blocks:",
        "  ep2    by number 1.00   by load 1.00",
    ]


def test_of_many_experts_a_column_is_the_busiest_of_several():
    heat = Heat({"layers.0": [1] * 127 + [129]}, 1, 1, 1)
    text = heat_text(heat, [])
    assert "each column is the busiest of 2 experts" in text
    assert "|" + "+" * 0 in text and text.count("@") == 1


def test_the_drawing_names_every_expert():
    drawn = heat_svg(HEAT)
    assert drawn.count("<rect") == 1 + 8
    assert "layers.1, expert 1: 20 tokens, 200%" in drawn


@given(
    tokens=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    ranks=st.integers(1, 8),
)
def test_every_expert_has_one_place_and_ranks_have_as_many_as_by_number(tokens, ranks):
    ranks = min(ranks, len(tokens))
    found, usual = by_load(tokens, ranks), by_number(len(tokens), ranks)
    assert sorted(expert for some in found for expert in some) == [*range(len(tokens))]
    assert [*map(len, found)] == [*map(len, usual)]
    assert found == by_load([*tokens], ranks)
    # the busiest has at most the mean of others and one expert more
    assert busiest(tokens, found) >= 1 or not sum(tokens)


def test_busy_experts_are_kept_apart():
    tokens = [90, 10, 40, 40, 15, 5]
    assert by_load(tokens, 2) == ((0, 1, 5), (2, 3, 4))
    assert busiest(tokens, by_number(6, 2)) == pytest.approx(1.4)
    assert busiest(tokens, by_load(tokens, 2)) == pytest.approx(1.05)


def test_the_command_reads_a_run_and_leaves_out_damaged_lines(tmp_path):
    rows = [
        {"kind": "train", "step": 5, "experts": {"layers.1": [3, 1]}},
        {"kind": "held_out", "step": 5, "loss": 1.0},
        {"kind": "train", "step": 10, "experts": {"layers.1": [1, 3]}},
    ]
    spoilt = [[], {"layers.1": 5}, {"layers.1": ["a"]}, {"layers.2": [1, 2]}, {"layers.1": [1]}]
    rows[1:1] = [{"kind": "train", "step": 6, "experts": one} for one in spoilt]
    rows.insert(1, {"kind": "train", "step": None, "experts": {"layers.1": [1, 1]}})
    text = "\n".join(json.dumps(row) for row in rows) + "\n" + "[" * 100_000 + "\n"
    (tmp_path / "metrics.jsonl").write_bytes(text.encode() + b'\xff{"kind": "tra')
    said = CliRunner().invoke(app, ["draw", "experts", str(tmp_path)])
    assert said.exit_code == 0 and "2 steps from 5 to 10" in said.output
    assert "|++|  100% to 100%" in said.output
    said = CliRunner().invoke(app, ["draw", "experts", str(tmp_path), "--steps", "1"])
    assert "1 steps from 10 to 10" in said.output and "50% to 150%" in said.output


def test_a_folder_without_counts_gets_a_sentence(tmp_path):
    said = CliRunner().invoke(app, ["draw", "experts", str(tmp_path)])
    assert said.exit_code != 0 and "name a run folder" in str(said.exception)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    said = CliRunner().invoke(app, ["draw", "experts", str(tmp_path)])
    assert "no counts of experts" in str(said.exception)
