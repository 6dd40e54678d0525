"""The [data] table of a recipe: its short forms, its paths, and whose tokenizer is used."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from howdah.base.errors import named
from howdah.base.files import kind_of
from howdah.text.sources import STDLIB, Data


def with_texts(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table with `data.sources` and `data.validation` as lists of tables; one path, one
    table, and paths in a list are short forms.
    """
    data = table.get("data")
    if not isinstance(data, dict):
        return table
    data = dict(data)
    for key in {"sources", "validation"} & data.keys():
        found = data[key] if isinstance(data[key], list) else [data[key]]
        data[key] = [{"path": one} if isinstance(one, str) else one for one in found]
    return {**table, "data": data}


def text_of(data: Data, weights: Path | None) -> Data:
    """The text of a run that starts from the folder `weights`: without a tokenizer of its own, with
    that of the folder.
    """
    if weights is None or data.tokenizer is not None or kind_of(weights) != "folder":
        return data
    return replace(data, tokenizer=str(weights.absolute()))


def check_tokenizer(data: Data, weights: Path | None) -> Iterator[str]:
    """Yields a sentence if a run starts from a folder of weights without a tokenizer."""
    if weights is None or data.tokenizer is not None or kind_of(weights) != "folder":
        return
    if kind_of(weights / "tokenizer.json") != "file":
        yield (
            f"init_from: {named(weights)} has no tokenizer.json, and with other tokens than the "
            "model's its embedding is useless; name the model's tokenizer in data.tokenizer"
        )


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
