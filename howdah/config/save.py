"""A run as TOML, which `load_run` reads again: all of it, as a run folder keeps it; for people only
what is not as if it were left out.
"""

from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, named
from howdah.config.overrides import Table
from howdah.config.recipe import Run
from howdah.shapes.presets import PRESETS
from howdah.shapes.shape import ModelShape


def save_run(run: Run, path: Path, *, brief: bool = False) -> None:
    """Writes `run`, atomically, as a recipe that `load_run` can read.

    brief  for people: without what is as if it were left out

    A file that has this content already is not written. Raises UserError if writing fails.
    """
    text = tomli_w.dumps(plain(_stated(run) if brief else asdict(run)))
    try:
        if not path.is_file() or path.read_bytes() != text.encode():
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write {named(path)}: {error.strerror}; make room there, or give another "
            "folder with folder=PATH"
        ) from error


def _stated(table: Any) -> Table:
    """The fields of a dataclass that have no default, or another value; a model by its preset."""
    usual = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(table)
    }
    found = {name: getattr(table, name) for name in usual if getattr(table, name) != usual[name]}
    if isinstance(table, ModelShape):
        same = (name for name, shape in PRESETS.items() if shape == table)
        return next(({"preset": name} for name in same), found)
    for name, value in found.items():
        if is_dataclass(value):
            found[name] = _stated(value)
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            found[name] = [_stated(one) for one in value]
    return found


def plain(value: Any) -> Any:
    """`value` in the types of TOML and JSON; fields that are None (open) are left out."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
