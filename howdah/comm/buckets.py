"""Buckets: which units' gradients go in one call.

A call costs a latency however small it is; waiting to fill a large call wastes time in which
bytes could already flow. Units are taken in the order in which backward finishes them, and a
bucket is closed when it holds enough bytes.

    backward finishes   head  layers.5  layers.4  layers.3  ...  embedding
    buckets            [head  layers.5][layers.4  layers.3] ... [embedding]
"""

from collections.abc import Sequence

from howdah.plan.flat import Buffer


def fill_buckets(
    buffers: Sequence[Buffer], *, element_bytes: int, least_bytes: int
) -> list[list[Buffer]]:
    """Buffers given in forward order → buckets in the order in which they will be ready.

    Every bucket but the last holds at least `least_bytes`.
    """
    buckets: list[list[Buffer]] = [[]]
    for buffer in reversed(buffers):
        filled = sum(b.length for b in buckets[-1]) * element_bytes
        if buckets[-1] and filled >= least_bytes:
            buckets.append([])
        buckets[-1].append(buffer)
    return [bucket for bucket in buckets if bucket]
