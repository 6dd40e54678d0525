"""A worker's end of the connections to its servers: what `parallel/` calls to push and to pull.

    backward     head ── layers.1 ── layers.0        push: a copy of each chunk goes to the outbox,
    outbox       [head][head][layers.1]…             and the most urgent one is sent first
    forward           embedding ── layers.0 ──       waits for its own chunks alone

Each server has a connection of its own (`link.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from howdah.comm.handle import Handle
from howdah.parallel.flat_params import FlatUnit
from howdah.server.chunks import Chunk
from howdah.server.link import Link
from howdah.server.moments import Moments, Record, nobody
from howdah.server.pulled import Pulled
from howdah.server.way import Way


class Client:
    """The links of one rank of a worker to all its servers: the `links` of `parallel/served.py`.

    clock   of the step that is computed
    tokens  by which the step's gradients will be divided on the servers
    trades  whether a push asks for the weights of the next clock too, so that they come while other
            units are still pushed. For rules by which they are the same whenever they are answered
            (bsp): under others they would be older than at the next forward pass
    """

    def __init__(
        self,
        way: Way,
        place: int,
        chunks: Sequence[Sequence[Chunk]],
        units: Mapping[str, FlatUnit],
        record: Record = nobody,
        *,
        rank: int = 0,
    ) -> None:
        self.clock, self.tokens, self._units, self._record = 0, 0.0, units, record
        self._rank, self._links, self.trades = rank, list[Link](), False
        for number, every in enumerate(chunks):
            mine = {key: chunk for key, chunk in enumerate(every) if chunk.rank == rank}
            self._links.append(Link(way, number, (place, rank), mine, units))
            self._links[-1].moments = Moments(record)

    def join(
        self,
        begins: Callable[[Iterable[int]], int],
        agree: Callable[[list[int]], list[int]] = list,
    ) -> int:
        """Connects to all servers. Returns the clock at which the worker begins. Raises UserError
        for a server that refuses it, ServerGone for one that cannot be reached.

        begins  the clock at which it does, of those that the servers tell (`Sync.begins`)
        agree  tells all ranks of a worker what the first was told: its clock, and by server its
               incarnation, by which the others join
        """
        told = [0] * (1 + len(self._links))
        if self._rank == 0:
            told = [begins([link.join() for link in self._links])]
            told += [link.incarnation for link in self._links]
        self.clock, *incarnations = agree(told)
        for link, incarnation in zip(self._links, incarnations, strict=True):
            if self._rank:
                link.join(incarnation)
            link.begin(self.clock)
        return self.clock

    def push(self, unit: str) -> list[Handle]:
        """Posts the gradients of a unit, as they are now."""
        one = self._units[unit]
        assert one.gradients is not None
        for link in self._links:
            link.push(unit, one.gradients, self.clock, self.tokens, trades=self.trades)
        return []

    def pull(self, unit: str) -> list[Handle]:
        """Asks for the weights of a unit. The handle is done when they are in their places."""
        for link in self._links:
            link.pull(unit, self.clock)
        return [Pulled(self._links, unit, self._record)]

    def drain(self) -> None:
        """Waits until all servers have acknowledged all pushes."""
        for link in self._links:
            link.drain()

    def close(self) -> None:
        """Leaves: the servers no longer wait for this worker."""
        for link in self._links:
            link.close()

    @property
    def deepest(self) -> int:
        """The most chunks that waited to be sent to one server."""
        return max(link.outbox.deepest for link in self._links)

    @property
    def queued(self) -> int:
        """The most chunks that wait now to be sent to one server."""
        return max(link.outbox.waiting for link in self._links)

    @property
    def came_back(self) -> int:
        """How often a connection was made again."""
        return sum(link.came_back for link in self._links)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of gradients that were pushed, and of weights that were pulled, so far."""
        every = [link.moved for link in self._links]
        return sum(pushed for pushed, _ in every), sum(pulled for _, pulled in every)
