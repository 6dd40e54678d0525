"""Tables become dataclasses, and whatever is wrong with them is told at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from howdah.base.bounds import Bound, Length, Unit
from howdah.base.tables import read_table


@dataclass(frozen=True)
class Inner:
    size: int
    word: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    number: int
    share: float = 0.5
    name: str = "x"
    there: bool = False
    place: Path | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    rows: tuple[Inner, ...] = ()
    inner: Inner = field(default_factory=lambda: Inner(1))


def test_a_sound_table_is_the_dataclass():
    table = {
        "number": 3.0,
        "share": 1,
        "place": "a/b",
        "pair": [1, 2],
        "rows": [{"size": 1}, {"size": 2, "word": "b"}],
        "inner": {"size": 4},
    }
    found = read_table(Outer, table)
    assert found.problems == []
    assert found.value == Outer(
        3, 1.0, place=Path("a/b"), pair=(1.0, 2.0), rows=(Inner(1), Inner(2, "b")), inner=Inner(4)
    )
    assert isinstance(found.value.number, int) and isinstance(found.value.share, float)
    assert read_table(Outer, {"number": 1, "place": None}).value == Outer(1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"number": True}, "number is True; it must be a whole number"),
        ({"number": "3"}, "number is '3'; it must be a whole number"),
        ({"number": 1.5}, "number is 1.5; it must be a whole number"),
        ({"number": float("nan")}, "number is nan; it must be a whole number"),
        ({"number": float("inf")}, "number is inf; it must be a whole number"),
        ({"number": None}, "number is None; it must be a whole number"),
        ({"share": "1"}, "share is '1'; it must be a number"),
        ({"share": False}, "share is False; it must be a number"),
        ({"name": 3}, "name is 3; it must be a text in quotes"),
        ({"name": "a\0b"}, "name is 'a\\x00b'; it must be a text in quotes, and it has a NUL"),
        ({"name": "\ud800"}, "it must be a text in quotes, and it is not UTF-8"),
        ({"there": 1}, "there is 1; it must be true or false"),
        ({"place": 1}, "place is 1; it must be a path in quotes"),
        ({"place": "a" * 300}, "and a path has at most 4,096 characters, and 255 in each name"),
        ({"pair": [1]}, "pair is [1]; it must be a list of 2 numbers"),
        ({"pair": [1, "a"]}, "pair[1] is 'a'; it must be a number"),
        ({"pair": 1}, "pair is 1; it must be a list of 2 numbers"),
        ({"rows": {"size": 1}}, "rows is {'size': 1}; it must be a list"),
        ({"rows": [1]}, "rows[0] is 1; it must be a table"),
        ({"rows": [{"size": 1}] * 1001}, "it must be a list of at most 1,000"),
        (
            {"rows": [{"size": 1, "sise": 1}]},
            "unknown key 'rows[0].sise'; did you mean 'rows[0].size'?",
        ),
        ({"inner": 3}, "inner is 3; it must be a table"),
        ({"inner": {}}, "inner.size is missing"),
        ({"inner": {"size": 1, "word": "c"}}, "inner.word is 'c'; it must be 'a' or 'b'"),
        ({"inner": {"size": 1, "word": ["a"]}}, "inner.word is ['a']; it must be 'a' or 'b'"),
        ({"word": 1}, "unknown key 'word'; did you mean 'rows.word'?"),
    ],
)
def test_a_value_of_another_type_is_told(value, sentence):
    (problem,) = read_table(Outer, {"number": 1} | value).problems
    assert sentence in problem and "\n" not in problem


def test_unknown_keys_of_a_file_of_another_kind_share_one_list():
    """A recipe in place of a cluster file repeated all known keys seven times."""
    (problem,) = read_table(Outer, {"number": 1, "qqq": 1, "zzz": 2}).problems
    assert problem.startswith("unknown keys 'qqq', 'zzz'; known are: ")


def test_a_number_that_no_float_holds_is_out_of_every_bound():
    found = read_table(Outer, {"number": -(10**400), "share": 10**400})
    assert found.problems == []
    assert (found.value.number, found.value.share) == (-(10**400), float("inf"))


def test_everything_is_told_and_the_rest_is_read():
    found = read_table(
        Outer, {"number": 7, "share": "a", "pair": [], "names": 1, "inner": {"word": 2}}
    )
    assert found.problems == [
        "unknown key 'names'; did you mean 'name'?",
        "share is 'a'; it must be a number",
        "pair is []; it must be a list of 2 numbers",
        "inner.word is 2; it must be 'a' or 'b'",
        "inner.size is missing",
    ]
    assert found.value == Outer(7)
    assert read_table(Outer, {"number": "a"}).value is None


def test_what_is_nested_deep_is_refused_at_its_top():
    value = 1
    for _ in range(100_000):
        value = {"a": value}
    (problem,) = read_table(Outer, {"number": value}).problems
    assert problem == "number is dict that is too long to show; it must be a whole number"


def test_a_key_that_went_before_is_suggested():
    also = {"inner.": ("preset",)}
    (problem,) = read_table(
        Outer, {"number": 1, "inner": {"size": 1, "prest": 2}}, also=also
    ).problems
    assert problem.endswith("did you mean 'inner.preset'?")


@dataclass(frozen=True)
class Limited:
    memory: Annotated[float, Unit("bytes", positive=True)]
    share: Annotated[float, Bound(0, 1)] | None = None
    sizes: Annotated[tuple[Annotated[int, Bound(1, 9)], ...], Length(1, 2)] = (1,)


def test_quantities_are_read_with_their_units():
    found = read_table(Limited, {"memory": "2 GB", "share": 0.5, "sizes": [9]}, limits=True)
    assert found == (Limited(2e9, 0.5, (9,)), [])


def test_limits_and_units_are_told_together_with_the_rest():
    table = {"memory": "0 GB", "share": 2, "sizes": [0, 10]}
    assert read_table(Limited, table, limits=True).problems == [
        "memory is '0 GB'; it must be from 1e-12 to 1e+21 bytes",
        "share is 2; it must be at most 1",
        "sizes[0] is 0; it must be at least 1",
        "sizes[1] is 10; it must be at most 9",
    ]
    assert read_table(Limited, {"share": 2, "sizes": [1, 2, 3]}, limits=True).problems == [
        "share is 2; it must be at most 1",
        "sizes is [1, 2, 3]; it must be a list of 1 to 2",
        "memory is missing",
    ]
    assert read_table(Limited, {"memory": "2 GB", "share": 2}) == (Limited(2e9, 2.0), [])
