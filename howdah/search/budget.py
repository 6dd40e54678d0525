"""Budgets: what a run may take, such as "days<30 money<2M"."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from howdah.base.errors import UserError, nearest, shown
from howdah.search.search import Choice
from howdah.sim.cost import Cost, Rates, run_cost

UNITS = {"days": "days", "money": "USD"}
SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}


class Priced(NamedTuple):
    """A layout and the cost of the whole run with it."""

    choice: Choice
    cost: Cost

    def takes(self) -> dict[str, float]:
        """The days and the USD of the run: of rent, where that is known, else of purchase."""
        rent, bought = self.cost.rent, self.cost.purchase
        money = bought if rent is None else rent
        return {"days": self.cost.days} | ({} if money is None else {"money": money})


def parse_budget(text: str) -> dict[str, float]:
    """The bounds of a budget by name: days, and USD of money.

    >>> parse_budget("days<30 money<2M")
    {'days': 30.0, 'money': 2000000.0}

    Raises UserError for anything but distinct words of that form.
    """
    found: dict[str, float] = {}
    for word in text.split():
        match = re.fullmatch(r"([a-z]+)<(\d{1,15}(?:\.\d{1,12})?)([kKMB]?)", word)
        if match is None or match[1] not in UNITS:
            name = re.split(r"[^a-z]", word)[0]
            near = "" if not name or (match is None and name in UNITS) else nearest(name, UNITS)
            if word[:1].isdigit():
                near = f" ({' or '.join(f'{unit}<{word}' for unit in UNITS)}?)"
            raise UserError(
                f"--budget {shown(word)} cannot be read{near}; write it like 'days<30 money<2M'"
            )
        if match[1] in found:
            raise UserError(f"--budget says {match[1]} a second time; say it once")
        found[match[1]] = float(match[2]) * SCALES[match[3]]
        if not found[match[1]]:
            raise UserError(f"--budget {shown(word)} leaves nothing; give a number above 0")
    if not found:
        raise UserError("--budget is empty; write it like 'days<30 money<2M'")
    return found


def priced(choices: Iterable[Choice], tokens: int, rates: Rates) -> Iterator[Priced]:
    """The layouts with the cost of a run of `tokens` tokens."""
    for one in choices:
        rate = one.time.tokens_per_second
        cost = run_cost(tokens, tokens_per_second=rate, devices=one.devices, rates=rates)
        yield Priced(one, cost)


def affordable(budget: dict[str, float], rows: list[Priced]) -> bool:
    """Whether a budget allows any of the rows. What no price is known of is not counted here."""
    known = [row for row in rows if budget.keys() <= row.takes().keys()]
    return any(_over(budget, row) < 1 for row in known) or len(known) < len(rows)


def within(budget: dict[str, float], rows: list[Priced]) -> list[Priced]:
    """The rows that a budget allows. Raises UserError if it allows none, with the nearest that
    would be met; or if it asks for money, and no price is known.
    """
    if "money" in budget and any("money" not in one.takes() for one in rows):
        cluster = "the cluster's file says neither rent nor device.price"
        raise UserError(f"--budget asks for money, and {cluster}; give --rent, USD per device-hour")
    allowed = [row for row in rows if _over(budget, row) < 1]
    if rows and not allowed:
        near = min(rows, key=lambda row: _over(budget, row))
        takes = near.takes()
        said = ", ".join(f"{_figure(takes[name])} {UNITS[name]}" for name in budget)
        could = " ".join(f"{n}<{_written(max(budget[n], _above(takes[n])))}" for n in budget)
        choice = near.choice
        raise UserError(
            f"no layout meets the budget; the nearest is '{choice.plan.layout}' on "
            f"{choice.devices:,} devices with {said}: --budget '{could}' can be met"
        )
    return allowed


def _over(budget: dict[str, float], row: Priced) -> float:
    """What a run takes as a multiple of its budget: of the bound that it exceeds most."""
    takes = row.takes()
    return max(takes[name] / most for name, most in budget.items())


def _written(number: float) -> str:
    """A number as a budget spells it, without an exponent."""
    return f"{number:.12f}".rstrip("0").rstrip(".")


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _above(number: float) -> float:
    """A number of three digits that is larger."""
    step = float(f"1e{int(f'{number:e}'.partition('e')[2]) - 2}")
    return (number // step + 1) * step
