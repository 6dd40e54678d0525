"""What must hold for the calls of all ranks of a layout, as `recorded_wire.py` has them.

    check_equal      on every communicator all ranks make the same calls; every send meets a receive
    check_legal      NCCL has each of the calls, and it is a fast one
    check_ends       no rank waits forever, although every operation waits for all of its ranks
    ends_in_queues   … even if the GPU runs its streams in so few queues

A stream does its entries one after the other. An operation ends when all ranks of it have begun it;
a send, too, ends only when it is received. A stream that waits for an event does nothing else. The
host gives entries to streams, and goes on at once, but for calls of the hosts' wire and for numbers
that it reads.

That is a graph: an event is what happens when those before it have happened. Where it has a circle,
all on the circle wait forever, on every run; where it has none, all ends, in any timing.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from recorded_wire import Call, Given, Met, Op, Read, Recorded, Wait, Wire

from howdah.comm.native import MOST_TOGETHER

NCCL_HAS = {  # ncclDataType_t, as torch maps it
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
ALIGN = 16  # bytes that a GPU moves at once; the memory itself begins at 512
PAIRS = ("send", "receive")
SLOW = ("reduce", "broadcast")  # of these Native makes a collective whose counts differ
COUNTED = ("all_gather", "reduce_scatter")


class Illegal(AssertionError):
    """A call that NCCL does not have, or that is slow."""


class Unequal(AssertionError):
    """Ranks of one communicator make different calls."""


class Stuck(AssertionError):
    """Some ranks wait forever."""


# -- equal calls -------------------------------------------------------------------------


def check_equal(ranks: Sequence[Recorded]) -> None:
    """Raises Unequal, which names two ranks and their first calls that differ."""
    for kind in (_collectives, _meetings):
        by_wire: dict[Wire, dict[int, list[str]]] = defaultdict(dict)
        for rank, recorded in enumerate(ranks):
            for wire, texts in kind(recorded).items():
                by_wire[wire][rank] = texts
        for wire, lists in by_wire.items():
            for rank in wire.ranks:
                _compare(wire, wire.ranks[0], rank, lists)
    _check_pairs(ranks)
    for wire in {wire for recorded in ranks for wire in recorded.ledgers}:
        if len({ranks[rank].ledgers.get(wire) for rank in wire.ranks}) > 1:
            raise Unequal(f"{wire}: the ledgers of its ranks differ")


def _collectives(recorded: Recorded) -> dict[Wire, list[str]]:
    """The collectives of each wire, with the number of the NCCL group that they are in."""
    found: dict[Wire, list[str]] = defaultdict(list)
    groups: Counter[Wire] = Counter()
    for _, call in recorded.calls:
        for op in call.ops:
            if op.name not in PAIRS:
                found[op.wire].append(f"{op} in group {groups[op.wire]}")
        groups.update({op.wire for op in call.ops})
    return found


def _meetings(recorded: Recorded) -> dict[Wire, list[str]]:
    found: dict[Wire, list[str]] = defaultdict(list)
    for entry in recorded.entries:
        if isinstance(entry, Met):
            found[entry.wire].append(entry.text)
    return found


def _compare(wire: Wire, one: int, other: int, lists: dict[int, list[str]]) -> None:
    first, second = lists.get(one, []), lists.get(other, [])
    for at in range(max(len(first), len(second))):
        says = [some[at] if at < len(some) else "nothing more" for some in (first, second)]
        if says[0] != says[1]:
            raise Unequal(f"{wire}: rank {one} calls {says[0]}, and rank {other} {says[1]}")


def _check_pairs(ranks: Sequence[Recorded]) -> None:
    sent: dict[tuple[Wire, int, int], list[str]] = defaultdict(list)
    received: dict[tuple[Wire, int, int], list[str]] = defaultdict(list)
    for rank, recorded in enumerate(ranks):
        for _, call in recorded.calls:
            for op in call.ops:
                if op.name == "send":
                    sent[op.wire, rank, op.peer].append(f"{op.dtype} {list(op.counts)}")
                elif op.name == "receive":
                    received[op.wire, op.peer, rank].append(f"{op.dtype} {list(op.counts)}")
    for key in {*sent, *received}:
        if sent[key] != received[key]:
            wire, source, target = key
            raise Unequal(
                f"{wire}: rank {source} sends {sent[key]}, and rank {target} receives "
                f"{received[key]}"
            )


# -- legal calls -------------------------------------------------------------------------


def check_legal(ranks: Sequence[Recorded], *, but: Sequence[str] = ()) -> None:
    """Raises Illegal with the first rule of `broken` that is not in `but`."""
    for rank, recorded in enumerate(ranks):
        for problem, what in broken(recorded):
            if problem not in but:
                raise Illegal(f"rank {rank}: {what}: {problem}")


UNEVEN = "counts differ over the ranks, so it is one operation for each rank"
UNALIGNED = f"an address is no multiple of {ALIGN}"


def broken(recorded: Recorded) -> Iterator[tuple[str, str]]:
    """Yields the rules that a rank breaks, each with the call."""
    lanes: dict[Wire, int] = {}
    for stream, call in recorded.calls:
        if len(call.ops) > MOST_TOGETHER:
            yield f"more than {MOST_TOGETHER} operations in a group", str(call.ops[0])
        for op in call.ops:
            for problem in _problems(op):
                yield problem, str(op)
            if lanes.setdefault(op.wire, stream) != stream or stream == 0:
                yield "the communicator has another lane, or none", str(op)


def _problems(op: Op) -> Iterator[str]:
    if op.dtype not in NCCL_HAS:
        yield "NCCL has no such dtype"
    if op.name in SLOW:
        yield UNEVEN
    if op.name in COUNTED:
        small, large = sorted(op.counts)
        if small * len(op.wire.ranks) != large:
            yield "the counts do not fit the number of ranks"
    if any(offset % ALIGN for offset in op.offsets):
        yield UNALIGNED
    if not all(op.counts) and op.name != "all_to_all":
        yield "nothing is sent"
    if not op.plain:
        yield "a tensor is not contiguous, or the call is on another stream"


# -- no deadlock -------------------------------------------------------------------------

Node = Hashable  # something that happens
Queue = Callable[[int], int]  # the number of a stream → that of the GPU's queue it is in
NEVER = "never"


def check_ends(ranks: Sequence[Recorded]) -> None:
    """Raises Stuck, which says what ranks wait for, if they wait forever."""
    if stuck := standstill(ranks):
        raise Stuck("; ".join(stuck))


def ends_in_queues(ranks: Sequence[Recorded], count: int) -> bool:
    """Whether all ends if a GPU puts its streams into `count` queues by turns, and does what is in
    one queue in the order in which the host gave it (CUDA_DEVICE_MAX_CONNECTIONS).
    """
    return not standstill(ranks, lambda stream: stream % count)


def standstill(ranks: Sequence[Recorded], queue: Queue | None = None) -> list[str]:
    """What was begun and never ends, by rank; empty if all ends."""
    before: dict[Node, list[Node]] = {}
    members: Counter[Node] = Counter()
    entries = [_add(before, members, rank, one, queue) for rank, one in enumerate(ranks)]
    for meeting, lacking in members.items():
        if lacking:
            before[meeting].append(NEVER)
    happened = _happen(before)
    return [
        f"rank {rank} waits with {entry}"
        for rank, ends in enumerate(entries)
        for end, entry in ends.items()
        if end not in happened and before[end][0] in happened
    ]


def _add(
    before: dict[Node, list[Node]],
    members: Counter[Node],
    rank: int,
    recorded: Recorded,
    queue: Queue | None,
) -> dict[Node, object]:
    """Adds to a graph what happens on one rank: of each node, the nodes before it.

    members  how many of its ranks a meeting lacks
    Returns what the host did, by the node at its end.
    """
    last: dict[object, Node] = {}  # by host, stream and queue: the end of its latest entry
    lengths: Counter[int] = Counter()
    met: Counter[Node] = Counter()
    ends: dict[Node, object] = {}
    for number, entry in enumerate(recorded.entries):
        begin, end = (rank, number, "begins"), (rank, number, "ends")
        places: list[Node] = ["host"]
        if isinstance(entry, Given):
            places += [("stream", entry.stream)]
            places += [("queue", queue(entry.stream))] if queue else []
            before[rank, entry.stream, lengths[entry.stream], "in stream"] = [end]
            lengths[entry.stream] += 1
        before[begin] = [last[place] for place in places if place in last]
        before[end] = [begin]
        what = entry.what if isinstance(entry, Given) else entry
        if isinstance(what, Wait | Read):
            before[end].append((rank, what.stream, what.length - 1, "in stream"))
        for key, size in _meetings_of(what, rank):
            meeting = (*key, met[key])
            met[key] += 1
            if meeting not in before:
                before[meeting], members[meeting] = [], size
            before[meeting].append(begin)
            members[meeting] -= 1
            before[end].append(meeting)
        for place in places[isinstance(entry, Given) :]:
            last[place] = end
        ends[end] = entry
    return ends


def _meetings_of(what: object, rank: int) -> Iterator[tuple[tuple[object, ...], int]]:
    """What an entry does together with other ranks, and the number of all of them."""
    if isinstance(what, Met):
        yield ("hosts", what.wire), len(what.wire.ranks)
    for op in what.ops if isinstance(what, Call) else ():
        if op.name == "send":
            yield ("pair", op.wire, rank, op.peer), 2
        elif op.name == "receive":
            yield ("pair", op.wire, op.peer, rank), 2
        else:
            yield ("all", op.wire), len(op.wire.ranks)


def _happen(before: dict[Node, list[Node]]) -> set[Node]:
    """The nodes that happen: all before them do."""
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, earlier in before.items():
        for one in earlier:
            after[one].append(node)
    lacks = {node: len(earlier) for node, earlier in before.items()}
    ready, happened = deque(node for node, count in lacks.items() if not count), set()
    while ready:
        node = ready.popleft()
        happened.add(node)
        for later in after[node]:
            lacks[later] -= 1
            if not lacks[later]:
                ready.append(later)
    return happened
