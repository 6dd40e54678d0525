"""`verify`: proves that a layout computes the same gradients as one device.

1. the layout runs the case on its ranks; plain PyTorch runs it on one device
2. losses, norms, every gradient, and the parameters after k steps must agree
3. ranks that hold the same box of a weight must hold equal bits of it
4. the bytes that each rank sent and held must equal the bytes that were predicted
5. every mutation must be noticed: a comparison that cannot fail proves nothing
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from howdah.comm.meeting import Kind
from howdah.plan.boxes import Box
from howdah.plan.plan import Plan
from howdah.plan.sharding import fixed_capacity, held
from howdah.sim.traffic import activation_traffic, rows_traffic, step_traffic
from howdah.train.report import predicted_memory
from howdah.verify.case import Case
from howdah.verify.compare import Difference, compare
from howdah.verify.evidence import Evidence, gather
from howdah.verify.mutations import mutations
from howdah.verify.reference import reference
from howdah.verify.routers import routed_bytes

WORST = 5  # number of tensors that the report lists


@dataclass(frozen=True)
class Verdict:
    """The result of a verification.

    differences  all comparisons, in the order of computation
    problems     what is wrong, as sentences; empty when the layout is proved
    controls     each mutation's name, and the comparison that noticed it (None: it was not noticed)
    """

    case: Case
    differences: list[Difference]
    problems: list[str]
    controls: list[tuple[str, Difference | None]]

    @property
    def proved(self) -> bool:
        return not self.problems


class Runs(Protocol):
    """What runs a case on ranks: `Workers`, or `Launched`."""

    def run(
        self,
        what: Callable[..., Evidence],
        /,
        *given: Any,
        ranks: int,
        transport: Kind | None = None,
    ) -> list[Evidence]:
        """The evidence of all ranks, which call `what` with a transport and what is given."""
        ...


def verify(
    case: Case, workers: Runs, *, controls: bool = True, transport: Kind | None = None
) -> Verdict:
    """Runs the case on the layout and on one device, and compares the results.

    workers    processes, at least as many as the layout's ranks
    controls   whether to run the mutations, too
    transport  what carries the collectives; None: the best one that is available
    """
    run = partial(workers.run, gather, case, ranks=case.layout.world, transport=transport)
    theirs = reference(case)
    noise = _noise(case) if case.method.precision == "bf16" else None
    ranks = run()
    differences = compare(case, ranks[0], theirs, noise)
    problems = [*_diverged(differences), *_equal_bits(case.plan, ranks), *_bytes(case, ranks)]
    problems += _memory(case, ranks)
    noticed = []
    for mutation in mutations(case.plan, steps=case.steps) if controls else []:
        broken = run(mutation.mutate, mutation.shift)
        failing = _worst_failing(compare(case, broken[0], theirs, noise))
        noticed.append((mutation.name, failing))
        if failing is None:
            problems.append(
                f"the control '{mutation.name}' went unnoticed: the bounds prove nothing"
            )
    return Verdict(case, differences, problems, noticed)


def _noise(case: Case) -> Evidence:
    """The reference with different rounding. With tp, ranks round partial inner products, with cp
    attention to some of the keys, and a GPU's kernels round elsewhere than a CPU's. Each changes
    all of the arithmetic, so the reference is computed in float32. Otherwise only the order of the
    samples differs.
    """
    elsewhere = case.layout.tp * case.layout.cp > 1 or case.device != "cpu"
    return reference(case, wide=True) if elsewhere else reference(case, backwards=True)


def _worst_failing(differences: list[Difference]) -> Difference | None:
    """The failing comparison that is furthest above its bound, or None."""
    failing = [d for d in differences if not d.used <= 1]
    return max(failing, key=lambda difference: difference.used, default=None)


def _diverged(differences: list[Difference]) -> Iterator[str]:
    """Yields a sentence with the first comparison that fails, and how many fail."""
    failing = [difference for difference in differences if not difference.used <= 1]
    if failing:
        first = failing[0]
        gradients = [d for d in failing if d.what.startswith("gradient of")]
        also = ""
        if gradients and gradients[0] is not first:
            also = f"; the first of the gradients is the {gradients[0].what}"
        yield (
            f"{len(failing)} of {len(differences)} comparisons differ; the first is the "
            f"{first.what}: apart {first.apart:.3g}, allowed {first.bound:.3g}{also}"
        )


def _equal_bits(plan: Plan, ranks: list[Evidence]) -> Iterator[str]:
    """Yields a sentence for ranks that hold the same box of a weight with different bits."""
    first: dict[tuple[str, Box], int] = {}
    for rank, evidence in enumerate(ranks):
        others = {
            other
            for name, box in held(plan, rank).items()
            if (other := first.setdefault((name, box), rank)) != rank
            and evidence.checksums[name] != ranks[other].checksums[name]
        }
        for other in sorted(others):
            yield f"rank {rank} holds other weights than rank {other} after the last step"


def _bytes(case: Case, ranks: list[Evidence]) -> Iterator[str]:
    """Yields a sentence for each rank whose bytes sent, row by row, are not those predicted. What
    activations move is left out where they are (`_memory`).
    """
    for rank, evidence in enumerate(ranks):
        expected = step_traffic(case.plan, rank, evidence.wires, rows=False)
        every = {row: count * case.steps for row, count in expected.items() if count}
        given = rows_traffic(case.plan, rank, evidence.wires, *evidence.rows)
        given += activation_traffic(case.plan, rank, evidence.documents)
        predicted = dict(given + Counter(every))
        counted = {row: count for row, count in evidence.sent.items() if count}
        unknown = _on_gpus(case)
        if evidence.routed and not fixed_capacity(case.plan):
            routed = routed_bytes(case, rank, [one.routed for one in ranks])
            for row in [row for row in predicted if row.axis == "ep"]:
                predicted[row] = routed
            unknown = True  # rows at experts depend on the data
        for row in [row for row in counted if "activations" in row.operation] if unknown else ():
            predicted[row] = counted[row]
        if predicted != counted:
            yield f"rank {rank} was predicted to send {dict(predicted)} and sent {counted}"


def _memory(case: Case, ranks: list[Evidence]) -> Iterator[str]:
    """Yields a sentence for each component of which a rank holds other bytes than predicted. The
    activations of a GPU, and of a plan for GPUs, are left out: their list is that of 16 bits.
    """
    left_out = ("activations",) if _on_gpus(case) else ()
    if case.layout.ep > 1 and not fixed_capacity(case.plan):
        left_out = ("activations",)  # rows at experts depend on the data
    for rank, evidence in enumerate(ranks):
        predicted = predicted_memory(case.plan, rank, packed=evidence.packed)
        away = (name for name in predicted if " at " in name) if evidence.held else ()
        for component, count in {**dict.fromkeys(away, 0), **evidence.held}.items():
            if count != predicted[component] and component.partition(" at ")[0] not in left_out:
                yield (
                    f"rank {rank} was predicted to hold {predicted[component]:,} bytes of "
                    f"{component}, and held {count:,}"
                )


def _on_gpus(case: Case) -> bool:
    return case.device != "cpu" or case.plan.on_gpus


def report(verdict: Verdict) -> Iterator[str]:
    """Yields the lines of the verdict for the user."""
    case = verdict.case
    on_cpu = case.device == "cpu"
    where = "one device" if on_cpu else f"one CPU, the layout on {case.device}"
    yield (
        f"{case.layout} against {where}: {case.method.precision}, {case.steps} steps of "
        f"{case.samples} samples, {len(case.plan.weights)} weights"
    )
    yield f"{'share of bound':>15s}  {'apart':>9s}  {'allowed':>9s}  what"
    for difference in _worst(verdict.differences):
        yield (
            f"{difference.used:15.1e}  {difference.apart:9.1e}  {difference.bound:9.1e}  "
            f"{difference.what}"
        )
    for name, failing in verdict.controls:
        how = f"noticed by the {failing.what}" if failing else "NOT NOTICED"
        yield f"control: {name}: {how}"
    for problem in verdict.problems:
        yield f"problem: {problem}"
    if verdict.proved:
        held = "held" if on_cpu else "held (activations left out)"
        bits = "bits of all ranks, and every gradient within its bound"
        yield f"equal: bytes sent and {held}, {bits}"


def _worst(differences: list[Difference]) -> list[Difference]:
    """The worst loss, the worst norm, then the tensors that use most of their bound."""
    scalars = [d for d in differences if d.what.startswith(("loss", "gradient norm"))]
    tensors = [d for d in differences if d not in scalars]
    kinds = (
        [d for d in scalars if d.what.startswith("loss")],
        [d for d in scalars if d.what.startswith("gradient norm")],
    )
    shown = [max(kind, key=lambda d: d.used) for kind in kinds if kind]
    return shown + sorted(tensors, key=lambda d: -d.used)[:WORST]
