"""What a run tells of its precision."""

import pytest

from howdah.host import precision
from howdah.host.precision import bf16_instructions, precision_lines


@pytest.mark.parametrize(
    ("there", "chosen", "words"),
    [
        ({"avx2": True, "amx_bf16": False}, "bf16", "no arithmetic in bf16"),
        ({"avx2": True, "amx_bf16": False}, "float32", ""),
        ({"avx2": True, "avx512_bf16": True}, "bf16", ""),
        (None, "bf16", ""),
    ],
)
def test_a_processor_without_bf16_instructions_is_told(there, chosen, words, monkeypatch):
    """`make train` took hours on one, and said nothing of it."""
    monkeypatch.setattr(precision, "cpu_capabilities", lambda: there)
    lines = precision_lines(chosen, "cpu")
    assert len(lines) == bool(words)
    assert all(words in line and "float32 is many times as fast" in line for line in lines)


def test_instructions_for_bf16_are_named_in_order():
    assert bf16_instructions({"b_bf16": True, "avx": True, "a_bf16": 1}) == ["a_bf16", "b_bf16"]
    assert bf16_instructions({"avx2": True}) == []
    assert bf16_instructions(None) is None
