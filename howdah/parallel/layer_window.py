"""The window: the memory in which units are whole for as long as they are used
(layer windows: https://arxiv.org/abs/2206.03664, STRONGHOLD).

    units in use, in order      a        b        c        d
    left end                  |a       |a       |d       |d       each unit takes an end that is
    middle                    |        |      c |      c |      c free, or else the right end of the
    right end                 |      b |      b |      b |        first gap in which it fits

The window is one tensor, as long as the units that are in it at most: the longest ones. Where a
long unit finds gaps that only together have room for it, it does not come ahead of its use; when it
is used, those that are there move together. Nothing here knows of ranks or times, so that all ranks
place their units alike.
"""

from torch import Tensor


class Window:
    """The memory of whole units, by name.

    memory  the tensor
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._places: dict[str, tuple[int, int]] = {}  # (start, stop) by unit, from the left

    def take(self, unit: str, length: int) -> Tensor | None:
        """Room for a unit; None if no gap is long enough."""
        if (start := self._gap(length)) is None:
            return None
        self._places[unit] = start, start + length
        self._places = dict(sorted(self._places.items(), key=lambda one: one[1]))
        return self.memory[start : start + length]

    def give(self, unit: str) -> None:
        """Takes the room of a unit back."""
        del self._places[unit]

    def together(self) -> dict[str, Tensor]:
        """Moves all units to the left, so that there is one gap. Returns where they are now."""
        found, end = dict[str, Tensor](), 0
        for unit, (start, stop) in self._places.items():
            there = self.memory[end : end + stop - start]
            if start != end:
                there.copy_(self.memory[start:stop].clone())
            self._places[unit] = end, end + stop - start
            found[unit], end = there, end + stop - start
        return found

    def _gap(self, length: int) -> int | None:
        """The start of the room for so many elements: at the left end, at the right, or between."""
        edges = [0, *(edge for place in self._places.values() for edge in place)]
        gaps = [*zip(edges[::2], [*edges[1::2], len(self.memory)], strict=True)]
        (_, left), (right, end) = gaps[0], gaps[-1]
        if left >= length:
            return 0
        if end - right >= length:
            return end - length
        return next((stop - length for start, stop in gaps[1:-1] if stop - start >= length), None)
