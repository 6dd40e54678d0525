"""Labelled rows of the standard library: a text is the source of a function, its label its module.

python examples/labelled_rows.py rows   # writes rows/train.jsonl and rows/held_out.jsonl
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from textwrap import dedent

MODULES = ("argparse", "ast", "datetime", "email", "http", "logging", "tkinter", "unittest")
MOST = 120  # functions of a module
HELD_OUT = 5  # one in so many is never trained on


def functions(path: Path) -> Iterator[str]:
    """The sources of the functions of a file, as they would stand alone, without decorators."""
    source = path.read_text("utf-8")
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def rows() -> Iterator[dict[str, str]]:
    """Rows of all modules, as many of each; the same on every machine with the same Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        files = [root / f"{module}.py"]
        if (root / module).is_dir():
            files = sorted((root / module).rglob("*.py"))
        texts = {text for path in files for text in functions(path) if 80 <= len(text) <= 1000}
        chosen = sorted(texts, key=lambda text: blake2b(text.encode()).digest())[:MOST]
        yield from ({"text": text, "label": module} for text in chosen)


def main(folder: str) -> None:
    """Writes the two files, of which no row is in both."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {"train": [], "held_out": []}
    for row in rows():
        number = blake2b(row["text"].encode(), key=b"split").digest()[0]
        found["train" if number % HELD_OUT else "held_out"].append(json.dumps(row) + "\n")
    for name, lines in found.items():
        path = Path(folder, f"{name}.jsonl")
        path.write_text("".join(lines))
        print(f"{path}: {len(lines)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
