"""Profiles of a machine that `howdah measure` has measured, one file for each number of ranks.

    name = "here"
    date = "2026-11-23"
    ranks = 2                             at once, each with
    threads = 1
    cpu = "AMD EPYC"
    torch = "2.13.0+cpu"

    [bf16]                                and the other precisions that were measured
    forward = {value = 0.0011, source = "measured on 2026-11-23, spread 2 %"}
    products = {value = [{start = 1e-5, speed = 9.1e10, m0 = 12.5}, …], source = "…"}

A cluster file names its profile by the key `profile`; the values are those of `Profile`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from howdah.base.bounds import Bound, Length
from howdah.base.errors import UserError, named, several
from howdah.base.files import parse_toml, read_text
from howdah.base.tables import read_table
from howdah.machines.cluster import WORLD, Cluster
from howdah.plan.method import Method
from howdah.sim.profile import PLAIN, Profile, own_profile

LARGEST = 64 << 10  # bytes of a file
Word = Annotated[str, Length(0, 200)]


@dataclass(frozen=True)
class Facts:
    """What a measurement holds for: the ranks that worked at the same time on one machine, threads
    of torch in each, the CPU, torch's version, and the day.
    """

    name: Word
    date: Word
    ranks: Annotated[int, Bound(1, WORLD)]
    threads: Annotated[int, Bound(1, 1 << 16)]
    cpu: Word
    torch: Word


def profile_for(cluster: Cluster, method: Method) -> Profile:
    """The profile of howdah's own runs on a cluster: as it was measured there, or else shipped.

    Raises UserError for a file that is wrong, and for a precision that was not measured.
    """
    if not cluster.profile:
        return own_profile(cluster.device)
    return read_measured(Path(cluster.profile), method.precision)[1]


def read_measured(path: Path, precision: str) -> tuple[Facts, Profile]:
    """A file's facts, and its profile for a precision. Raises UserError."""
    try:
        table = parse_toml(read_text(path, LARGEST))
    except OSError as error:
        raise UserError(f"profile {named(path)} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no UTF-8 is one, too
        raise UserError(f"profile {named(path)} is not TOML: {error}") from None
    precisions = {name: rows for name, rows in table.items() if isinstance(rows, dict)}
    facts, problems = read_table(
        Facts, {name: word for name, word in table.items() if name not in precisions}, limits=True
    )
    if precision not in precisions:
        raise UserError(
            f"profile {named(path)} has no {precision}; it was measured for "
            f"{' and '.join(sorted(precisions)) or 'nothing'}; name that as method.precision, or "
            "run howdah measure where there is another"
        )
    found = _values(precisions[precision])
    read = read_table(Profile, found, limits=True)
    problems = [*problems, *read.problems, *_out_of_range(read.value)]
    if problems:
        raise UserError(
            f"profile {named(path)}: {several(problems)}; howdah measure writes it again"
        )
    return facts, replace(read.value, name=facts.name, adds=True)


def _values(rows: dict[str, Any]) -> dict[str, Any]:
    """The values of rows of a value and its source; a row that is none stays, and is refused."""
    return {
        name: row["value"] if isinstance(row, dict) and "value" in row else row
        for name, row in rows.items()
    }


def _out_of_range(profile: Profile | None) -> Iterator[str]:
    for field in fields(PLAIN):
        value = getattr(profile or PLAIN, field.name)
        least = 1.0 if field.name == "crowd" else 0.0
        if isinstance(value, float) and not (isfinite(value) and value >= least):
            yield f"{field.name} is {value}; it must be a number from {least:g} on"
    for name, count in (("products", 3), ("pairs", 2)):
        if len(getattr(profile or PLAIN, name)) not in (0, count):
            yield f"{name} needs {count} rows"
