"""The words of pages, docstrings, comments and messages: none that hide who does what, none that
are not used any more; and how docstrings begin.

What a word stands for is in docs/glossary.md; how prose is written, in CONTRIBUTING.md.
"""

import ast
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

import pytest

ROOT = Path(__file__).parents[1]
KEPT = {"log.md", "matrix.md"}  # what was learned when, and what a script writes
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if p.name not in KEPT)
FILES = sorted(ROOT.glob("howdah/**/*.py"))

RIDDLES = (
    *("whoever", "wherever", "anew", "in vain", "out loud", "thereby", "hereby", "thereof"),
    *("whereupon", "upon", "lies", "spoken"),
)
POINTS = re.compile(  # how a docstring begins that cannot be understood without another one
    r"See `?[\w.]+`?\.|(That|Those) of\b|The same([,.]| of| for| with| under| as| on)\b|"
    r"(Whether|Waits until) (it|they) (is|are)( here)?\."
)
OLD = {  # names that once stood for things, and what they are called now
    "BadInput": "UserError",
    "keeper": "weight store",
    "laps": "traces",
    "lend": "stage",
    "stepper": "step context",
    "milestones": "checkpointer",
    "foretell": "predict",
    "ffn_hidden": "ffn_size",
    "again2": "recompute=full:2",
}
BANNED = re.compile(rf"\b({'|'.join((*RIDDLES, *OLD))})\b", re.IGNORECASE)


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Comments and texts of a Python file, docstrings among them, each with its line."""
    for token in generate_tokens(StringIO(source).readline):
        if token.type == COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def banned(text: str) -> list[str]:
    return [found.lower() for found in BANNED.findall(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_speak_plainly(path):
    text = path.read_text("utf-8")
    if path.parent.name == "decisions" or path.name == "CHANGELOG.md":  # old names are code there
        text = re.sub(r"`[^`]*`", "", text)
    assert banned(text) == []


def test_docstrings_comments_and_messages_speak_plainly():
    found = [
        (path.relative_to(ROOT).as_posix(), line, words)
        for path in FILES
        for line, text in prose_of(path.read_text("utf-8"))
        if (words := banned(text))
    ]
    assert found == []


def pointing(source: str) -> Iterator[int]:
    """Lines of docstrings that begin by pointing at another one."""
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and POINTS.match(ast.get_docstring(node) or ""):
            yield getattr(node, "lineno", 1)


def test_docstrings_say_what_they_are_about():
    found = [(path, line) for path in FILES for line in pointing(path.read_text("utf-8"))]
    assert found == []


def test_a_docstring_that_points_elsewhere_is_found():
    riddles = ("See Store.", "See `a.b`.", "The same for two.", "That of it.", "Whether they are.")
    assert [[*pointing(f'def f():\n    """{one}"""')] for one in riddles] == [[1]] * len(riddles)
    plain = ("The same rows, predicted again.", "Whether it has a gradient.", "Seen from above.")
    assert not any([*pointing(f'def f():\n    """{one}"""')] for one in plain)


def test_a_riddle_is_found():
    assert banned("Whoever comes first lies in a BadInput.") == ["whoever", "lies", "badinput"]
    found = [*prose_of('"""One."""\ndef f():  # Two\n    print(f"three {3}")\n')]
    assert found == [(2, "Two"), (1, "One."), (3, "three ")]
