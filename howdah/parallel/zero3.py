"""ZeRO-3: each rank keeps a share of the weights, and a unit is whole only while it is used
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

    compute    | layers.0 | layers.1 | layers.2 | …        forward; backward the other way round
    progress   | layers.1 | layers.2 | layers.3 | …        all-gather of the next unit
    window     |0        1|2        1|2        3|…        one at each end (`layer_window.py`)

A unit is in use from the moment that an operation asks for one of its weights until one asks for a
weight of another unit. So a unit that ends the forward pass and begins the backward is gathered
once for both, and so is a block that is recomputed and then runs backward. The backward of an
embedding does not need its weight, so the embedding is not gathered for it.

The next unit is known from an earlier pass of the same kind (a step of so many micro-batches, a
held-out loss). The first pass of a kind gathers each unit when an operation asks for it, and
records the order. Before each of these gathers, the ranks check that all want the same unit; if
they differ, they raise an error instead of mixing different weights.

The window has room for the unit in use and the next, and is allocated once for the whole run. So a
tensor that `value` returns is valid until a weight of another unit is asked for. Own operations ask
again in backward, and keep nothing. A wider window (`storage.window`) has the units that are used
next, those that come and those that were used before. In a first pass it has those used last, which
are gathered as often. With `release=step` the window has room for all units, and each is gathered
once per step, when it is first asked for.

Weights whose home is the host or the disk come the same way, also of a unit that one rank has
whole: the rank's own range is fetched into the window first, and what other ranks have follows
(https://arxiv.org/abs/2104.07857). So a model trains that does not fit its device, unit by unit.
On a GPU the host would have to wait for the fetch before it starts what follows, while the GPU has
nothing to do; so it computes the unit before meanwhile, and the gather starts with the next unit,
or in a wider window one unit earlier, beside computation.

What is sent of a unit, and between which ranks, is said in `unit_messages.py`: its weights, or
these in 8 bits; from all ranks, or from the second copy of a node.

Gradients are reduced to shares as in ZeRO-2 (`zero.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice

import torch.nn.functional as F
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.handle import DONE, Handle, Later, Several
from howdah.parallel.flat_params import FlatUnit
from howdah.parallel.homes import Homes
from howdah.parallel.layer_window import Window
from howdah.parallel.unit_messages import Messages, Sent
from howdah.parallel.weight_store import whole_weights
from howdah.plan.storage import WINDOW, staying
from howdah.shapes.weights import FROZEN


@dataclass(frozen=True)
class _Whole:
    """A unit in the window; it is whole when the handle is done, and this rank's share of it when
    `fetch` is.
    """

    views: dict[str, Tensor]
    handle: Handle
    fetch: Handle = DONE


class ShardedWeights:
    """The weights of `units`. Each rank of `group` keeps a share of them, except of units that are
    not sharded; in its memory, or in their home.

    waited  runs while computation waits for weights
    sharers  by unit, the ranks that share it out where they are not `group`: those of experts
    keep    whether gathered units stay whole until the pass is over (release=step)
    cast    whether each share is broadcast by its owner (gather=broadcast)
    homes   of weights that are not on the device
    width   units that are whole at a time, the one in use and those that come
    messages  what is sent of units: their weights themselves unless it is said otherwise
    window  the tensor that holds whole units
    """

    def __init__(  # noqa: PLR0913 (facts that have nothing in common, all by keyword)
        self,
        units: dict[str, FlatUnit],
        group: Group,
        waited: Stopwatch,
        messages: Messages | None = None,
        *,
        keep: bool,
        cast: bool = False,
        sharers: Mapping[str, Group] | None = None,
        homes: Homes | None = None,
        width: int = WINDOW,
    ) -> None:
        self.messages = messages or Messages()
        self._waited, self._cast, self._homes = waited, cast, homes
        apart = homes.never_whole if homes else ""
        comes = {name: one for name, one in units.items() if one.comes}
        cut = {name: one for name, one in comes.items() if name.removeprefix(FROZEN) != apart}
        self._group, self._sharers = group, sharers or {}
        self._bundles: dict[
            str, list[FlatUnit]
        ] = {}  # what is trained and what is frozen of a unit
        for name, unit in cut.items():
            self._bundles.setdefault(name.removeprefix(FROZEN), []).append(unit)
        self._unit_of = {
            s.name: u
            for u, some in self._bundles.items()
            for one in some
            for s in one.buffer.segments
        }
        self._stays = whole_weights(units)
        self._keep = keep
        lengths = [sum(one.buffer.length for one in some) for some in self._bundles.values()]
        self._starts = dict(zip(self._bundles, accumulate(lengths, initial=0), strict=False))
        # the unit in use and those that come are different ones
        self._width, size = width, sum(lengths if keep else sorted(lengths)[-width:])
        device = homes.device if homes else None
        self.window = next(iter(comes.values())).weights.new_zeros(size, device=device)
        self._places = Window(self.window)
        self._here: dict[str, dict[str, Tensor]] = {}  # views of the units that are in use
        self._whole: dict[str, _Whole] = {}  # all units that are in the window, or come
        self._orders: dict[str, list[str]] = {}  # of units, by kind of pass
        self._kind = ""
        self._seen: list[str] = []

    # -- passes

    def begin(self, kind: str) -> None:
        """Begins a pass. All passes of one kind must use the units in one order."""
        self.end()
        self._kind = kind
        self._come(_distinct(self._orders.get(kind, ()), min(self._width - 1, len(self._bundles))))

    def end(self) -> None:
        """Ends the pass. No unit is whole any longer, so weights may change."""
        if self._kind:
            self._orders.setdefault(self._kind, self._seen)
        for one in self._whole.values():
            one.handle.result()
        self._kind, self._seen, self._here, self._whole = "", [], {}, {}
        self._places = Window(self.window)
        self.messages.end()

    def updated(self) -> None:
        """Called after an update: the shares have changed."""
        self.end()

    @property
    def memory(self) -> list[Tensor]:
        """What holds whole units, and a message while it is restored."""
        return [self.window, self.messages.scratch]

    def wait(self, *units: str) -> None:
        """Does nothing: `value` gathers units when they are used."""

    @property
    def orders(self) -> Mapping[str, Sequence[str]]:
        """By kind of pass, the units in the order in which they are gathered, if one has ended."""
        return self._orders

    # -- weights

    def value(self, name: str) -> Tensor:
        """The whole weight `name`; valid until a weight of another unit is asked for, or the pass
        is over.
        """
        if name in self._stays:
            return self._stays[name]
        unit = self._unit_of[name]
        if unit not in self._here:
            self._advance_to(unit)
        return self._here[unit][name]

    def rows(self, name: str, index: Tensor) -> Tensor:
        """The rows of a table for index [...] → [..., h], perhaps read where they lie."""
        if self._homes and name in self._homes.tables:
            return self._homes.fetch_rows(name, index)
        return F.embedding(index, self.value(name))

    def _advance_to(self, unit: str) -> None:
        """Releases what is not used soon, starts to gather the units behind `unit`, and waits for
        `unit`.
        """
        before, stay = reversed(self._seen), staying(self._width)
        used = _distinct([unit, *before], stay) if self._kind not in self._orders else []
        soon = self._next(unit) if self._kind else [unit]
        for name in soon[:2]:  # the next one as well, if its fetch began with an earlier unit
            whole = self._whole.get(name)
            if whole and isinstance(whole.handle, Later):
                self._wait_for(name, whole.fetch)
                whole.handle.begin()
        if not self._keep:
            self._release(used or soon[:stay])
        self._come([unit], needed=True)
        here = self._whole[unit]
        self._here[unit] = here.views
        self._come(soon[1:])
        self._wait_for(unit, here.fetch)
        with self._waited:
            here.handle.result()

    def _wait_for(self, unit: str, fetch: Handle) -> None:
        if self._homes:
            self._homes.wait(f"weights of {unit}", fetch)

    def _release(self, stay: Sequence[str]) -> None:
        """Releases all units but some, which are used soon, or were a short time ago."""
        self._here = {}
        for unit in [one for one in self._whole if one not in stay]:
            self._whole.pop(unit).handle.result()
            self._places.give(unit)

    def _come(self, units: Sequence[str], *, needed: bool = False) -> None:
        """Starts to gather those of some units that are not in the window, in their order, up to
        the first for which it has no room; for the one that is `needed` it makes room.
        """
        for unit in units:
            if unit in self._whole:
                continue
            whole = self._gather(unit)
            if whole is None and needed:
                self._make_room()
                whole = self._gather(unit)
            if whole is None:
                return
            self._whole[unit] = whole

    def _make_room(self) -> None:
        """Moves the units that are in the window together."""
        for whole in self._whole.values():
            whole.handle.result()
        for unit, flat in self._places.together().items():
            self._whole[unit] = _Whole(self._views(unit, flat), DONE)

    def _views(self, unit: str, flat: Tensor) -> dict[str, Tensor]:
        some = self._bundles[unit]
        flats = flat.split([one.buffer.length for one in some])
        return {n: v for one, x in zip(some, flats, strict=True) for n, v in one.views(x).items()}

    def _next(self, unit: str) -> Sequence[str]:
        """`unit` and those that follow it in the recorded order, as many as the window holds;
        `unit` alone while no order is recorded. Raises UserError when the order differs from the
        recorded one.
        """
        at, order = len(self._seen), self._orders.get(self._kind)
        self._seen.append(unit)
        if order is None:
            self._ask_others(unit)
            return [unit]
        before = order[at] if at < len(order) else "nothing more"
        if before != unit:
            raise UserError(
                f"{self._kind} uses {unit} as its unit {at + 1} where it used {before} before: a "
                "model that is shared out by zero3 must use its weights in one order; use zero2"
            )
        most = min(self._width, len(self._bundles))
        return _distinct(islice(order, at, None), most)

    def _ask_others(self, unit: str) -> None:
        names, size = list(self._bundles), self._group.size
        mine = [0.0] * size
        mine[self._group.rank] = names.index(unit)
        wanted = [names[int(number)] for number in self._group.sum_scalars(mine)]
        if len(set(wanted)) > 1:
            raise UserError(_differ(self._kind, len(self._seen), wanted))

    def _gather(self, unit: str) -> _Whole | None:
        """Starts to gather `unit`: into its own range of the window if all units stay, otherwise
        where it has room; None if it has none.
        """
        some = self._bundles[unit]
        length = sum(one.buffer.length for one in some)
        flat: Tensor | None = self.window[self._starts[unit] :][:length]
        if not self._keep:
            flat = self._places.take(unit, length)
        if flat is None:
            return None
        group = self._sharers.get(some[0].buffer.unit, self._group)
        if self._homes:
            self._homes.settle(unit)
        flats, views = flat.split([one.buffer.length for one in some]), self._views(unit, flat)
        sent = [
            self.messages.send(one, x, group) if one.shared_out else Sent(group, x, None)
            for one, x in zip(some, flats, strict=True)
        ]
        fetch = self._fetch(some, flats, sent)

        def gather() -> Handle:
            one = len(some) == 1
            both = partial(self._gather_both, some, sent, fetch)
            handle = self._gather_one(some[0], sent[0], fetch) if one else both()
            return self.messages.arriving(handle, some, flats, group.size)

        waits = self._homes and self._homes.on_card and fetch is not DONE
        return _Whole(views, Later(gather) if waits and group.size > 1 else gather(), fetch)

    def _fetch(
        self, some: Sequence[FlatUnit], flats: Sequence[Tensor], sent: Sequence[Sent]
    ) -> Handle:
        """Starts to fetch what this rank has of a unit from its home."""
        handles = []
        for one, flat, (group, _, _) in zip(some, flats, sent, strict=True):
            if one.away:
                assert self._homes is not None
                mine = group.own_shard(flat) if one.shared_out else flat
                handles.append(self._homes.fetch_weights(one, mine))
        return Several(handles) if len(handles) > 1 else handles[0] if handles else DONE

    def _gather_one(self, one: FlatUnit, sent: Sent, fetch: Handle) -> Handle:
        """Starts to gather a unit, behind what is fetched."""
        group, message, own = sent
        if not one.shared_out:
            return fetch
        own = None if one.away else own
        if self._cast:
            fetch.result()
            return _broadcast(group, message, own)
        return group.all_gather(message, own, async_op=True, after=fetch)

    def _gather_both(self, some: Sequence[FlatUnit], sent: Sequence[Sent], fetch: Handle) -> Handle:
        """Starts to gather what is trained of a unit, and what is frozen, behind `fetch`."""
        pairs = [(one, it) for one, it in zip(some, sent, strict=True) if one.shared_out]
        if not pairs:
            return fetch
        for one, (group, message, own) in pairs:
            if self._cast:
                fetch.result()
                _broadcast(group, message, None if one.away else own).result()
            elif own is not None and not one.away:
                group.own_shard(message).copy_(own)
        if self._cast:
            return DONE
        messages = [it.message for _, it in pairs]
        return pairs[0][1].group.all_gather(messages, async_op=True, after=fetch)


def _distinct(units: Iterable[str], most: int) -> list[str]:
    """The first so many units that are different ones."""
    found: dict[str, None] = {}
    for unit in units if most else ():
        found[unit] = None
        if len(found) == most:
            break
    return [*found]


def _broadcast(group: Group, flat: Tensor, own: Tensor | None) -> Handle:
    """Starts to broadcast every rank's share, which is `own` or in its place, to all others."""
    if own is not None:
        group.own_shard(flat).copy_(own)
    with group.together(async_op=True) as handle:
        for root in range(group.size):
            group.broadcast(group.own_shard(flat, root), root)
    return handle


def _differ(kind: str, at: int, wanted: Sequence[str]) -> str:
    others = ", ".join(f"rank {rank} {unit}" for rank, unit in enumerate(wanted))
    return (
        f"{kind}: the ranks use different weights as their unit {at}: {others}; zero3 needs the "
        "same model and the same number of micro-batches on every rank"
    )
