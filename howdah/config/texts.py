"""The short forms of a recipe: of texts in [data], and of the algorithms in [comm]."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError
from howdah.base.files import kind_of
from howdah.base.named_code import absolute as one_path
from howdah.collectives.choice import everywhere, passes_on
from howdah.text.sources import STDLIB, Data


def with_texts(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table with `data.sources` and `data.validation` as lists of tables; one path, one
    table, and paths in a list are short forms, as is one name of a callback or tracker. Files of
    the user's own code get absolute paths. One text for `comm.algorithm` is that of every
    operation that has such an algorithm, and can have it in training.
    """
    data, comm = table.get("data"), table.get("comm")
    if isinstance(comm, dict) and isinstance(text := comm.get("algorithm"), str):
        chosen = {"all_reduce": text}  # which is refused
        with suppress(UserError):
            every = everywhere(text).by_operation
            chosen = {op: said for op, said in every.items() if not passes_on(op, said)}
        table = {**table, "comm": {**comm, "algorithm": chosen}}
    table = _with_code(table)
    if not isinstance(data, dict):
        return table
    data = dict(data)
    for key in {"sources", "validation"} & data.keys():
        found = data[key] if isinstance(data[key], list) else [data[key]]
        data[key] = [{"path": one} if isinstance(one, str) else one for one in found]
    return {**table, "data": data}


def _with_code(table: dict[str, Any]) -> dict[str, Any]:
    train, method = table.get("train"), table.get("method")
    if isinstance(train, dict) and {"callbacks", "tracker"} & train.keys():
        lists = {key: train[key] for key in ("callbacks", "tracker") if key in train}
        lists = {key: [one] if isinstance(one, str) else one for key, one in lists.items()}
        if isinstance(names := lists.get("callbacks"), list | tuple):
            lists["callbacks"] = [one_path(n) if isinstance(n, str) else n for n in names]
        table = {**table, "train": {**train, **lists}}
    if isinstance(method, dict) and isinstance(name := method.get("loss"), str):
        table = {**table, "method": {**method, "loss": one_path(name)}}
    return table


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
