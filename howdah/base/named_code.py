"""Functions of the user's own, named so that every rank can load them:

    mine.py:watch            a function or class at the top of a file
    package.module:watch     the same of a module that can be imported
    __main__:watch           of this process alone: a notebook's cell, with a layout of one rank

Nothing is pickled: a rank gets the name, and runs the file. A class is made without arguments.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from howdah.base.errors import UserError, brief, nearest, shown
from howdah.base.files import kind_of

HERE = "__main__"
LARGEST = 4 << 20  # bytes of a file of code
FORM = "write FILE.py:FUNCTION or MODULE:FUNCTION"


def split(name: str) -> tuple[str, str]:
    """The file or module of a name, and what it means there. Raises UserError."""
    where, colon, what = name.rpartition(":")
    sound = where.endswith(".py") or all(part.isidentifier() for part in where.split("."))
    if not colon or not where or not sound or not what.isidentifier():
        raise UserError(f"{shown(name)} names no function; {FORM}")
    return where, what


def absolute(name: str) -> str:
    """The name with an absolute path; one that is no name of a file stays as it is."""
    where, _, what = name.rpartition(":")
    return f"{Path(where).absolute()}:{what}" if where.endswith(".py") else name


def name_problems(key: str, name: str, *, ranks: int = 1) -> Iterator[str]:
    """Why what a key names cannot be loaded, as far as that shows without running it.

    ranks  processes that load it
    """
    try:
        where, what = split(name)
        if where == HERE:
            _require_here(what, ranks)
        elif where.endswith(".py"):
            _require_in(Path(where), what)
        elif where not in sys.modules and find_spec(where) is None:
            raise UserError(f"there is no module {where}; name a file, such as mine.py:{what}")
    except UserError as problem:
        yield f"{key}: {problem}"
    except ImportError as problem:
        yield f"{key}: {brief(problem)}; {FORM}"


def _require_here(what: str, ranks: int) -> None:
    if ranks > 1:
        raise UserError(
            f"{what} of {HERE} (a notebook or a script) is in this process alone, and {ranks} "
            "processes need it; save it in a file (%%writefile mine.py), or use layout=single"
        )
    if not hasattr(sys.modules[HERE], what):
        raise UserError(f"{HERE} of this process has no {what}; save it in a file")


def _require_in(path: Path, what: str) -> None:
    """Raises UserError if a file has no such name at its top."""
    if (kind := kind_of(path)) != "file":
        raise UserError(f"{path} {kind if kind != 'folder' else 'is a folder'}; {FORM}")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is too large for a file of code; {FORM}")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is no Python: {brief(error) or 'nested too deep'}") from None
    if what not in (names := set(_names(tree))):
        raise UserError(f"{path} has no function {what} at its top{nearest(what, names)}")


def _names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from (one.asname or one.name for one in node.names)


def load(key: str, name: str) -> Any:
    """What a key names; an object of it, if it is a class. Raises UserError, with the place where
    the file failed.
    """
    where, what = split(name)
    with_words = f"{key}: {name}"
    try:
        module = _module(where)
        found = getattr(module, what)
        made = found() if isinstance(found, type) else found
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(with_words, error) from error
    if not callable(made):
        raise UserError(f"{with_words} is no function, but {shown(made)}")
    return made


def failed(what: str, error: BaseException) -> UserError:
    """The sentence for an exception of the user's code, with the line that raised it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" in {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return UserError(f"{what} failed{place}: {type(error).__name__}: {brief(error)}")


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return import_module(where)
    path = Path(where).absolute()
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be loaded as Python")
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))  # files beside it, as `python FILE` finds them
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def loading() -> bool:
    """Whether the caller is called by a file that is being loaded by its name."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _module.__code__:
        frame = frame.f_back
    return frame is not None


def name_of(function: Any) -> str:
    """The name by which a rank finds a function or class; a name stays as it is. Raises UserError
    for one that has none, such as a lambda or a function inside another.
    """
    if isinstance(function, str):
        return function
    what, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not what.isidentifier() or not module:
        raise UserError(
            f"{shown(function)} has no name at the top of a module, by which ranks could find it; "
            "define it there with def or class"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and "." not in module and file.endswith(".py"):
        return f"{Path(file).absolute()}:{what}"
    return f"{module}:{what}"
