"""What is told of a run's precision, and how it is known."""

import pytest

from howdah.host import precision
from howdah.host.facts import parse_bf16
from howdah.host.precision import precision_notes


@pytest.mark.parametrize(
    ("there", "chosen", "words"),
    [
        ([], "bf16", "no arithmetic in bf16"),
        ([], "float32", ""),
        (["avx512_bf16"], "bf16", ""),
        (None, "bf16", ""),
    ],
)
def test_a_processor_without_bf16_instructions_is_told(there, chosen, words, monkeypatch):
    """`make train` took hours on one, and said nothing of it."""
    monkeypatch.setattr(precision, "bf16_instructions", lambda: there)
    note = "".join(precision_notes(chosen, "cpu"))
    assert bool(note) == bool(words)
    assert words in note
    assert not note or "float32 is many times as fast" in note


def test_instructions_for_bf16_are_read_in_order():
    intel = "model name\t: x\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16 amx_tile\n"
    assert parse_bf16(intel + intel) == ["amx_bf16", "avx512_bf16"]
    assert parse_bf16("flags : fpu avx2\n") == []
    assert parse_bf16("Features : fp asimd bf16\n") == ["bf16"]
    assert parse_bf16("") is None
