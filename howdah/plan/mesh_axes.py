"""Which ranks communicate along an axis: every group is given by a size and a stride.

Ranks are numbered with pp slowest and tp fastest, so that tp neighbours share the fastest links:

    rank = ((pp·DP + dp)·CP + cp)·TP + tp          pp2 dp2 tp2:   0 1 | 2 3     stage 0
                                                                  4 5 | 6 7     stage 1

    axis            size        stride       with pp2 dp2 tp2, the group of rank 5
    tp              TP          1            4 5
    cp              CP          TP           5
    traders         N           TP           5            parts of a sequence, traded for heads
    ring            CP/N        TP·N         5            groups of traders, or ranks of cp alone
    dp              DP          TP·CP        5 7
    pp              PP          TP·CP·DP     1 5
    replicas        DP·CP       TP           5 7       the same dense weights
    ep              EP          TP           the same layers, different experts
    expert_replicas DP·CP/EP    TP·EP        the same experts
    shard           G           TP           one copy of the sharded states
    across          DP·CP/G     TP·G         the same share in every copy
    hpz             H           TP           a second copy of the weights of zero3
    expert_shard    …           TP·EP        shard and across, for the states of experts
    expert_across

An ep group is made of neighbours along dp×cp: they hold different experts, and still process
different tokens. G is the layout's `shard`, or DP·CP;
H its `hpz`, or G.
"""

from functools import lru_cache
from math import gcd
from typing import Literal, NamedTuple

from howdah.plan.layout import Layout

Axis = Literal[
    "tp",
    "cp",
    "traders",
    "ring",
    "dp",
    "pp",
    "replicas",
    "ep",
    "expert_replicas",
    "shard",
    "across",
    "hpz",
    "expert_shard",
    "expert_across",
]


class Stride(NamedTuple):
    """Groups of the ranks base, base + stride, … base + (size - 1)·stride."""

    size: int
    stride: int

    def index_of(self, rank: int) -> int:
        """The index of `rank` in its group."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> range:
        """The ranks of the group that contains `rank`, in order."""
        base = rank - self.index_of(rank) * self.stride
        return range(base, base + self.size * self.stride, self.stride)


@lru_cache(4096)  # called for each weight and rank of large models
def axis(layout: Layout, name: Axis) -> Stride:
    """Size and stride of the groups of an axis; the layout must be resolved."""
    tp, cp, replicas, ep = layout.tp, layout.cp, layout.replicas, layout.ep
    shard, same = layout.sharers, replicas // ep
    expert_shard = gcd(same, max(shard // ep, 1))
    return {
        "tp": Stride(tp, 1),
        "cp": Stride(cp, tp),
        "traders": Stride(layout.trading, tp),
        "ring": Stride(cp // layout.trading, tp * layout.trading),
        "dp": Stride(replicas // cp, tp * cp),
        "pp": Stride(layout.pp, tp * replicas),
        "replicas": Stride(replicas, tp),
        "ep": Stride(ep, tp),
        "expert_replicas": Stride(same, tp * ep),
        "shard": Stride(shard, tp),
        "across": Stride(replicas // shard, tp * shard),
        "hpz": Stride(layout.hpz or shard, tp),
        "expert_shard": Stride(expert_shard, tp * ep),
        "expert_across": Stride(same // expert_shard, tp * ep * expert_shard),
    }[name]
