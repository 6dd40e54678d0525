"""Which tests are run when not all are.

slow        take minutes. Each belongs to an eighth, by a checksum of its name, so that it stays
            there whatever is added. A landing runs the eighth that its commit's hash names.
slow_after  of the cases of a parametrized test, the first ones are run always, the others are slow.
processes   start processes or threads, or read a clock: what else runs on the machine reaches
            these. `make steady` runs them again and again. A test is one of them if it asks for
            the workers, or if its file imports such a module itself, by a helper beside it, or
            by the file of howdah that it tests.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from zlib import crc32

EIGHTHS = 8
MODULES = {"subprocess", "multiprocessing", "signal", "socket", "threading", "time", "concurrent"}
FIXTURES = {"workers", "ended_workers", "howdah"}

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def later_cases(items):
    """The items that are slow by `slow_after(n)`: of the cases of a test that are not slow anyway,
    those after the first n.
    """
    seen, later = Counter(), []
    for item in items:
        mark = item.get_closest_marker("slow_after")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > mark.args[0]:
            later.append(item)
    return later


def eighth_of(test):
    """The eighth of a slow test, by its name: tests/sim/test_predict.py::test_..."""
    return crc32(test.encode()) % EIGHTHS


def eighth_of_commit(commit):
    """The eighth that a landing runs, by the hash of its commit.

    >>> eighth_of_commit("ffd675400000000000000000000000000000000b")
    3
    """
    return int(commit, 16) % EIGHTHS


def is_of_processes(path, fixtures=()):
    """Whether the tests of a file that use these fixtures are of processes."""
    return bool(FIXTURES & set(fixtures)) or _reaches(Path(path))


@cache
def _reaches(path):
    names = _imports(path)
    if MODULES & {name.split(".")[0] for name in names}:
        return True
    beside = [folder / f"{name}.py" for name in names for folder in (path.parent, TESTS)]
    return any(_reaches(helper) for helper in beside if helper.is_file()) or any(
        MODULES & {name.split(".")[0] for name in _imports(file)} for file in _files(names)
    )


def _files(names):
    """The files of howdah among modules and what is imported from them."""
    places = (ROOT / name.replace(".", "/") for name in names if name.startswith("howdah."))
    return [place.with_suffix(".py") for place in places if place.with_suffix(".py").is_file()]


@cache
def _imports(path):
    """The dotted names of all that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)
