"""The short forms of a recipe: of texts in [data], and of the algorithms in [comm]."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError
from howdah.base.files import kind_of
from howdah.collectives.choice import everywhere, passes_on
from howdah.text.sources import STDLIB, Data


def with_texts(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table with `data.sources` and `data.validation` as lists of tables; one path, one
    table, and paths in a list are short forms. One text for `comm.algorithm` is that of every
    operation that has such an algorithm, and can have it in training.
    """
    data, comm = table.get("data"), table.get("comm")
    if isinstance(comm, dict) and isinstance(text := comm.get("algorithm"), str):
        chosen = {"all_reduce": text}  # which is refused
        with suppress(UserError):
            every = everywhere(text).by_operation
            chosen = {op: said for op, said in every.items() if not passes_on(op, said)}
        table = {**table, "comm": {**comm, "algorithm": chosen}}
    if not isinstance(data, dict):
        return table
    data = dict(data)
    for key in {"sources", "validation"} & data.keys():
        found = data[key] if isinstance(data[key], list) else [data[key]]
        data[key] = [{"path": one} if isinstance(one, str) else one for one in found]
    return {**table, "data": data}


def absolute(data: Data) -> Data:
    """`data` with absolute paths; a name that is no existing path stays as it is."""
    return replace(
        data,
        sources=tuple(replace(one, path=_absolute(one.path)) for one in data.sources),
        validation=tuple(replace(one, path=_absolute(one.path)) for one in data.validation),
        tokenizer=_absolute(data.tokenizer) if data.tokenizer else None,
    )


def _absolute(name: str) -> str:
    there = name != STDLIB and kind_of(Path(name)) != "does not exist"
    return str(Path(name).absolute()) if there else name
