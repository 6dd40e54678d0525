"""How large the house is: lines per folder, the ten longest files and functions.

Run by `make size`. A file should hold one idea (about 150 lines, 400 at most) and a function
one thought (under 50 lines); this shows where that is about to break. All lines count, blank
ones and comments too.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"howdah": (".py", ".c", ".h"), "tests": (".py",), "docs": (".md",)}
LONGEST = 10

Row = tuple[int, str]


def files(part: str) -> Iterator[tuple[Path, int]]:
    """The files of a part of the project, each with its lines."""
    for path in sorted((ROOT / part).rglob("*")):
        if path.suffix in PARTS[part] and path.is_file():
            yield path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())


def folders(part: str) -> list[Row]:
    """Lines per folder below a part; files at its top count under its own name."""
    lines: Counter[str] = Counter()
    for path, count in files(part):
        lines["/".join(path.parts[:2]) if len(path.parts) > 2 else part] += count
    return [(count, folder) for folder, count in sorted(lines.items())]


def functions(path: Path) -> Iterator[Row]:
    """The functions of a Python file, decorators left out and docstrings counted."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}"


def show(title: str, rows: list[Row]) -> None:
    print(title)
    for count, name in rows:
        print(f"{count:8}  {name}")
    print()


def main() -> None:
    for part in PARTS:
        rows = folders(part)
        show(f"{part}: {sum(count for count, _ in rows)} lines", rows)
    code = [(count, path) for path, count in files("howdah")]
    show("longest files", sorted(((n, str(path)) for n, path in code), reverse=True)[:LONGEST])
    python = [path for _, path in code if path.suffix == ".py"]
    rows = sorted((row for path in python for row in functions(path)), reverse=True)
    show("longest functions", rows[:LONGEST])


if __name__ == "__main__":
    main()
