"""Keys for weights, noise and data order: every random choice is a function of its name.

Nothing here has state. A key is a hash of words, `mix` turns (key, counter) into 64 random
bits, and `permute` shuffles a range so that any position can be computed alone. `model/noise.py`
has the same `mix` in torch operations; a test checks that both give equal bits.

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) on key + counter · φ.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)

Words = npt.NDArray[np.uint64]


def key(*words: object) -> int:
    """A 64-bit hash that depends on the words alone: not on the process, the layout or `hash`."""
    text = "\x1f".join(map(str, words))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(key: int, counters: Words) -> Words:
    """Random 64-bit words, one for each counter (uint64, any shape)."""
    # The overflow is intended. numpy is silent about it for arrays, but warns for scalars.
    z = np.uint64(key) + np.atleast_1d(counters) * np.uint64(GOLDEN)
    for multiplier, shift in zip(MULTIPLIERS, SHIFTS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    z = z ^ (z >> np.uint64(SHIFTS[2]))
    return np.asarray(z, dtype=np.uint64).reshape(np.shape(counters))


def permute(key: int, size: int, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The positions (int64, shape of `index`) to which the shuffle `key` of range(size) moves the
    positions `index`.

    A Feistel network over the next power of four, applied again until the result is inside the
    range (cycle walking, Black and Rogaway 2002): a bijection of range(size) without a table.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    values = np.array(index, dtype=np.uint64, ndmin=1)
    todo = np.ones(values.shape, dtype=bool)
    while todo.any():
        values[todo] = _feistel(key, values[todo], half, mask)
        todo = values >= size
    return values.astype(np.int64).reshape(np.shape(index))


def _feistel(key: int, values: Words, half: int, mask: np.uint64) -> Words:
    left, right = values >> np.uint64(half), values & mask
    for turn in range(4):
        left, right = right, left ^ (mix(key + turn & (1 << 64) - 1, right) & mask)
    return np.asarray((left << np.uint64(half)) | right, dtype=np.uint64)
