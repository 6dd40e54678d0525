"""Seconds of each part of the model on the rank that runs it: computation and blocking exchanges.

products    matrix products and attention, operator by operator (`sim/operator_times.py`)
memory      everything else passes over memory: norms, residuals, activations, rotations, softmax
            without flash, logits, copies of tokens for experts; each kind as often as the
            profile says, and for the gradients `again` times as often; weights and gradients that
            are rounded to be sent (`sim/rounding.py`)
host        a block takes at least as long as the host needs to start its kernels
tp, cp, ep  the exchanges of the part's stage (`plan/exchanges.py`), spread over its parts; nothing
            runs beside them but the fraction that the profile says
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from howdah.plan.exchanges import Exchange
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import fixed_capacity, local_of
from howdah.shapes.dims import Dim, RankSizes
from howdah.shapes.part import Part
from howdah.shapes.products import Pairs, Product, operators
from howdah.sim.operator_times import Speeds, Triple
from howdah.sim.profile import PLAIN, Profile
from howdah.sim.rounding import rounded


class PartTimes(NamedTuple):
    """Seconds of one part for one micro-batch (and token slice).

    products  matrix products and attention: forward, gradients of inputs, gradients of weights
    touch     passes over memory of the forward pass
    touched   those of the backward pass
    again     recomputation in the backward pass
    ahead     exchanges of the forward pass
    back      exchanges of the backward pass
    least     what the host needs to start the forward and the backward pass
    adds      whether that adds to the rest
    """

    products: Triple
    touch: float = 0.0
    touched: float = 0.0
    again: float = 0.0
    ahead: float = 0.0
    back: float = 0.0
    least: tuple[float, float] = (0.0, 0.0)
    adds: bool = False

    def seconds(self, kind: Kind) -> float:
        """Seconds of an action. I and W are the halves of a backward pass."""
        forward, back, weight = self.products
        host, half = self.least, self.touched / 2
        computes, starts = {
            Kind.FORWARD: (forward + self.touch + self.ahead, host[0]),
            Kind.BACKWARD: (back + weight + self.touched + self.again + self.back, host[1]),
            Kind.INPUT: (back + half + self.again + self.back, host[1] / 2),
            Kind.WEIGHT: (weight + half, host[1] / 2),
        }[kind]
        return computes + starts if self.adds else max(computes, starts)

    @property
    def host(self) -> float:
        """Seconds of the host that add to forward and backward."""
        return sum(self.least) if self.adds else 0.0


PartsOfStages = dict[int, dict[Part, PartTimes]]  # by stage, its parts in forward order


def part_times(
    plan: Plan,
    speeds: Speeds,
    rank: int,
    exchanged: Mapping[tuple[int, bool], float],
    profile: Profile = PLAIN,
) -> PartsOfStages:
    """The parts of the stages of `rank`.

    speeds     of the device
    exchanged  seconds of the exchanges of one micro-batch, by (stage, whether backward)
    """
    stages = stage_parts(plan, axis(plan.layout, "pp").index_of(rank))
    # blocks of one kind take equally long
    kinds = {_kind(plan, part): part for parts in stages.values() for part in parts}
    counted = {kind: _counted(plan, speeds, rank, part, profile) for kind, part in kinds.items()}
    found: PartsOfStages = {}
    for stage, parts in stages.items():
        ahead, back = (exchanged.get((stage, way), 0.0) / len(parts) for way in (False, True))
        action = profile.action / len(parts)
        found[stage] = {}
        for part in parts:
            times = counted[_kind(plan, part)]
            least = times.least[0] + action, times.least[1] + action
            found[stage][part] = times._replace(ahead=ahead, back=back, least=least)
    return found


def waited(row: Exchange, seconds: float, plan: Plan, speeds: Speeds, profile: Profile) -> float:
    """Of the seconds of an exchange for one micro-batch, those in which nothing is computed.

    A shared expert is computed while tokens go to the others, and its gradients while theirs come
    back: each is half of what is exchanged.
    """
    hidden = {"tp": profile.tp, "cp": profile.cp, "ep": profile.ep}.get(row.axis, 0.0)
    if not (row.beside and profile.beside):
        return seconds * (1 - hidden)
    forward = back = 0.0
    rank = next(iter(row.peers))
    of = local_of(plan, rank)
    for part in plan.stages.parts[row.stage]:
        if part.is_block and plan.sparse(part):
            some = [one for one in operators(plan.shape, part) if one.name.startswith("shared")]
            times = [speeds.operator(one, of) for one in some]
            once = sum(time.forward for time in times)
            forward += once
            back += sum(sum(time) for time in times) - once
            back += once * (plan.recompute.get(part, "none") == "full")
    return seconds - max(min(back if row.back else forward, seconds / 2), seconds * hidden)


def _kind(plan: Plan, part: Part) -> tuple[object, ...]:
    return part.stack, plan.sparse(part), plan.recompute.get(part, "none"), *asked_of(plan, part)


def asked_of(plan: Plan, part: Part) -> Iterator[tuple[bool, bool]]:
    """Of each product of a part, whether gradients of its input and its weight are computed;
    nothing where all are.
    """
    marks = plan.marks
    if marks.frozen:
        for one in operators(plan.shape, part, marks):
            yield part not in marks.still, not isinstance(one, Product) or one.trains


def _counted(plan: Plan, speeds: Speeds, rank: int, part: Part, profile: Profile) -> PartTimes:
    """A part without its exchanges."""
    of, spread = local_of(plan, rank), plan.layout.ep
    listed = operators(plan.shape, part, plan.marks)
    times = [speeds.operator(one, of, spread=spread) for one in listed]
    if asked := [*asked_of(plan, part)]:
        pairs = zip(times, asked, strict=True)
        times = [Triple(t[0], t[1] * back, t[2] * back * own) for t, (back, own) in pairs]
    products = (
        Triple(*(sum(column) for column in zip(*times, strict=True)))
        if times
        else Triple(0.0, 0.0, 0.0)
    )
    touch = _touched(plan, of, part, profile) / speeds.bandwidth
    touched = profile.again * touch * (part not in plan.marks.still)
    low = speeds.quantised(listed, of, plan.compute_bytes)
    least = (profile.forward, profile.backward) if part.is_block else profile.ends
    if plan.sparse(part):
        routed = profile.routed + profile.counts * (not fixed_capacity(plan))
        least = least[0] + routed, least[1] + 2 * routed
    again, chosen = 0.0, plan.recompute.get(part, "none")
    if part in plan.marks.still:
        chosen, least = "none", (least[0], 0.0)
    if chosen == "full":
        again = products.forward + touch + low
        least = least[0], least[1] + least[0]
    elif chosen == "selective" and profile.selective == "operators":
        again = products.forward / 2 + touch + low
    elif chosen == "selective":
        again = (
            sum(
                time.forward
                for one, time in zip(listed, times, strict=True)
                if isinstance(one, Pairs)
            )
            + _squares(plan, of, profile) / speeds.bandwidth
        )
    if part == "head" and profile.loss:
        norm = profile.norm * of.counts["sp_token"] * plan.shape.width * plan.compute_bytes
        both, norm = touch + touched, norm / speeds.bandwidth
        touch = profile.loss * both + norm
        touched = (1 - profile.loss) * both + profile.again * norm
        lost = 1 - profile.chunk / max(of.counts["token"], 1) if profile.chunk else 0.0
        again = max(lost, 0.0) * (products.forward + profile.loss * both)
    if part == "embedding" and profile.table and plan.marks.trains("embedding.weight"):
        table = of.size(Dim("vocab", plan.shape.vocab)) * plan.shape.width
        touched = profile.table * table * 4 / speeds.bandwidth
    ahead, back = (size / speeds.bandwidth for size in rounded(plan, rank, part))
    touch, touched = touch + low + ahead, touched + 2 * low + back
    return PartTimes(products, touch, touched, again, least=least, adds=profile.adds)


def _touched(plan: Plan, of: RankSizes, part: Part, profile: Profile) -> float:
    """Bytes that pass through memory in a forward pass of a micro-batch, beside the products."""
    shape, width = plan.shape, plan.compute_bytes
    if part == "head":
        dim = Dim("label" if shape.labels else "vocab", shape.outputs)
        rows = of.counts["token"] * of.size(dim)
        return profile.logits * rows * 4 / (1 + profile.again)
    if not part.is_block:
        return 0.0
    numbers = profile.stream * of.counts["sp_token"] * shape.width
    for one in operators(shape, part):
        if isinstance(one, Product) and one.columns.name in ("ffn", "expert_ffn"):
            rows = of.counts[one.per] * one.copies
            numbers += profile.activation * rows * of.size(one.columns)
            if one.groups > 1:
                numbers += profile.copies * rows * shape.width / 2  # gate and up
        if isinstance(one, Product) and one.columns.name in ("query", "key"):
            numbers += profile.heads * of.counts[one.per] * of.size(one.columns)
    return numbers * width + _squares(plan, of, profile)


def _squares(plan: Plan, of: RankSizes, profile: Profile) -> float:
    """Bytes of the numbers of pairs, which attention without flash writes and reads."""
    if profile.flash:
        return 0.0
    pairs = of.counts["pair"] * of.size(Dim("heads", plan.shape.heads))
    return profile.square * pairs * plan.compute_bytes
