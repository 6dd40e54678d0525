"""Quantities and counts: what is read, what is printed, what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.base.quantities import EXAMPLE, UNITS, parse_count, parse_quantity, spell


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80GB", "bytes", 80e9),
        ("95 GiB", "bytes", 95 * 2**30),
        ("1.5 TB", "bytes", 1.5e12),
        ("200 Gb/s", "bytes/s", 25e9),
        ("3.2 Tb/s", "bytes/s", 400e9),
        ("25 GB/s", "bytes/s", 25e9),
        ("2_039 GB/s", "bytes/s", 2.039e12),
        ("1 MiB/s", "bytes/s", 2**20),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("1e3 TFLOP/s", "FLOP/s", 1e15),
        ("5 us", "seconds", 5e-6),
        ("250 ns", "seconds", 2.5e-7),
        ("1.2 kW", "watts", 1200),
        ("25000 USD", "USD", 25000),
        ("2.5 USD/h", "USD/h", 2.5),
        ("385 g/kWh", "kg/kWh", 0.385),
    ],
)
def test_quantities(text, kind, value):
    assert parse_quantity(text, kind, where="here") == value


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (80, "bytes", "x.toml: memory is 80, which has no unit; write it like '80 GB'"),
        ("80", "bytes", "x.toml: memory '80' has no unit; write it like '80 GB'"),
        ("80 Gb/s", "bytes", "'Gb/s' counts bytes/s, but bytes are wanted, like '80 GB'"),
        ("900 GB", "bytes/s", "'GB' counts bytes, but bytes/s are wanted"),
        ("80 Gigs", "bytes", "'Gigs' is no unit of bytes"),
        ("200 Gbps", "bytes/s", "'Gbps' is no unit of bytes/s; did you mean 'Gb/s'?"),
        ("989 TFLOPS", "FLOP/s", "did you mean 'TFLOP/s'?"),
        ("-5 us", "seconds", "is not a number and a unit, like '5 us'"),
        ("nan GB", "bytes", "is not a number and a unit"),
        ("", "bytes", "is not a number and a unit"),
        ("1e99 GB", "bytes", "is '1e99 GB'; it must be 0, or from 1e-12 to 1e+21 bytes"),
        ("9" * 5000 + " GB", "bytes", "it must be 0, or from 1e-12 to 1e+21 bytes"),
        ("1e-99 s", "seconds", "it must be 0, or from 1e-12 to 1e+21 seconds"),
    ],
)
def test_a_wrong_quantity_is_one_sentence(text, kind, sentence):
    with pytest.raises(UserError) as refused:
        parse_quantity(text, kind, where="x.toml: memory")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("x.toml: memory ")


def test_what_divides_is_more_than_nothing():
    assert parse_quantity("0 GB/s", "bytes/s", where="x") == 0
    with pytest.raises(UserError, match=r"x is '0 GB/s'; it must be from 1e-12 to 1e\+21 bytes/s"):
        parse_quantity("0 GB/s", "bytes/s", where="x", positive=True)


@pytest.mark.parametrize("kind", UNITS)
def test_the_example_of_a_kind_is_of_that_kind(kind):
    assert parse_quantity(EXAMPLE[kind], kind, where="here") > 0


@given(st.sampled_from(sorted(UNITS)), st.floats(1e-9, 1e20))
def test_what_is_printed_reads_back(kind, value):
    text = spell(value, kind)
    if value >= min(UNITS[kind].values()) and "e" not in text.split()[0]:
        assert parse_quantity(text, kind, where="here") == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (25e9, "bytes/s", "25 GB/s"),
        (2.039e12, "bytes/s", "2.039 TB/s"),
        (80e9, "bytes", "80 GB"),
        (0.0, "bytes", "0 B"),
        (3.4e-6, "seconds", "3.4 us"),
        (25000.0, "USD", "25000 USD"),
        (0.385, "kg/kWh", "385 g/kWh"),
    ],
)
def test_printing(value, kind, text):
    assert spell(value, kind) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15T", 15 * 10**12),
        ("300B", 300 * 10**9),
        ("300b", 300 * 10**9),
        ("1.4e12", 1_400_000_000_000),
        ("1.4T", 1_400_000_000_000),
        ("15_000", 15_000),
        ("15,000", 15_000),
        ("32K", 32_000),
        ("2.5M", 2_500_000),
        (" 7 ", 7),
    ],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lots", "tokens 'lots' is no count; write it like 15T, 300B, 1.4e12 or 15_000"),
        ("15X", "is no count"),
        ("15 T tokens", "is no count"),
        ("-3B", "is no count"),
        ("", "is no count"),
        ("nan", "is no count"),
        ("1e999", "is no count"),
        ("1" * 100_000, "is no count"),
        ("0", "must lie between 1 and 1e24"),
        ("9e99", "must lie between 1 and 1e24"),
        ("1.5", "is 1.5, which is not a whole number"),
        ("0.0001K", "is not a whole number"),
    ],
)
def test_a_wrong_count_is_one_sentence(text, sentence):
    with pytest.raises(UserError) as refused:
        parse_count(text)
    assert sentence in str(refused.value)


@given(st.integers(1, 10**24))
def test_whole_numbers_are_read_to_the_last_digit(count):
    assert parse_count(str(count)) == count
    assert parse_count(f"{count:_}") == count


def test_another_count_has_its_own_name():
    with pytest.raises(UserError, match=r"^batch 'x' is no count"):
        parse_count("x", what="batch")
