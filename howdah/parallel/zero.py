"""ZeRO 1 and 2: states that would be equal on every replica are sharded (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054).

    zero1   each rank updates its own range of every unit; it has masters and moments of that range
    zero2   of the gradients, too, only the own range is kept between micro-batches

    backward  head ── layers.5 ── …         reduce-scatter of gradients, unit by unit
    update    own range of every unit
    forward         embedding ── layers.0 ── …       all-gather of weights, unit by unit: the
              gather [emb][layers.0][layers.1] …     next forward waits for a unit when it needs it

Gradients are summed by `sums.py`; this file brings the updated weights to all ranks. With one
reduction per step, the bytes are those of plain data parallelism: the two halves of its
all-reduce. When shares are accumulated (`accumulate=shard`), every micro-batch pays the first half.

`shardG` shards within groups of G ranks, each with a copy of everything: weights are gathered
inside a group, where the links may be faster, and shares of gradients are summed across groups.
"""

from collections.abc import Mapping

from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.handle import Handle
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.plan.flat_buffers import Buffer
from howdah.plan.sharding import shard_axes
from howdah.plan.sums import Shared, fill_buckets


class UpdatedWeights:
    """Brings every rank's updated range to all ranks, while the next forward already runs.

    sharers  by unit that is shared out, the ranks that have its other ranges

    The all-gathers start with the forward pass that needs them, not with the update. So the small
    operations between the two (the count of the next step's tokens) go first.
    """

    def __init__(
        self, units: dict[str, FlatUnit], sharers: Mapping[str, Group], waited: Stopwatch
    ) -> None:
        self._units, self._sharers, self._waited = units, sharers, waited
        width = next(iter(units.values())).weights.element_size()
        alike: dict[Group, list[Buffer]] = {}  # experts may have sharers of their own
        for unit, group in sharers.items():
            alike.setdefault(group, []).append(units[unit].buffer)
        filled = (fill_buckets(some, element_bytes=width) for some in alike.values())
        self._buckets = [[one.unit for one in bucket] for some in filled for bucket in some]
        self._stale = False
        self._coming: dict[str, Handle] = {}

    def updated(self) -> None:
        """Records that the ranks' own ranges have changed."""
        self._stale = True

    def start(self) -> None:
        """Starts the all-gathers after an update, in forward order."""
        if not self._stale:
            return
        self._stale = False
        for bucket in self._buckets:
            weights = [self._units[unit].weights for unit in bucket]
            handle = self._sharers[bucket[0]].all_gather(weights, async_op=True)
            self._coming.update(dict.fromkeys(bucket, handle))

    def wait(self, *units: str) -> None:
        """Waits until the weights of `units` are those of the last update; of all units when none
        is named.
        """
        self.start()
        with self._waited:
            for unit in units or tuple(self._coming):
                if handle := self._coming.pop(unit, None):
                    handle.result()


def sharers_of(units: Mapping[str, FlatUnit], plan: Shared, mesh: Mesh) -> dict[str, Group]:
    """By unit of which ranks have shares, the group of these ranks. All ranks call together."""
    if plan.layout.zero == 0:
        return {}
    shared = [name for name, unit in units.items() if unit.trains or plan.layout.zero == 3]
    along = {unit: shard_axes(plan.layout, unit)[0] for unit in shared}
    groups = {
        one: mesh.group_of(one.group(mesh.rank), label="dp")
        for one in dict.fromkeys(along.values())
        if one.size > 1
    }
    return {unit: groups[one] for unit, one in along.items() if one in groups}
