"""Keys and counters: golden values, because every run that was ever saved depends on them."""

import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.seeds import key, mix, permute

keys = st.integers(0, 2**64 - 1)

WORDS = (7, "weights", "layers.17.attention.q.weight")
GOLDEN_ZERO = 0x75DFCD439D7D2B84
GOLDEN_WORDS = 0x7063D98B368C7AC4
GOLDEN_MIX = [
    [0xB95F7CF8069F9EE5, 0x57D66ACE62281E94],
    [0xFAB73732161CF6DA, 0x75203B1771E0A277],
]
GOLDEN_ORDER = [3, 9, 6, 7, 4, 8, 1, 5, 0, 2]


# -- key -----------------------------------------------------------------------


def test_golden_keys():
    assert key(0) == GOLDEN_ZERO
    assert key(*WORDS) == GOLDEN_WORDS


def told(hash_seed):
    """What a process of its own makes of a word by `hash`, and its key."""
    code = f"from howdah.base.seeds import key; print(hash('dp'), key(*{WORDS!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return map(int, result.stdout.split())


def test_a_key_does_not_depend_on_the_process():
    """`hash` of a string differs between processes; a key must not. This process is neither of
    the two: its own PYTHONHASHSEED may be the same as theirs.
    """
    hashed, keys = zip(*map(told, ("0", "1")), strict=True)
    assert len(set(hashed)) == 2
    assert keys == (GOLDEN_WORDS, GOLDEN_WORDS)


def test_words_are_kept_apart():
    assert key("ab", "c") != key("a", "bc") != key("abc")


# -- mix -----------------------------------------------------------------------


def test_mix_is_splitmix64():
    """The first outputs of SplitMix64 from state 0, as its authors' program prints them.

    Its state is advanced before the first output: counter 1 of key 0 is the first word.
    """
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(0, np.arange(1, 4, dtype=np.uint64)).tolist() == expected


def test_golden_mix():
    counters = np.array([[0, 1], [2, 2**64 - 1]], dtype=np.uint64)
    assert mix(key(*WORDS), counters).tolist() == GOLDEN_MIX


@given(keys, st.integers(0, 2**64 - 1))
def test_a_word_depends_on_its_own_counter_alone(name, counter):
    alone = mix(name, np.array([counter], dtype=np.uint64))
    among = mix(name, np.array([5, counter, 9], dtype=np.uint64))
    assert alone[0] == among[1]


def test_mix_takes_any_shape():
    for shape in [(), (1,), (2, 3), (0,)]:
        counters = np.full(shape, 2**64 - 1, dtype=np.uint64)
        assert mix(2**64 - 1, counters).shape == shape


def test_bits_are_even():
    words = mix(key("bits"), np.arange(4096, dtype=np.uint64))
    ones = [(words >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert abs(np.array(ones) - 0.5).max() < 5 * 0.5 / np.sqrt(4096)  # five standard deviations


# -- permute -------------------------------------------------------------------


@given(keys, st.integers(1, 400))
def test_permute_is_a_bijection(name, size):
    assert sorted(permute(name, size, np.arange(size)).tolist()) == list(range(size))


@given(keys, st.integers(1, 2**40), st.data())
def test_a_position_can_be_asked_for_alone(name, size, data):
    index = data.draw(st.integers(0, size - 1))
    others = permute(name, size, [0, index, size - 1])
    assert permute(name, size, index) == others[1]
    assert 0 <= others.min() <= others.max() < size


def test_permute_keeps_the_form_of_the_index():
    assert permute(1, 10, 3).shape == ()
    assert permute(1, 10, [[1, 2, 3], [4, 5, 6]]).shape == (2, 3)


def test_golden_permutation():
    assert permute(key("order", 0), 10, np.arange(10)).tolist() == GOLDEN_ORDER


def test_keys_shuffle_differently_and_mix_far():
    first, second = (permute(key("order", epoch), 1000, np.arange(1000)) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert (first == np.arange(1000)).sum() < 10
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.15
