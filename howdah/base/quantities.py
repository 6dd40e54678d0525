"""Numbers with their units: "80 GB", "200 Gb/s", "5 us", and counts such as "15T".

Numbers without units make plans wrong: by 8 (Gb/s and GB/s), by 2 (a link's two directions, a rate
that counts sparsity), by 1.07 (GB and GiB). So every quantity is written with its unit, the code
that reads it names the kind it expects, and inside howdah all are floats in one base unit per kind:

    "200 Gb/s"  as bytes/s  ->  25e9       "989 TFLOP/s"  as FLOP/s  ->  989e12
    "80 GiB"    as bytes    ->  80·2³⁰     "5 us"         as seconds ->  5e-6

`spell` converts back, for tables: to four digits, in decimal units, and never in bits.
"""

import re
from decimal import Decimal

from howdah.base.errors import LONGEST, UserError, nearest, shown

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _scaled(unit: str, scales: dict[str, float], base: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": base * scale for prefix, scale in scales.items()}


# For each kind: the spelling of each unit, and its size in the base unit (the one with size 1).
UNITS: dict[str, dict[str, float]] = {
    "bytes": {**_scaled("B", _DECIMAL), **_scaled("B", _BINARY)},
    "bytes/s": {
        **_scaled("B/s", _DECIMAL),
        **_scaled("B/s", _BINARY),
        **_scaled("b/s", _DECIMAL, 1 / 8),
    },
    "FLOP/s": _scaled("FLOP/s", _DECIMAL),
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "watts": _scaled("W", {"": 1.0, "k": 1e3, "M": 1e6}),
    "USD": {"USD": 1.0},
    "USD/h": {"USD/h": 1.0},
    "kg/kWh": {"kg/kWh": 1.0, "g/kWh": 1e-3},
}

TINY, HUGE = 1e-12, 1e21  # in base units: the range of non-zero values of real machines

EXAMPLE = {
    "bytes": "80 GB",
    "bytes/s": "200 Gb/s",
    "FLOP/s": "312 TFLOP/s",
    "seconds": "5 us",
    "watts": "400 W",
    "USD": "25000 USD",
    "USD/h": "2 USD/h",
    "kg/kWh": "0.385 kg/kWh",
}


def parse_quantity(text: object, kind: str, *, where: str, positive: bool = False) -> float:
    """`text`, a number with its unit, as a float in the base unit of `kind`.

    where     names the quantity in error messages
    positive  refuse zero too

    Raises UserError for a number without unit, an unknown unit, a unit of another kind, a negative
    number, and values that no machine has.
    """
    if not isinstance(text, str):
        raise UserError(
            f"{where} is {shown(text)}, which has no unit; write it like {EXAMPLE[kind]!r}"
        )
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*(\S*)\s*", text)
    if match is None:
        raise UserError(f"{where} {shown(text)} is not a number and a unit, like {EXAMPLE[kind]!r}")
    number, unit = match.groups()
    if not unit:
        raise UserError(f"{where} {shown(text)} has no unit; write it like {EXAMPLE[kind]!r}")
    if unit not in UNITS[kind]:
        raise UserError(f"{where} {shown(text)}: {shown(unit)} {_complaint(unit, kind)}")
    found = float(Decimal(number.replace("_", "")) * Decimal(repr(UNITS[kind][unit])))
    if found > HUGE or (found < TINY and (positive or found > 0)):
        zero = "" if positive else "0, or "
        raise UserError(
            f"{where} is {shown(text)}; it must be {zero}from {TINY:g} to {HUGE:g} {kind}"
        )
    return found


def with_unit(text: str, unit: str) -> str:
    """A text for `parse_quantity`: a number without a unit gets this one.

    >>> with_unit("80", "GB"), with_unit("80 GiB", "GB")
    ('80 GB', '80 GiB')
    """
    return f"{text} {unit}" if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else text


def _complaint(unit: str, kind: str) -> str:
    for other, units in UNITS.items():
        if unit in units:
            return f"counts {other}, but {kind} are wanted, like {EXAMPLE[kind]!r}"
    return f"is no unit of {kind}{nearest(unit, UNITS[kind])}"


def spell(value: float, kind: str) -> str:
    """`value` of `kind` with the unit that leaves the fewest zeros, to four digits.

    >>> spell(2.5e10, "bytes/s")
    '25 GB/s'
    """
    units = {unit: size for unit, size in UNITS[kind].items() if "i" not in unit}
    plain = {unit: size for unit, size in units.items() if "b/" not in unit}
    fitting = [unit for unit, size in plain.items() if abs(value) >= size]
    unit = max(fitting or plain, key=lambda unit: plain[unit] if fitting else -plain[unit])
    number = value / plain[unit]
    return f"{number:.0f} {unit}" if abs(number) >= 1000 else f"{number:.4g} {unit}"


_COUNTS = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_MOST = Decimal(10) ** 24


def parse_count(text: str, *, what: str = "tokens") -> int:
    """The whole number of a text such as "15T", "300B", "1.4e12" or "15_000".

    what  names the number in error messages

    Raises UserError unless the text is a whole number from 1 to 10²⁴.
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)([A-Za-z]?)", text.strip())
    if match is None or match[2].upper() not in _COUNTS or len(text) > LONGEST:
        raise UserError(
            f"{what} {shown(text)} is no count; write it like 15T, 300B, 1.4e12 or 15_000"
        )
    count = Decimal(match[1].replace("_", "").replace(",", ""))
    count = count.scaleb(_COUNTS[match[2].upper()])
    if count != count.to_integral_value():
        raise UserError(f"{what} {shown(text)} is {count:g}, which is not a whole number")
    if not 1 <= count <= _MOST:
        raise UserError(f"{what} {shown(text)} must lie between 1 and 1e24")
    return int(count)
