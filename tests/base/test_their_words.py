"""Other trainers' words are answered with howdah's, and every answer can be used."""

import re
from pathlib import Path

import pytest

from howdah.base.tables import _paths
from howdah.base.their_words import KEYS, LAYOUT, ours
from howdah.config.recipe import Run
from howdah.plan.layout import parse_layout

PAGE = (Path(__file__).parents[2] / "docs" / "their-words.md").read_text(encoding="utf-8")


def with_numbers(words):
    """A layout's words with N and G filled in, and with what they cannot be without."""
    filled = re.sub(r"zeroN", "zero2", words)
    filled = re.sub(r"(?<=[a-z])N", "4", filled).replace("shardG", "shard2")
    more = {
        "release": " dp4 zero3",
        "accumulate": " dp4 zero2",
        "interleaved": " pp2",
        "ep4": " dp4",
    }
    return filled + more.get(filled.split("=")[0].split()[0], "")


@pytest.mark.parametrize("word", LAYOUT)
def test_every_answer_about_a_layout_is_one(word):
    assert parse_layout(with_numbers(LAYOUT[word]))


@pytest.mark.parametrize("word", KEYS)
def test_every_answer_about_a_key_is_one(word):
    key, equals, words = KEYS[word].partition("=")
    if equals:
        assert key == "layout" and parse_layout(with_numbers(words))
    else:
        assert key in set(_paths(Run, ""))


def test_words_are_known_however_they_are_spelled():
    assert ours("FULL_SHARD", LAYOUT) == ours("full-shard", LAYOUT) == "dpN zero3"
    assert ours("ddp2", LAYOUT) == ours("DDP=2", LAYOUT) == "dpN"
    assert ours("reshard_after_forward=False", LAYOUT) == "release=step"
    assert ours("walrus", LAYOUT) == ours("", KEYS) == ""


@pytest.mark.parametrize(
    ("heading", "table"), [("Words in a layout", LAYOUT), ("Keys in a recipe", KEYS)]
)
def test_the_page_shows_every_word(heading, table):
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.M)) == table
