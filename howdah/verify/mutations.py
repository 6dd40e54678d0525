"""Controls: breaks that a verification must notice, each as large as a real mistake.

A comparison that passes proves something only if it fails when it should. Each mutation breaks the
working code in one place. `verify` runs the case again with each of them; if one goes unnoticed,
the verification itself is in doubt.

    a sum skipped         one weight's gradient is not summed over the replicas
    a wrong count         one token too many per rank divides the loss
    a norm counted twice  one unit's squares enter the global norm twice
    a shifted micro-batch the first replica's first micro-batch has its labels moved by one

where states are sharded, and where blocks are recomputed:

    a sum across groups skipped      each group of shardG keeps its own sum
    a unit from before the update    zero3 keeps the weights that it first gathered of one unit
    another second run               one block's attention is masked differently when recomputed

where there are parameter servers; the second, where they update:

    a push skipped    the servers get nothing of one bucket of gradients
    a pull skipped    the workers keep one block from before the update

where the model is cut into stages:

    a gradient lost between stages   of one micro-batch, zeros arrive at one boundary
    a tie skipped                    the two stages of one embedding keep their own gradients

and where matrices are cut:

    an input's sum skipped  the gradient of one region's input is not summed over the tp ranks
    a part left out         of one weight's gradient, only the first tp rank's term is used
    rows measured in part   the lengths of one matrix's rows are those of each rank's columns alone

where sequences are shared: those of `context_mutations.py`; and where there are experts those of
`expert_mutations.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from howdah.comm.handle import Handle
from howdah.model.attention import Core
from howdah.model.block import Block
from howdah.model.documents import Blocks, Mask, Spans
from howdah.model.loss import Add
from howdah.optim.clip import squared_norm
from howdah.parallel.adapters import Beside, Sums
from howdah.parallel.ops import Handle as ParameterHandle
from howdah.parallel.served import PulledWeights
from howdah.parallel.tensor import Column, Columns, Row, TpBorder
from howdah.parallel.tensor_border import Pending, TpRegion
from howdah.parallel.weight_store import UnitWeightStore
from howdah.plan.exchanges import measured
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, tied_stages
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.messages import Message, message_order
from howdah.plan.sharding import placement, summed_over_tp
from howdah.plan.sums import Sum
from howdah.shapes.weights import Weight
from howdah.text.batches import Micro
from howdah.train.step import StepContext, count_tokens
from howdah.verify.context_mutations import breaks_of, own_blocks_again
from howdah.verify.evidence import Mutate, Shift
from howdah.verify.expert_mutations import breaks_of as of_experts


@dataclass(frozen=True)
class Mutation:
    """A break with its name: `mutate` breaks the step context, `shift` the batches."""

    name: str
    mutate: Mutate | None = None
    shift: Shift | None = None


def mutations(plan: Plan, *, steps: int = 2) -> list[Mutation]:
    """The mutations that are possible on a plan and that `steps` steps of it can show. A skipped
    sum shows only where several ranks add to the first weight's gradient; a unit from before the
    update only where a step follows an update.
    """
    found = [
        Mutation("a wrong count", mutate=count_one_more),
        Mutation("a norm counted twice", mutate=count_a_unit_twice),
        Mutation("a shifted micro-batch", shift=shift_first_micro),
        *_of_shares(plan, steps),
    ]
    if plan.layout.servers_update or (plan.layout.server and plan.layout.workers > 1):
        found.append(Mutation("a push skipped", mutate=skip_a_push))
    if plan.layout.servers_update and steps > 1 and plan.method.precision == "float64":
        found.append(Mutation("a pull skipped", mutate=skip_a_pull))
    if plan.layout.recompute != "none":
        found.append(Mutation("another second run", mutate=run_otherwise_again))
    if any(map(_is_back, _sent(plan))):
        found.append(Mutation("a gradient lost between stages", mutate=lose_a_gradient))
    if plan.layout.pp > 1 and tied_stages(plan):
        found.append(Mutation("a tie skipped", mutate=skip_the_tie))
    if plan.layout.tp > 1:
        if any(".attention." in weight.name for weight in _trained(plan)):
            found.append(Mutation("an input's sum skipped", mutate=skip_an_input_s_sum))
        if _partial(plan):
            found.append(Mutation("a part left out", mutate=leave_a_part_out))
        if any(measured(plan, part) for part in plan.recompute):
            found.append(Mutation("rows measured in part", mutate=measure_in_part))
    if plan.layout.cp > 1:
        found += [Mutation(name, mutate=mutate) for name, mutate in breaks_of(plan).items()]
    found += [Mutation(name, mutate=mutate) for name, mutate in of_experts(plan).items()]
    held = placement(_trained(plan)[0], plan, rank=0)
    sums = held is not None and len(held.summed) > 1
    return [Mutation("a sum skipped", mutate=skip_a_sum), *found] if sums else found


def _of_shares(plan: Plan, steps: int) -> Iterator[Mutation]:
    """Yields the mutations for plans whose states are sharded over several ranks, or whose weights
    come from another home.
    """
    shared = axis(plan.layout, "shard").size > 1
    if shared and axis(plan.layout, "across").size > 1:
        yield Mutation("a sum across groups skipped", mutate=skip_the_sum_across)
    comes = plan.layout.weights != "device" or (shared and plan.layout.zero == 3)
    if comes and steps > 1 and plan.method.precision == "float64":
        # in other precisions an update may change the loss by less than rounding does
        yield Mutation("a unit from before the update", mutate=keep_a_unit)


def count_one_more(context: StepContext) -> StepContext:
    """Every rank counts one token more than it has."""
    return replace(context, count=lambda micros: count_tokens(micros) + 1)


def count_a_unit_twice(context: StepContext) -> StepContext:
    """The squares of the first unit enter the norm twice."""

    def square(gradients: Iterable[Tensor]) -> Tensor:
        every = list(gradients)
        first = [one for one in every if one.numel()][:1]
        return squared_norm([*first, *every])

    return replace(context, square=square)


def skip_a_sum(context: StepContext) -> StepContext:
    """The first weight's gradient is rank 0's own term: the terms of the other ranks are left
    out.
    """
    rank, store = context.mesh.rank, context.placed.store
    if store:
        _leave_out(store, _trained(context.placed.plan)[0].name, rank)
        return context
    first = next(one for one in context.placed.model.parameters() if one.requires_grad)
    first.register_hook(lambda gradient: gradient if rank == 0 else torch.zeros_like(gradient))
    return context


def _leave_out(store: UnitWeightStore, name: str, rank: int) -> None:
    """Adds nothing to the gradient of the weight `name`, unless `rank` is 0."""
    kept, kept_rows, left_out = store.add, store.add_rows, name

    def leave_out(name: str, add: Add, *, now: bool = False) -> None:
        kept(name, add if rank == 0 or name != left_out else lambda out: None, now=now)

    def leave_rows_out(name: str, index: Tensor, rows: Tensor) -> None:
        kept_rows(name, index, rows if rank == 0 or name != left_out else torch.zeros_like(rows))

    store.add, store.add_rows = leave_out, leave_rows_out  # type: ignore[method-assign]


def skip_the_sum_across(context: StepContext) -> StepContext:
    """Each group that shards a copy of the states has the sum over its own ranks only."""
    across = tuple(axis(context.mesh.layout, "across").group(context.mesh.rank))
    return _skip(context, lambda row: row.axis == "dp" and tuple(row.ranks) == across)


def _skip(context: StepContext, chosen: Callable[[Sum], bool]) -> StepContext:
    """The chosen sums of the list are not performed: each rank keeps its own term. Stages without
    such a sum skip nothing; where none has one, the control goes unnoticed, which is told.
    """
    sums = context.placed.sums
    sums.skipped |= {number for number, row in enumerate(sums.sums) if chosen(row)}
    return context


def skip_a_push(context: StepContext) -> StepContext:
    """The first bucket of gradients is not summed on the servers."""
    return _skip(context, lambda row: row.op == "push" and row is context.placed.sums.sums[0])


def skip_a_pull(context: StepContext) -> StepContext:
    """The workers keep the weights that they first had of the first block."""
    gatherer = context.placed.gatherer
    assert isinstance(gatherer, PulledWeights)
    gatherer.units = [unit for unit in gatherer.units if unit != "layers.0"]
    return context


def keep_a_unit(context: StepContext) -> StepContext:
    """The weights of the first block of each rank stay as they were when first gathered."""
    store, units = context.placed.store, context.placed.units
    assert store is not None, "weights that are shared out have a store"
    known = context.placed.plan.recompute  # by block
    blocks = (unit.buffer.names for name, unit in units.items() if name in known)
    names, value = next(blocks, ()), store.value
    first: dict[str, Tensor] = {}

    def old(name: str) -> Tensor:
        now = value(name)
        return first.setdefault(name, now.clone()) if name in names else now

    store.value = old  # type: ignore[method-assign]
    return context


def run_otherwise_again(context: StepContext) -> StepContext:
    """In the first block of each rank, attention masks other tokens when it is recomputed."""
    still = context.placed.plan.marks.still
    blocks = cast(Iterable[Block], context.placed.model.layers.values())
    for block in (one for one in blocks if one.part not in still):
        block.attention.core = _recut(block.attention.core, context.placed.plan.sequence)
        break
    return context


def _recut(core: Core, sequence: int) -> Core:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, Blocks):
            return core(q, k, v, own_blocks_again(mask))
        whole = Spans((q.shape[0],), ((sequence,),))
        spans = mask if isinstance(mask, Spans) else whole
        return core(q, k, v, _Recut(spans.rows, spans.lengths))

    return attend


class _Recut(Spans):
    """Spans that, during recomputation (which has a graph), cut every row once, in its middle."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name != "lengths" or not torch.is_grad_enabled():
            return value
        return tuple((sum(cuts) // 2, sum(cuts) - sum(cuts) // 2) for cuts in value)


def lose_a_gradient(context: StepContext) -> StepContext:
    """The first gradient of a step that one stage sends to another is all zeros."""
    links, plan = context.placed.executor.links, context.placed.plan
    every = _sent(plan)
    lost = next(filter(_is_back, every))
    if context.mesh.index_of("pp") != lost.source:
        return context
    way = [m for m in every if (m.source, m.target) == (lost.source, lost.target)]
    turns, send = cycle(message is lost for message in way), links.send

    def lossy(x: Tensor, to: int) -> Handle:
        return send(torch.zeros_like(x) if to == lost.target and next(turns) else x, to)

    links.send = lossy  # type: ignore[method-assign]
    return context


def _sent(plan: Plan) -> list[Message]:
    """The messages between stages in a step; a stage that is frozen asks for no gradient."""
    if plan.layout.pp == 1:
        return []
    every = [message for queue in message_order(schedule_of(plan)).values() for message in queue]
    return [one for one in every if not (_is_back(one) and plan.still(one.action.stage - 1))]


def _is_back(message: Message) -> bool:
    return message.action.kind is not Kind.FORWARD


def skip_the_tie(context: StepContext) -> StepContext:
    """The stages of the embedding and of the head do not sum their gradients of the tied weight."""
    return _skip(context, lambda row: row.axis == "pp")


def skip_an_input_s_sum(context: StepContext) -> StepContext:
    """Every tp rank keeps its own term of the gradient of its first region's input; where some
    weights are frozen, of its last's, behind which some are not.
    """
    modules = list(context.placed.model.modules())
    found: list[Columns | TpBorder] = [m.together for m in modules if isinstance(m, Column)]
    borders = (getattr(module, "region", None) for module in modules)
    every = [*found, *(border for border in borders if isinstance(border, TpBorder))]
    for inside in reversed(every) if context.placed.plan.marks.frozen else every:
        region = inside.region
        inside.region = _WithoutSum(**{f.name: getattr(region, f.name) for f in fields(region)})
        break
    return context


class _WithoutSum(TpRegion):
    """A region that leaves out the terms of the other tp ranks."""

    def reduce_out(self, x: Tensor, *, now: bool = False) -> Pending:
        return lambda: self.own_slice(x).contiguous()


def leave_a_part_out(context: StepContext) -> StepContext:
    """One weight's gradient is the term of the first tp rank only."""
    store, plan = context.placed.store, context.placed.plan
    assert store is not None, "parts of tp have a store"
    _leave_out(store, _partial(plan)[0], context.mesh.index_of("tp"))
    return context


def measure_in_part(context: StepContext) -> StepContext:
    """Each tp rank measures its own columns of the first matrix of which it has some."""
    for module in context.placed.model.modules():
        if isinstance(module, Row) and module.low and module.low.lengths:
            low = module.low
            module.low = _InPart(**{f.name: getattr(low, f.name) for f in fields(low)})
            break
    return context


class _InPart(Beside):
    """An adapter that leaves out the columns of the other tp ranks."""

    def measured(
        self, v: Tensor, bias: ParameterHandle | None, over: Sums | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return super().measured(v, bias)


def _partial(plan: Plan) -> list[str]:
    """The names of the weights whose gradients are sums of terms of several tp ranks."""
    return [w.name for w in _trained(plan) if len(summed_over_tp(w, plan, 0)) > 1]


def _trained(plan: Plan) -> list[Weight]:
    return [weight for weight in plan.weights if weight.rate]


def shift_first_micro(batch: list[Micro], replica: int) -> list[Micro]:
    """Shifts the labels of the first micro-batch of replica 0 by one position."""
    if replica != 0:
        return batch
    first = batch[0]
    return [replace(first, labels=np.roll(first.labels, 1, axis=1)), *batch[1:]]
