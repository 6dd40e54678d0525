"""The words of pages and docstrings: none that hide who does what, none that are not used any more.

What a word stands for is in docs/glossary.md; how prose is written, in CONTRIBUTING.md.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = {"log.md", "matrix.md"}  # what was learned when, and what a script writes
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if p.name not in KEPT)
FILES = sorted(ROOT.glob("howdah/**/*.py"))

RIDDLES = ("whoever", "wherever", "anew", "in vain", "thereby", "hereby", "thereof", "lies")
OLD = {  # names that once stood for things, and what they are called now
    "BadInput": "UserError",
    "keeper": "weight store",
    "laps": "traces",
    "stepper": "step context",
    "milestones": "checkpointer",
    "foretell": "predict",
    "ffn_hidden": "ffn_size",
    "again2": "recompute=full:2",
}
BANNED = re.compile(rf"\b({'|'.join((*RIDDLES, *OLD))})\b", re.IGNORECASE)


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of a Python file, each with its line."""
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def banned(text: str) -> list[str]:
    return [found.lower() for found in BANNED.findall(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_speak_plainly(path):
    text = path.read_text("utf-8")
    if path.parent.name == "decisions" or path.name == "CHANGELOG.md":  # old names are code there
        text = re.sub(r"`[^`]*`", "", text)
    assert banned(text) == []


def test_docstrings_speak_plainly():
    found = {
        f"{path.relative_to(ROOT)}:{line}": words
        for path in FILES
        for line, text in prose_of(path.read_text("utf-8"))
        if (words := banned(text))
    }
    assert found == {}


def test_a_riddle_is_found():
    assert banned("Whoever comes first lies in a BadInput.") == ["whoever", "lies", "badinput"]
    assert list(prose_of('"""One."""\ndef f():\n    """Two."""\n')) == [(1, "One."), (2, "Two.")]
