"""What the value of a field may be, said in its annotation.

    layers: Annotated[int, Bound(1, 1000)]               from 1 to 1,000
    dims: Annotated[tuple[int, ...], Length(1, 32)]      a list of 1 to 32
    memory: Annotated[float, Unit("bytes")]              written with its unit, such as "80 GB"

`tables.py` holds what a user writes, and any dataclass, against the annotations, before anything is
allocated or looped over. The upper bound of a size is far above the largest known model, so it
limits no real run. It ensures that a plan is computed in a moment and that its sums fit in 64 bits.
"""

from math import isnan
from typing import Annotated, Any, NamedTuple


class Bound(NamedTuple):
    """The allowed range of a number: least ≤ number ≤ most.

    above, below  exclude `least`, or `most`, itself
    means         for the error message: the special meaning of the value `least`, if it has one
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    means: str = ""

    def wanted(self, number: float) -> str:
        """What `number` must be; empty if it is within the range."""
        if isinstance(number, float) and isnan(number):  # isnan() fails for a huge int
            return "a number"
        if number < self.least or (self.above and number == self.least):
            means = f", {self.means}" if self.means else ""
            return f"{'above' if self.above else 'at least'} {_spelled(self.least)}{means}"
        if number > self.most or (self.below and number == self.most):
            return f"{'below' if self.below else 'at most'} {_spelled(self.most)}"
        return ""


def _spelled(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


class Length(NamedTuple):
    """The allowed length of a list, or of a text, which must have one line."""

    least: int
    most: int

    def wanted(self, value: str | tuple[Any, ...]) -> str:
        """What `value` must be; empty if its length is right."""
        size = f"{self.least} to {self.most}" if self.least else f"at most {self.most}"
        fits = self.least <= len(value) <= self.most
        if isinstance(value, str):
            words = f"a text in quotes of {size} characters, on one line"
            return "" if fits and value.isprintable() else words
        return "" if fits else f"a list of {size}"


class Unit(NamedTuple):
    """A number that is written with its unit (base/quantities.py); `positive` excludes zero."""

    kind: str
    positive: bool = False


Size = Annotated[int, Bound(1, 1 << 17)]
Tokens = Annotated[int, Bound(1, 1 << 27)]
Samples = Annotated[int, Bound(1, 1 << 31)]
Steps = Annotated[int, Bound(0, 10**7)]
Share = Annotated[float, Bound(0, 1, below=True)]
Positive = Annotated[float, Bound(0, 1e9, above=True)]
NotNegative = Annotated[float, Bound(0, 1e9)]
