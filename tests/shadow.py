"""The sums that a rank gives to its wires in a step, beside the lists that the plan has of them.

The real code runs on the wire that only records (`recorded_steps.py`). Of each set of ranks, the
messages that sum must be those of `plan/sums.py`, each as long and as often. Over tp ranks they are
so too, and the others that sum there are as many as `plan/exchanges.py` says. All-gathers of the
list (the second half of a tied embedding's sum) are among those of weights. The step's scalars are
float64 and left out, so the plan must not be in float64. Tensors without data have no home: a plan
with homes off the device must list the sums of the same plan without them, and that one is run.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from recorded_steps import record_rank
from recorded_wire import Backend

from howdah.plan.exchanges import exchanges
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sums import sums_of

GATHER = "all_gather"
UNEVEN = "reduce"  # of a reduce-scatter whose shares are not equal, one for each rank
SUMS = ("all_reduce", "reduce_scatter", GATHER, UNEVEN)


class Message(NamedTuple):
    """elements: of the whole, before it is cut into shares"""

    ranks: tuple[int, ...]
    operation: str
    elements: int

    def __str__(self) -> str:
        return f"{self.operation} of {self.elements:,} over {'-'.join(map(str, self.ranks))}"


def listed(plan: Plan, rank: int) -> Counter[Message]:
    """The messages of the plan's list, with how often a step sends each."""
    found: Counter[Message] = Counter()
    for row in sums_of(plan, rank):
        for elements in row.messages:
            times = plan.micros if row.every_micro else 1
            found[Message(tuple(row.ranks), row.op, elements)] += times
    return found


def made(plan: Plan, rank: int, backend: type[Backend] = Backend) -> Counter[Message]:
    """The messages that a rank sums by in a step, those of activations among them; and gathers."""
    recorded = record_rank(plan, rank, ("step",), backend)
    return Counter(
        Message(op.wire.ranks, op.name, max(op.counts))
        for _, call in recorded.calls
        for op in call.ops
        if op.name in SUMS and op.dtype != torch.float64
    )


def at_home(plan: Plan) -> Plan:
    """The plan with all states on the device."""
    kept = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), "device")
    return replace(plan, layout=replace(plan.layout, **kept))


def differences(plan: Plan, backend: type[Backend] = Backend) -> Iterator[str]:
    """Yields a sentence for each message that a rank makes or should make, and does not."""
    assert plan.method.precision != "float64"
    for rank in range(plan.layout.world):
        wanted, found = listed(plan, rank), made(at_home(plan), rank, backend)
        tp = tuple(axis(plan.layout, "tp").group(rank))
        for message, times in (wanted - found).items():
            yield f"rank {rank} lacks {times} x {message}"
        more = Counter({m: n for m, n in (found - wanted).items() if m.operation != GATHER})
        for message, times in more.items():
            if len(tp) == 1 or message.ranks != tp:
                yield f"rank {rank} also makes {times} x {message}"
        scatters = (
            row.times
            for row in exchanges(plan, rank)
            if (row.axis, row.operation) == ("tp", "reduce_scatter")
        )
        activations = sum(
            times / (len(tp) if message.operation == UNEVEN else 1)
            for message, times in more.items()
            if message.ranks == tp
        )
        if len(tp) > 1 and activations != sum(scatters):
            yield f"rank {rank} sums {activations:g} activations over tp, which is not as listed"
