"""Homes: where a rank keeps what is not on its device, and the moves between there and here.

    fetch lane   | layers.1 weights | layers.2 weights | …        host → device, ahead of their use
    evict lane   | layers.3 gradient | layers.2 gradient | …      device → host, behind it
    disk         io_uring, or threads of its own (`host/scratch.py`)

`plan/homes.py` lists the moves of a step; this file makes and counts them. A lane makes the moves
of one direction in their order (`home_lanes.py`). On the CPU, where device and host are one memory,
what has its home on the host is copied all the same, at a limited bandwidth if the run asks for it:
so what a link costs, and what hides it, shows without a GPU.

A tensor whose home is the disk is a tensor of the meta device; `own` reads it, `put` writes it.

Each move, and each time that the rank waits for one, is in the trace of a step, with the unit:
`fetch weights of layers.1`, `wait for weights of layers.1` (`howdah trace`).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.stopwatch import HOST, Interval, Stopwatch
from howdah.comm.counters import add
from howdah.comm.handle import DONE, Handle, OnThread
from howdah.comm.lane import clock_of, streams_of
from howdah.host.page_memory import whole_pages
from howdah.host.scratch import Pace, Range, Scratch, ended
from howdah.parallel.flat_params import FlatUnit, Put
from howdah.parallel.home_disk import Jobs, bytes_of, open_scratch
from howdah.parallel.home_lanes import CardLane, Lane, Locks, MemoryLane
from howdah.parallel.mesh import Mesh
from howdah.plan.gather_order import never_whole, rows_read
from howdah.plan.homes import AXIS, WAYS, Way, adding_room, homes, pool_problem
from howdah.plan.plan import Plan
from howdah.plan.recording import WAIT, Traffic
from howdah.shapes.weights import FROZEN

TABLE = "embedding.weight"  # of tokens
SMALL = 1 << 20  # bytes of memory that is worth pages of its own


class Homes:
    """The homes of one rank.

    waited   runs while the rank waits for a move
    tables   by name, the unit of a table of tokens that is read by its rows on the host
    never_whole  the unit that is read so alone; empty: there is none
    adding   through which a micro-batch is added to gradients
    disk_by  what reads and writes the file on the disk, if there is one
    states   by unit, the optimizer's states of its own range, by name
    leaving  by unit, the moves behind its last update, which may not have ended
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        storage = plan.storage
        if problem := pool_problem(plan, mesh.rank):
            raise UserError(problem)
        self.plan, self.layout, self.rank, self.device = plan, plan.layout, mesh.rank, mesh.device
        self.disk_by, self.tables = "", dict[str, FlatUnit]()
        self.never_whole = never_whole(plan)
        self._clock = clock_of(mesh.device)
        self.waited = Stopwatch(self._clock)
        self.states = dict[str, dict[str, Tensor]]()
        self.leaving: dict[str, list[Handle]] = {}
        self._counters, self._table = mesh.counters, mesh.counters.table()
        self._pace = {"fetch": Pace(storage.host_bandwidth), "evict": Pace(storage.host_bandwidth)}
        self._locks = Locks()
        streams = streams_of(mesh.device)
        self._lanes: dict[Way, Lane] = {
            way: CardLane(way, streams, self._locks) if streams else MemoryLane(way) for way in WAYS
        }
        self._locked = self._locks.lock if streams else lambda x: x
        self._host = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._ranges: dict[tuple[str, str], Range] = {}
        self._scratch: Scratch | None = None
        if "disk" in homes(plan.layout):
            self._scratch, self.disk_by = open_scratch(storage)
        self.adding = torch.empty(adding_room(plan, mesh.rank), dtype=_wide(plan))
        self._fresh: set[str] = set()  # units to whose gradient on the disk nothing was added
        mesh.at_close.append(self.close)

    @property
    def on_card(self) -> bool:
        """Whether moves are those of a GPU."""
        return not self._lanes["fetch"].one_memory

    @property
    def scratch(self) -> Scratch:
        """The file on the disk."""
        assert self._scratch is not None, "no home is the disk"
        return self._scratch

    def close(self) -> None:
        """Ends the threads, and lets go of the file."""
        for thread in (self._host, *(lane.thread for lane in self._lanes.values())):
            thread.shutdown(cancel_futures=True)
        try:
            if self._scratch is not None:
                self._scratch.close()
        finally:
            self._locks.close()

    def memory(self, length: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, zeros; if it is large, moves to and from it go at full speed."""
        if length * dtype.itemsize < SMALL:
            return torch.zeros(length, dtype=dtype)
        return self._locked(whole_pages(length, dtype))

    @property
    def staged_bytes(self) -> int:
        """Bytes of the host's memory through which all moves go."""
        return self.adding.nbytes + sum(lane.nbytes for lane in self._lanes.values())

    def adopt(self, units: Iterable[FlatUnit]) -> Put:
        """Makes the optimizer's states, zeros, and finds room on the disk for what is kept there.
        Returns `put`, which fills it.
        """
        table, _ = rows_read(self.plan)
        for unit in units:
            name, masters = unit.buffer.unit, unit.masters
            if TABLE in unit.buffer.names and name.removeprefix(FROZEN) == table:
                self.tables[TABLE] = unit
            if self.layout.weights == "host":
                self._locked(unit.weights)
            tensors = {"weights": unit.weights, "summed": unit.summed}
            tensors |= {"masters": masters} if unit.apart else {}
            if self.layout.optimizer != "device":
                names = self.plan.method.optimizer.states
                self.states[name] = {state: torch.zeros_like(masters) for state in names}
                tensors |= self.states[name]
            for kind, tensor in tensors.items():
                if tensor.is_meta:
                    self._ranges[name, kind] = self.scratch.allocate(tensor.nbytes)
            if not unit.apart and masters.is_meta:
                self._ranges[name, "masters"] = self._ranges[name, "weights"]
        return self.put

    # -- the own range of a unit, by kind: weights, masters, summed, or a state

    def own(self, unit: FlatUnit, kind: str, first: int = 0, last: int | None = None) -> Tensor:
        """The elements [first, last) of the own range: a view of memory, or read from the disk. It
        is not counted.
        """
        self.settle(unit.buffer.unit)
        there = self._tensor(unit, kind)[first:last]
        if not there.is_meta:
            return there
        out = torch.empty(len(there), dtype=there.dtype)
        source, at = self._ranges[unit.buffer.unit, kind], first * there.element_size()
        ended(self.scratch.read(source, bytes_of(out), at))
        return out

    def put(self, unit: FlatUnit, kind: str, values: Tensor) -> None:
        """Writes the whole own range. It is not counted."""
        self.settle(unit.buffer.unit)
        there = self._tensor(unit, kind)
        if there.is_meta:
            to = self._ranges[unit.buffer.unit, kind]
            ended(self.scratch.write(to, bytes_of(values.cpu().contiguous())))
        else:
            there.copy_(values)

    def _tensor(self, unit: FlatUnit, kind: str) -> Tensor:
        if kind in ("masters", "summed"):
            return unit.masters if kind == "masters" else unit.summed
        return unit.own_weights if kind == "weights" else self.states[unit.buffer.unit][kind]

    # -- moves

    def copy(self, what: str, way: Way, out: Tensor, source: Tensor, *, of: str) -> Handle:
        """Starts to copy between device and host, on the lane of the direction; `of` is the unit
        or the block.
        """
        lane = self._lanes[way]
        return self._on_lane(what, way, out.nbytes, lambda: lane.copy(out, source), of=of)

    def read(self, what: str, unit: str, kind: str, out: Tensor) -> Handle:
        """Starts to read the own range of a unit from the disk."""
        return self.read_range(what, self._ranges[unit, kind], out, of=unit)

    def write(self, what: str, unit: str, kind: str, values: Tensor) -> Handle:
        """Starts to write the own range of a unit, which must not change meanwhile, to the disk."""
        return self.write_range(what, self._ranges[unit, kind], values, of=unit)

    def read_range(self, what: str, source: Range, out: Tensor, *, of: str) -> Handle:
        """Starts to read a range of the file into memory of the host."""
        note = self._counted(what, "fetch", "disk", out.nbytes, of=of)
        return Jobs(self.scratch.read(source, bytes_of(out)), note)

    def write_range(self, what: str, to: Range, values: Tensor, *, of: str) -> Handle:
        """Starts to write a range of the file from memory of the host."""
        note = self._counted(what, "evict", "disk", values.nbytes, of=of)
        return Jobs(self.scratch.write(to, bytes_of(values)), note)

    def fetch_range(self, what: str, source: Range, out: Tensor, *, of: str) -> Handle:
        """Starts to read a range of the file to the device; to a GPU part by part."""
        lane, flat = self._lanes["fetch"], out.view(torch.uint8)
        if lane.one_memory:
            return self.read_range(what, source, out, of=of)

        def read(part: Tensor, first: int, last: int) -> None:
            ended(self.scratch.read(source, bytes_of(part), first))

        up = partial(lane.up, flat, read)
        return self._on_lane(what, "fetch", out.nbytes, up, of=of, link="disk")

    def evict_range(self, what: str, to: Range, values: Tensor, *, of: str) -> Handle:
        """Starts to write a range of the file from the device; from a GPU part by part."""
        lane, flat = self._lanes["evict"], values.view(torch.uint8)
        if lane.one_memory:
            return self.write_range(what, to, values, of=of)

        def write(part: Tensor, first: int, last: int) -> None:
            ended(self.scratch.write(to, bytes_of(part), first))

        down = partial(lane.down, flat, write)
        return self._on_lane(what, "evict", values.nbytes, down, of=of, link="disk")

    def beside(self, work: Callable[[], None]) -> Handle:
        """Starts work on the host beside that of the rank, behind earlier such work."""
        return OnThread(self._host.submit(work))

    def fetch_weights(self, unit: FlatUnit, out: Tensor) -> Handle:
        """Starts to bring the weights of a unit, or its share of them, to `out` on the device."""
        if self.layout.weights == "host":
            return self.copy("weights", "fetch", out, unit.weights, of=unit.buffer.unit)
        name = unit.buffer.unit
        return self.fetch_range("weights", self._ranges[name, "weights"], out, of=name)

    def fetch_rows(self, name: str, index: Tensor) -> Tensor:
        """The rows of one of `tables` for index [...] → [..., h], read where they lie."""
        unit = self.tables[name]
        self.settle(unit.buffer.unit)
        table, lane = unit.views(unit.weights)[name], self._lanes["fetch"]
        out = table.new_empty(index.numel(), table.shape[1], device=self.device)

        def read() -> None:
            rows = lane.here(index.flatten())
            lane.up(out, lambda part, a, b: torch.index_select(table, 0, rows[a:b], out=part))

        rows = self._on_lane("rows", "fetch", out.nbytes, read, of=unit.buffer.unit)
        self.wait(f"rows of {unit.buffer.unit}", rows)
        return out.view(*index.shape, -1)

    def add_rows(self, unit: FlatUnit, name: str, index: Tensor, rows: Tensor) -> Handle:
        """Starts to add rows [n, h], of the numbers `index` [n], to the gradient of a table on the
        host. Those of one token are added to each other first, as in a gradient that is whole.
        """
        table, lane = unit.views(unit.summed)[name], self._lanes["evict"]

        def add() -> None:
            tokens, place = lane.here(index).unique(return_inverse=True)
            count, wide = rows.numel(), rows
            sums = self.adding[:count].view_as(rows)[: len(tokens)].zero_()
            if rows.dtype != table.dtype or not lane.one_memory:
                wide = self.adding[count : 2 * count].view_as(rows)
                lane.down(rows, lambda part, a, b: wide[a:b].copy_(part))
            table.index_add_(0, tokens, sums.index_add_(0, place, wide))

        return self._on_lane("rows", "evict", rows.nbytes, add, of=unit.buffer.unit)

    def fetch_gradient(self, unit: FlatUnit) -> Tensor:
        """The own range of a gradient on the disk; valid until the next one is asked for."""
        mine = self.adding[: len(unit.summed)]
        if len(mine):
            name = unit.buffer.unit
            self.wait(f"gradients of {name}", self.read("gradients", name, "summed", mine))
        return mine

    def clear_gradients(self, units: Iterable[FlatUnit]) -> None:
        """Sets the gradients on the disk to zero, before a step."""
        self._fresh = {unit.buffer.unit for unit in units if unit.summed.is_meta}

    def add_gradient(self, unit: FlatUnit, share: Tensor, after: Handle) -> Handle:
        """Starts to add a share to the gradient of a unit in its home, behind `after`."""
        name, size, lane = unit.buffer.unit, share.nbytes, self._lanes["evict"]

        def add_to(sums: Tensor) -> None:
            lane.down(share, lambda part, a, b: sums[a:b].add_(part))

        if not unit.summed.is_meta:
            work = partial(add_to, unit.summed)
            return self._on_lane("gradients", "evict", size, work, after, of=name)
        mine, first = self.adding[: len(share)], name in self._fresh
        self._fresh.discard(name)
        notes = [self._counted("gradients", "evict", "disk", size, of=name)]
        notes += [] if first else [self._counted("gradients", "fetch", "disk", size, of=name)]
        called = lane.called()

        def add() -> None:
            with lane.behind(called, after):
                if first:
                    mine.zero_()
                else:
                    ended(self.scratch.read(self._ranges[name, "summed"], bytes_of(mine)))
                add_to(mine)
            ended(self.scratch.write(self._ranges[name, "summed"], bytes_of(mine)))
            for note in notes:
                note()

        return OnThread(lane.thread.submit(add))

    def _on_lane(  # noqa: PLR0913 (facts that have nothing in common, most by keyword)
        self,
        what: str,
        way: Way,
        size: int,
        work: Callable[[], object],
        after: Handle = DONE,
        *,
        of: str,
        link: str = "host",
    ) -> Handle:
        note, lane = self._counted(what, way, link, size, of=of), self._lanes[way]
        called = lane.called()

        def move() -> None:
            with lane.behind(called, after):
                began = HOST.mark()
                if link == "host":
                    self._pace[way].wait(size)
                work()
            note(began)

        return OnThread(lane.thread.submit(move))

    def _counted(
        self, what: str, way: Way, link: str, size: int, *, of: str
    ) -> Callable[..., None]:
        """Counts a move. Returns a function that records its end, and when it `began` if not now;
        any thread may call it.
        """
        row, now = Traffic(AXIS, f"{way} {what}", link), HOST.mark()
        if size:
            add(self._table, {row: size}, 0.0)

        def note(began: float = now) -> None:
            took = Interval(HOST, began, HOST.mark())
            self._counters.time_later(self._table, {row: size}, took)
            self._counters.recorder.call(AXIS, f"{row.operation} of {of}", size, took)

        return note

    def settle(self, *units: str) -> None:
        """Waits for the moves behind the last update of some units; of all when none is named."""
        for unit in units or tuple(self.leaving):
            self.wait(f"the update of {unit}", *self.leaving.pop(unit, ()))

    def wait(self, what: str, *handles: Handle) -> None:
        """Waits for moves, such as those of the `weights of layers.1`."""
        late, began = not all(handle.done() for handle in handles), self._clock.mark()
        with self.waited:
            for handle in handles:
                handle.result()
        if late:
            took = Interval(self._clock, began, self._clock.mark())
            self._counters.recorder.call(AXIS, f"{WAIT} {what}", 0, took)


def _wide(plan: Plan) -> torch.dtype:
    return torch.float64 if plan.master_bytes == 8 else torch.float32


def homes_of(plan: Plan, mesh: Mesh) -> Homes | None:
    """The homes of this rank; None where everything is on its device."""
    return Homes(plan, mesh) if homes(plan.layout) != {"device"} else None
