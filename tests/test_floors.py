"""The walls of the house: what every file of howdah/ must keep, read from its syntax tree.

    cli           may import from every floor below it
    config
    ...           the list FLOORS, from the ground up
    shapes
    base          may import from no floor

A check is a function from one source file to sentences, so that the same checks run over the
real package and over the small made-up one at the end of this file, where each has to fail.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import howdah

PACKAGE = Path(howdah.__file__).parent

FLOORS = {  # from the ground up, with the lines that each may have in the end
    "base": 1_720,
    "shapes": 3_000,
    "machines": 1_500,
    "plan": 7_300,
    "collectives": 3_150,
    "sim": 4_020,
    "search": 2_940,
    "validation": 1_220,
    "draw": 2_980,
    "text": 4_450,
    "host": 2_300,
    "comm": 14_200,
    "model": 4_700,
    "optim": 1_400,
    "checkpoint": 2_790,
    "parallel": 6_700,
    "server": 2_950,
    "foreign": 2_330,
    "generate": 1_000,
    "train": 7_940,
    "tasks": 1_200,
    "verify": 2_080,
    "bench": 2_350,
    "report": 1_200,
    "config": 1_710,
    "cli": 3_740,
}
HOUSE_LINES = 88_000  # decision 0083
TOP = ("__main__",)
LAZY = ("config", "cli", "__main__", "__init__")  # load torch only once a command needs it
LIGHT = (
    *("base", "shapes", "machines", "plan", "collectives", "sim", "search", "draw", "text"),
    *("report", "validation"),
)  # never load torch
LEVEL = {name: level for level, name in enumerate((*FLOORS, *TOP))}

PIPES = "comm/pipes.py"  # between a process and its child, over what both inherited
LONGEST = 400  # lines of a file
STORY = 70  # lines of a function
ENVIRONMENT_READERS = ("cli/main.py", "cli/train.py", "cli/environment.py", "comm/settings.py")


@dataclass(frozen=True)
class Source:
    """One parsed file: its path inside the package, such as plan/layout.py."""

    path: str
    text: str
    tree: ast.Module

    @property
    def floor(self) -> str:
        """The folder, or the name of a file at the top (`__init__` is the package's own)."""
        return self.path.split("/")[0].removesuffix(".py")


def sources(root: Path) -> list[Source]:
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(root).as_posix(), text, ast.parse(text)))
    return found


# -- imports -------------------------------------------------------------------


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, inside functions too.

    `from howdah.plan import boxes` gives howdah.plan.boxes; relative names are resolved.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(source, "." * node.level + (node.module or ""))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, absolute(source, argument.value)


def absolute(source: Source, name: str) -> str:
    """`..plan.boxes`, said in sim/traffic.py, is howdah.plan.boxes."""
    dots = len(name) - len(name.lstrip("."))
    if dots == 0:
        return name
    folders = ["howdah", *source.path.split("/")[:-1]]
    return ".".join([*folders[: len(folders) - dots + 1], *filter(None, [name[dots:]])])


def name_of(node: ast.expr) -> str:
    """The last word of `a.b.name` or `name`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def imports_go_down(source: Source) -> Iterator[str]:
    if source.path == "__init__.py":
        return  # names what users need from every floor; that it does so lazily is tested below
    for line, name in imports(source):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package != "howdah" or target == source.floor or target.startswith("__"):
            continue
        if target not in LEVEL:
            yield f"{source.path}:{line} imports {name}; name the floor it comes from"
        elif LEVEL.get(source.floor, -1) < LEVEL[target]:
            yield f"{source.path}:{line} imports {name}; {target} lies above {source.floor}"


def light_floors_name_no_torch(source: Source) -> Iterator[str]:
    for line, name in imports(source):
        if source.floor in LIGHT and "torch" in name.split("."):
            yield f"{source.path}:{line} imports {name}; {source.floor} never loads torch"


def nothing_is_pickled(source: Source) -> Iterator[str]:
    """A pickle runs code when it is read: `torch.load` is one, even with weights_only."""
    if source.path == PIPES:
        return
    for line, name in imports(source):
        if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve", "marshal"):
            yield f"{source.path}:{line} imports {name}"
        if name == "torch.load":
            yield f"{source.path}:{line} imports torch.load"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield f"{source.path}:{node.lineno} uses torch.load"
        if isinstance(node, ast.keyword) and node.arg in ("weights_only", "allow_pickle"):
            yield f"{source.path}:{node.value.lineno} passes {node.arg}"


# -- hidden state --------------------------------------------------------------

CHANGES = {
    *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
    *("pop", "popitem", "popleft", "remove", "discard", "clear", "sort", "reverse"),
}


def no_global_is_changed(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno} says global {', '.join(node.names)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "globals":
            yield f"{source.path}:{node.lineno} calls globals()"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kept = module_names(source.tree) - local_names(node)
            yield from (
                f"{source.path}:{line} changes {name}, which belongs to the module"
                for line, name in changed(node)
                if name in kept
            )


def module_names(tree: ast.Module) -> set[str]:
    """The names that statements at the top of the file bind, imports aside."""
    statements = (s for s in tree.body if isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign))
    return {name for statement in statements for name in bound(statement)}


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return arguments | bound(function)


def bound(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def changed(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Names whose contents a function changes: `name[...] = `, `name.x = `, `name.append()`."""
    for node in ast.walk(function):
        target: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES else None
        if isinstance(target, ast.Name):
            yield target.lineno, target.id


def environment_is_read_at_the_top(source: Source) -> Iterator[str]:
    if source.path in ENVIRONMENT_READERS:
        return
    forbidden = {"environ", "environb", "getenv", "expanduser", "expandvars", "gettempdir"}
    for line, name in imports(source):
        if name.split(".")[0] in ("os", "tempfile") and name.split(".")[-1] in forbidden:
            yield f"{source.path}:{line} imports {name}"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in forbidden or (node.attr == "home" and name_of(node.value) == "Path"):
            yield f"{source.path}:{node.lineno} reads {ast.unparse(node)}"


# -- files and folders ---------------------------------------------------------


def files_are_one_idea(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > LONGEST:
        yield f"{source.path} has {lines} lines; split it, {LONGEST} is the most"


def functions_are_one_story(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > STORY:
                yield f"{source.path}:{node.lineno} {node.name} has {lines} lines; {STORY} at most"


def files_open_with_a_docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.path} does not say what it is for"


USED_ALONE = ("comm/__init__.py",)  # has a lazy name for programs that use this floor alone


def floors_open_with_a_docstring_alone(source: Source) -> Iterator[str]:
    if source.path in USED_ALONE:
        return
    if source.path.endswith("/__init__.py") and len(source.tree.body) > 1:
        yield f"{source.path} holds more than a docstring; import from the floor's files"


def unknown_places(root: Path) -> list[str]:
    """Whatever lies at the top of the package and is neither a floor nor one of its files."""
    files = {"__init__.py", "py.typed", *(f"{name}.py" for name in TOP)}
    return [
        f"{entry.name} is no floor and no file of the house"
        for entry in sorted(root.iterdir())
        if entry.name not in ({*FLOORS, "__pycache__"} if entry.is_dir() else files)
    ]


def lines_of_floors(root: Path) -> Counter[str]:
    """Lines of Python and C on each floor."""
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h")]
    return Counter(
        {
            floor: sum(
                len(f.read_text("utf-8").splitlines())
                for f in files
                if f.relative_to(root).parts[0] == floor
            )
            for floor in FLOORS
        }
    )


def too_many_lines(lines: Counter[str]) -> list[str]:
    """Floors that have outgrown their share, and the house where it has."""
    grown = [
        f"{floor} has {lines[floor]:,} lines; it may have {most:,}"
        for floor, most in FLOORS.items()
        if lines[floor] > most
    ]
    total = lines.total()
    return grown + [f"the house has {total:,} lines; it may have {HOUSE_LINES:,}"] * (
        total > HOUSE_LINES
    )


HOUSE = sources(PACKAGE)  # for all checks; a made-up house changes under its test
CHECKS: tuple[Callable[[Source], Iterator[str]], ...] = (
    imports_go_down,
    light_floors_name_no_torch,
    nothing_is_pickled,
    no_global_is_changed,
    environment_is_read_at_the_top,
    files_are_one_idea,
    functions_are_one_story,
    files_open_with_a_docstring,
    floors_open_with_a_docstring_alone,
)


def problems(root: Path, check: Callable[[Source], Iterator[str]]) -> list[str]:
    found = HOUSE if root == PACKAGE else sources(root)
    return [sentence for source in found for sentence in check(source)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_stands(check):
    assert problems(PACKAGE, check) == []


def test_every_folder_is_a_floor():
    assert unknown_places(PACKAGE) == []


def test_no_floor_has_outgrown_its_share():
    assert too_many_lines(lines_of_floors(PACKAGE)) == []


def test_contributing_lists_the_floors():
    """It lacked one, and gave the house 61,000 lines."""
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^  (\w+)/ +(○)? ", page, re.M)
    assert [name for name, _ in rows] == [*FLOORS]
    assert {name for name, light in rows if light} == {*LIGHT}
    assert f"{HOUSE_LINES:,} for the house" in page and f"over {LONGEST} lines" in page


# -- what a fresh process loads ------------------------------------------------

LOADER = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch")
"""


def light_modules(root: Path) -> list[str]:
    """Everything that must import without torch: the package, light and lazy floors."""
    light = [source for source in sources(root) if source.floor in (*LIGHT, *LAZY)]
    dotted = (source.path.removesuffix(".py").removesuffix("__init__") for source in light)
    return [".".join(["howdah", *filter(None, name.split("/"))]) for name in dotted]


def load(root: Path, modules: list[str]) -> str:
    """What a fresh process has to say about importing `modules`; empty when all is well."""
    command = [sys.executable, "-c", LOADER, str(root.parent), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()


def test_light_floors_and_the_commands_load_no_torch():
    modules = light_modules(PACKAGE)
    assert "howdah" in modules
    assert "howdah.plan.layout" in modules
    assert load(PACKAGE, modules) == ""
