"""Bytes of gradient sums and weight gathers by the formulas of the literature, unit by unit.

The plan sums bytes over its list of messages (`plan/sums.py`), which the run executes, too. These
formulas know no list, no bucket and no order: they are the independent second derivation.
"""

from collections import Counter

from howdah.plan.gather_order import gather_counts
from howdah.plan.mesh_axes import axis
from howdah.plan.sharding import held, local_buffers, replicas_of, summed_over_tp


def shares(length, parts):
    return [length * (i + 1) // parts - length * i // parts for i in range(parts)]


def group_bytes(elements, size, index):
    """Elements that a rank sends in a reduce-scatter, and in an all-gather, of `size` ranks."""
    own = shares(elements, size)[index]
    return elements - own, own * (size - 1)


def gradients_and_weights(plan, rank):
    """Bytes by (axis, operation) that `rank` sends in a step."""
    layout, sent = plan.layout, Counter()
    wide, narrow = plan.master_bytes, plan.compute_bytes
    gathers = gather_counts(plan, rank) if layout.zero == 3 else None

    def add(label, elements, size, index, *, scatter=0, gather=0):
        first, second = group_bytes(elements, size, index)
        sent[label, "reduce_scatter"] += first * scatter
        sent[label, "all_gather"] += second * gather

    for buffer in local_buffers(plan, rank):
        kind = "expert_" if replicas_of(buffer.unit) == "expert_replicas" else ""
        inside, across = axis(layout, f"{kind}shard"), axis(layout, f"{kind}across")
        here = inside.index_of(rank)
        shared = layout.accumulate == "shard" and inside.size > 1
        reduces = plan.micros if shared or layout.gradients != "device" else 1
        # the sum over replicas, and the weights or gradients that come back
        add("dp", buffer.length, inside.size, here, scatter=wide * reduces)
        if layout.zero == 0:
            add("dp", buffer.length, inside.size, here, gather=wide * reduces)
        else:
            times = 1 if gathers is None else gathers[buffer.unit]
            add("dp", buffer.length, inside.size, here, gather=narrow * times)
        # copies of the states
        own = shares(buffer.length, inside.size)[here]
        add("dp", own, across.size, across.index_of(rank), scatter=wide, gather=wide)
        # tied stages
        places = plan.ranks_of_unit[buffer.unit]
        place = places.index(axis(layout, "pp").index_of(rank))
        add("pp", own, len(places), place, scatter=wide, gather=wide)
        # terms of the tp ranks
        boxes, terms = held(plan, rank), Counter()
        for name in buffer.names:
            terms[summed_over_tp(plan.weight(name), plan, rank)] += boxes[name].elements
        for parts, elements in terms.items():
            index = parts.index(axis(layout, "tp").index_of(rank))
            often = wide * reduces
            add("tp", elements, len(parts), index, scatter=often, gather=often)
    return +sent
