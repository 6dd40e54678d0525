"""Sums gradients over ranks while the backward pass still runs.

The loss was divided by the *global* token count before the backward pass, so each rank's gradients
are terms of a sum, and nothing is divided here (Goyal et al. 2017, https://arxiv.org/abs/1706.02677;
Li et al. 2020, https://arxiv.org/abs/2006.15704).

`plan/sums.py` lists the messages, and `plan/sum_order.py` decides when each starts and when it is
waited for. This file has the tensors:

    whole gradients   summed in place, in the flat gradients of their units
    shares (ZeRO-2)   a bucket has a slot of the window from its first gradient until it is reduced;
                      then the rank's share is added to the share of the earlier micro-batches
    terms of tp       copied side by side, summed, and copied back to where the terms were
    rows at home      of a table of tokens: one for each token, added to the gradient there

The work of a sum is done on the progress thread of its group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.handle import DONE, Handle, Several
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.homes import Homes
from howdah.parallel.mesh import Mesh
from howdah.parallel.quantised_sums import QuantisedSums
from howdah.parallel.row_sums import start_rows
from howdah.parallel.served import Links
from howdah.plan.flat_buffers import gaps
from howdah.plan.plan import Plan
from howdah.plan.sum_order import Complete, SumOrder
from howdah.plan.sums import Span, Sum, sums_of
from howdah.plan.window import window_of


class Window:
    """Memory for whole gradients before they are reduced to shares: slots for buckets.

    memory  one tensor with all slots
    length  elements of a slot
    added   number of slots that had to be added; 0 if the plan was right
    """

    def __init__(self, slots: int, length: int, like: Tensor) -> None:
        self.memory, self.length, self.added = like.new_empty(slots * length), length, 0
        self.free = list(self.memory.view(slots, length)) if slots else []

    def add(self) -> None:
        """Adds a slot."""
        self.added += 1
        self.free.append(self.memory.new_empty(self.length))


@dataclass
class Slot:
    """A bucket in the window.

    flats    the flat gradient of each unit
    views    the gradient of each weight, by name
    unset    names of weights to whose gradient nothing was added so far
    """

    memory: Tensor
    flats: list[Tensor]
    views: dict[str, Tensor]
    unset: set[str]


class GradientSums:
    """The sums of one rank; there are none if it has all terms itself.

    sums     the list, which the plan has decided
    order    decides when they start; the backward pass reports to it
    sent_as  the dtype of what is sent, if it is not that of the gradients
    links    to the parameter servers, if there are any
    homes    of gradients that are kept off the device, if they are
    quantised  sums in 4 bits, if there are any
    skipped  numbers of sums that are not performed, so that each rank keeps its own term: for
             `verify`, which has to notice it
    """

    def __init__(  # noqa: PLR0913 (facts that have nothing in common, most by keyword)
        self,
        sums: Sequence[Sum],
        groups: Sequence[Group],
        units: Mapping[str, FlatUnit],
        window: Window,
        waited: Stopwatch,
        *,
        sent_as: torch.dtype | None = None,
        links: Links | None = None,
        homes: Homes | None = None,
        quantised: QuantisedSums | None = None,
    ) -> None:
        self._quantised = quantised
        self._waited, self._sent_as, self._links, self._homes = waited, sent_as, links, homes
        self.sums, self.window, self.order = sums, window, SumOrder(sums, self)
        self.skipped: set[int] = set()
        self._groups, self._units = groups, units
        self._handles = [DONE] * len(sums)  # the latest run of each sum
        self._slots: dict[int, Slot] = {}  # the open slot of a sum
        self._views: dict[str, Tensor] = {}  # gradients of units that keep them whole
        self._bucket: dict[str, int] = {}  # by weight of other units, the sum that has a slot
        tables = (name for row in sums if row.by_tokens for name in row.names)
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in tables}
        for unit in units.values():
            if unit.gradients is not None:
                self._views |= unit.views(unit.gradients)
        for number, row in enumerate(sums):
            for span in row.spans if row.in_window else ():
                self._bucket |= dict.fromkeys(units[span.unit].buffer.names, number)

    @property
    def narrow_bytes(self) -> int:
        """Bytes of the copies of gradients that are sent as another dtype."""
        room = self._quantised.nbytes if self._quantised else 0
        return room + sum(group.narrow_bytes for group in {*self._groups})

    @property
    def errors(self) -> Mapping[str, Sequence[Tensor]]:
        """By unit, what each hop of a sum in 4 bits has rounded away; nothing without feedback."""
        return self._quantised.errors if self._quantised else {}

    # -- gradients of the backward pass

    def target(self, name: str) -> Tensor:
        """The tensor to which the gradient of `name` is added; valid until it is ready."""
        if name in self._views:
            return self._views[name]
        slot = self._slot(name)
        if name in slot.unset:
            slot.unset.remove(name)
            slot.views[name].zero_()
        return slot.views[name]

    def take_rows(self, name: str, index: Tensor, rows: Tensor) -> bool:
        """Takes `rows` [n, h] of the numbers `index` [n], terms of a gradient that is added at home
        by its rows, and which must not change until then. False: it is another gradient.
        """
        if name not in self._rows:
            return False
        self._rows[name].append((index, rows))
        return True

    def take(self, name: str, parameter: Tensor) -> None:
        """Called when backward has made `parameter.grad`: a view of the flat gradient or, where
        only shares are kept, a new tensor, which is moved to the window.
        """
        if name not in self._views:
            assert parameter.grad is not None
            slot = self._slot(name)
            slot.unset.discard(name)
            slot.views[name].copy_(parameter.grad)
            parameter.grad = None
        self.order.ready(name)

    def _slot(self, name: str) -> Slot:
        number = self._bucket[name]
        if number not in self._slots:
            self.order.open(number)
        return self._slots[number]

    # -- what the order decides

    def open(self, number: int, *, add: bool) -> bool:
        """Gives a sum a slot of the window. If there is none: adds one, or returns False."""
        if add:
            self.window.add()
        if not self.window.free:
            return False
        units = [self._units[span.unit] for span in self.sums[number].spans]
        memory = self.window.free.pop()
        flats = list(memory[: sum(self.sums[number].messages)].split(self.sums[number].messages))
        views: dict[str, Tensor] = {}
        for unit, flat in zip(units, flats, strict=True):
            views |= unit.views(flat)
            for start, stop in gaps(unit.buffer):
                flat[start:stop].zero_()
        self._slots[number] = Slot(memory, flats, views, set(views))
        return True

    def start(self, number: int) -> Complete:
        """Starts a sum. Returns a function that waits for its result, and puts it in its place."""
        row = self.sums[number]
        if row.row and number not in self.skipped:
            gradient = self._gradient(row.spans[0]).view(-1, row.row)
            return partial(self._timed, start_rows(self._groups[number], gradient))
        if row.by_tokens:
            return self._start_by_tokens(number)
        if row.op == "push":
            return self._start_push(number)
        if row.packed:
            return self._start_packed(number)
        if row.in_window:
            return self._start_share(number)
        handle = self._run(number, [self._gradient(span) for span in row.spans])
        return lambda: self._wait(handle)

    def _start_push(self, number: int) -> Complete:
        """Sums a bucket on the servers, each of which has a range of every unit."""
        assert self._links is not None
        spans = () if number in self.skipped else self.sums[number].spans
        units = dict.fromkeys(span.unit for span in spans)
        handles = [handle for unit in units for handle in self._links.push(unit)]

        def complete() -> None:
            for handle in handles:
                self._wait(handle)

        return complete

    def _start_by_tokens(self, number: int) -> Complete:
        """Adds rows to the gradient of a table, in its home."""
        (name,), homes = self.sums[number].names, self._homes
        assert homes is not None
        given, self._rows[name] = self._rows[name], []
        unit = self._units[self.sums[number].spans[0].unit]
        wait = partial(homes.wait, f"gradients of {unit.buffer.unit}")
        wait(self._handles[number])  # no more than one micro-batch's rows are on their way
        handles = [homes.add_rows(unit, name, *one) for one in given]
        self._handles[number] = Several(handles) if handles else DONE
        return partial(wait, self._handles[number])

    def _start_packed(self, number: int) -> Complete:
        """Sums terms that lie apart as one message, and copies the sum over the terms."""
        terms = [self.target(name) for name in self.sums[number].names]
        flat = torch.cat([term.reshape(-1) for term in terms])
        handle = self._run(number, [flat])

        def complete() -> None:
            self._wait(handle)
            pieces = flat.split([term.numel() for term in terms])
            for term, piece in zip(terms, pieces, strict=True):
                term.copy_(piece.view(term.shape))

        return complete

    def _start_share(self, number: int) -> Complete:
        """Reduces a bucket of the window, and adds this rank's share to the unit's."""
        slot = self._slots.pop(number)
        for name in slot.unset:  # backward did not reach it
            slot.views[name].zero_()
        handle = self._run(number, slot.flats)
        units = [self._units[span.unit] for span in self.sums[number].spans]
        pairs = zip(units, slot.flats, strict=True)
        shares = [(unit, flat[unit.start : unit.stop]) for unit, flat in pairs]
        added = [self._added(unit, share, handle) for unit, share in shares]

        def complete() -> None:
            self._wait(handle)
            for add in added:
                add()
            self.window.free.append(slot.memory)

        return complete

    def _added(self, unit: FlatUnit, share: Tensor, after: Handle) -> Callable[[], object]:
        """What adds a share to the unit's. Where that is in its home, the move starts now, behind
        `after`, and is waited for.
        """
        if self._homes is None:
            return partial(unit.summed.add_, share)
        move = self._homes.add_gradient(unit, share, after)
        return partial(self._homes.wait, f"gradients of {unit.buffer.unit}", move)

    def _gradient(self, span: Span) -> Tensor:
        unit = self._units[span.unit]
        if unit.gradients is not None:
            return unit.gradients[span.start : span.stop]
        return unit.summed[span.start - unit.start : span.stop - unit.start]

    def _run(self, number: int, flats: list[Tensor]) -> Handle:
        """Starts the operation, behind the sum that it follows."""
        row, group = self.sums[number], self._groups[number]
        # Results that move are in their places by now; what follows is chained on the others.
        before = [self._handles[n] for n in row.after if not self.sums[n].moves_result]
        assert len(before) <= 1, "an operation follows one other"
        handle = before[0] if before else DONE
        if number not in self.skipped and len(row.ranks) > 1:
            if self._quantised and row.hops:
                self._timed(self._quantised.settle)
                units = [span.unit for span in row.spans]
                shares = [group.own_shard(one) for one in flats]
                handle = self._quantised.start(units, flats, shares)
            else:
                operation = getattr(group, row.op)
                handle = operation(flats, dtype=self._sent_as, async_op=True, after=handle)
        self._handles[number] = handle
        return handle

    def _wait(self, handle: Handle) -> None:
        self._timed(handle.result)

    def _timed(self, wait: Callable[[], None]) -> None:
        with self._waited:
            wait()


def gradient_sums(
    plan: Plan,
    mesh: Mesh,
    units: Mapping[str, FlatUnit],
    links: Links | None = None,
    *,
    homes: Homes | None = None,
) -> GradientSums:
    """The sums of this rank of a plan. All ranks call together."""
    away = homes if plan.layout.gradients != "device" else None
    sent_as = torch.bfloat16 if plan.method.gradient_dtype == "bf16" else None
    slots = window_of(plan, mesh.rank)
    sums = sums_of(plan, mesh.rank)
    return connected(
        *(sums, mesh, units),
        slots=slots,
        sent_as=sent_as,
        links=links,
        homes=away,
        feedback=plan.method.gradient_feedback,
    )


def connected(  # noqa: PLR0913
    sums: Sequence[Sum],
    mesh: Mesh,
    units: Mapping[str, FlatUnit],
    *,
    slots: tuple[int, int],
    sent_as: torch.dtype | None = None,
    links: Links | None = None,
    homes: Homes | None = None,
    feedback: bool = False,
) -> GradientSums:
    """The sums of a list, with their groups and a window of so many slots of so many elements. All
    ranks call together.

    feedback  what sums in 4 bits have rounded away is sent the next time
    """
    # Sorted, so that ranks with several groups in common join them in the same order.
    sent = (row for row in sums if row.op != "push" and len(row.ranks) > 1)
    several = sorted({(row.axis, tuple(ranks)) for row in sent for ranks in (row.ranks, *row.hops)})
    groups = {(label, ranks): mesh.group_of(ranks, label=label) for label, ranks in several}
    like = next(iter(units.values())).summed.new_empty(0, device=mesh.device)
    window = Window(*slots, like=like)
    own = [groups.get((row.axis, tuple(row.ranks)), mesh.world) for row in sums]
    hops = next((row.hops for row in sums if row.hops), ())
    longest = max((sum(row.messages) for row in sums if row.hops), default=0)
    lengths = {span.unit: span.stop - span.start for row in sums if row.hops for span in row.spans}
    quantised = QuantisedSums(
        [groups["dp", tuple(one)] for one in hops], longest, like, lengths if feedback else {}
    )
    return GradientSums(
        *(sums, own, units, window, mesh.waited),
        sent_as=sent_as,
        links=links,
        homes=homes,
        quantised=quantised if hops else None,
    )


def listen_to_parameters(model: nn.Module, sums: GradientSums) -> None:
    """Makes every trained parameter of `model` report when backward has made its gradient."""
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    for name, parameter in trained:
        parameter.register_post_accumulate_grad_hook(partial(sums.take, name))
