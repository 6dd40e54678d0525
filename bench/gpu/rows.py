"""The rows of a part: what is measured, in a file that is whole after each row.

A part declares its rows, and the fields of each, before anything runs. So what it writes has the
same keys on every machine: with a GPU and without one, by any torch, and where time ran out. A row
that was not measured has None in its fields, and says why.
"""

import gc
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch

Rows = Mapping[str, tuple[str, ...]]  # name: its fields
RESERVE = 3.0  # seconds before the deadline after which no row begins


@dataclass(frozen=True)
class Place:
    """Where a part runs, and until when.

    device   the GPU, or the CPU with tiny sizes
    until    monotonic() at which the part is ended
    """

    device: torch.device
    until: float

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"

    def pick(self, gpu: Any, cpu: Any) -> Any:
        """The size for a GPU, or the tiny one."""
        return cpu if self.cpu else gpu

    def sync(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any], *, repeats: int, warm: int = 2) -> float:
        """The median over three blocks of the seconds of one call of `work`."""
        for _ in range(warm):
            work()
        found = []
        for _ in range(3):
            self.sync()
            began = perf_counter()
            for _ in range(repeats):
                work()
            self.sync()
            found.append((perf_counter() - began) / repeats)
        return median(found)

    def left(self) -> float:
        return self.until - monotonic()


class Unavailable(Exception):
    """What a row would measure is not there; the message says what is missing."""


class Report:
    """What a part has found so far."""

    def __init__(self, path: Path, rows: Rows, place: Place) -> None:
        self._path, self._rows, self._place = path, rows, place
        self.found = empty(rows, "the part was ended before it came here")
        self._write()

    def measure(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Fills a row with what `work` returns; whatever goes wrong in it is the row's reason."""
        if self._place.left() < RESERVE:
            return self._put(name, {}, "no time was left")
        try:
            return self._put(name, work(), "")
        except Unavailable as missing:
            return self._put(name, {}, str(missing))
        except Exception as error:  # one row must not cost the others
            return self._put(name, {}, f"{type(error).__name__}: {first_line(error)}")
        finally:
            gc.collect()
            if not self._place.cpu:
                torch.cuda.empty_cache()

    def _put(self, name: str, found: Mapping[str, Any], why: str) -> None:
        fields = self._rows[name]
        if found and set(found) != set(fields):
            raise KeyError(f"{name} has the fields {fields}, not {tuple(found)}")
        self.found[name] = {field: found.get(field) for field in fields} | {"why": why}
        print(name, "  ".join(f"{k} {spell(v)}" for k, v in found.items()) or why, flush=True)
        self._write()

    def _write(self) -> None:
        write_json(self._path, self.found)


def empty(rows: Rows, why: str) -> dict[str, dict[str, Any]]:
    """Rows that were not measured."""
    return {name: dict.fromkeys(fields) | {"why": why} for name, fields in rows.items()}


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def spell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: Path, content: object) -> None:
    """Replaces the file: who reads it sees a whole one."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(content, indent=1, allow_nan=False, default=str) + "\n", "utf-8")
    os.replace(draft, path)
