"""An order in which a program can happen, and the round of each of its messages.

A message passes when both of its ends have begun the turn in which it is. So its round is one more
than the later of the rounds in which the two ranks ended the turn before:

    rank 0   send a     send b          a passes from 0 to 1 in round 1
    rank 1   receive a  send a          b from 0 to 2 in round 2
    rank 2   receive b  receive a       a from 1 to 2 in round 3, after b

If ranks are left of which each waits for another, the program has come to a standstill.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.collectives.program import ADDS, Program, Spans, Step, chunks_of

Place = tuple[int, int]  # rank, number of its turn


class Standstill(Exception):
    """The program cannot go on, or a send has no receive; one sentence says where."""


class Event(NamedTuple):
    """A rank begins, or ends, a turn."""

    rank: int
    turn: int
    begins: bool


class Sent(NamedTuple):
    """A message and its round, from 1; messages of one round are under way together."""

    round: int
    source: int
    target: int
    spans: Spans


class Walk(NamedTuple):
    """An order of events, and all messages by round.

    rows  for each of them, messages of which each needs what the one before it brought, up to it:
          in a program in pieces they are fewer than rounds
    """

    events: list[Event]
    sent: list[Sent]
    rows: list[int]

    @property
    def rounds(self) -> int:
        return max((message.round for message in self.sent), default=0)


def pairs(program: Program) -> list[tuple[Place, Place, Step, Step]]:
    """Each send with its receive: (place of the send, place of the receive, send, receive).

    Raises Standstill for a send without its receive, or a pair that disagrees on the chunks.
    """
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, turns in enumerate(program.turns):
        for turn, steps in enumerate(turns):
            for step in steps:
                if step.kind == "send":
                    sends[rank, step.peer].append(((rank, turn), step))
                elif step.kind in ("receive", "add"):
                    receives[step.peer, rank].append(((rank, turn), step))
    found = []
    for pair in sorted({*sends, *receives}):
        source, target = pair
        if len(sends[pair]) != len(receives[pair]):
            raise Standstill(
                f"rank {source} sends {len(sends[pair])} messages to rank {target}, which receives "
                f"{len(receives[pair])} from it"
            )
        for number, (send, receive) in enumerate(zip(sends[pair], receives[pair], strict=True)):
            if send[1].spans != receive[1].spans:
                raise Standstill(
                    f"message {number} from rank {source} to rank {target} has chunks "
                    f"{send[1].spans}, and chunks {receive[1].spans} are expected"
                )
            found.append((send[0], receive[0], send[1], receive[1]))
    return found


def walk(program: Program) -> Walk:
    """An order of all turns. Raises Standstill if there is none, or if messages do not match."""
    matched = pairs(program)
    peers: dict[Place, list[Place]] = defaultdict(list)
    for sender, receiver, _, _ in matched:
        peers[sender].append(receiver)
        peers[receiver].append(sender)
    turns = [len(one) for one in program.turns]
    now = [-1] * program.ranks  # the turn that each rank has begun
    rounds = [[0] * (count + 1) for count in turns]  # by rank: the round in which each turn begins
    events: list[Event] = []
    ready = deque(range(program.ranks))

    def begin(rank: int) -> None:
        now[rank] += 1
        if now[rank] < turns[rank]:
            events.append(Event(rank, now[rank], begins=True))
            ready.append(rank)
            ready.extend(peer for peer, _ in peers[rank, now[rank]])

    for rank in range(program.ranks):
        begin(rank)
    while ready:
        rank = ready.popleft()
        turn = now[rank]
        if turn >= turns[rank] or any(now[peer] < at for peer, at in peers[rank, turn]):
            continue
        last = max((rounds[peer][at] for peer, at in peers[rank, turn]), default=-1)
        mine = rounds[rank][turn]
        rounds[rank][turn + 1] = max(mine, last) + 1 if last >= 0 else mine
        events.append(Event(rank, turn, begins=False))
        begin(rank)
    if any(now[rank] < turns[rank] for rank in range(program.ranks)):
        raise Standstill(_standstill(now, turns, peers))
    rows = _rows(program, events)
    sent = [
        (Sent(1 + max(rounds[a][i], rounds[b][j]), a, b, step.spans), next(rows[a, b]))
        for (a, i), (b, j), step, _ in matched
    ]
    sent.sort(key=lambda one: one[0].round)
    return Walk(events, [message for message, _ in sent], [row for _, row in sent])


def _rows(program: Program, events: Sequence[Event]) -> dict[tuple[int, int], Iterator[int]]:
    """For each pair of ranks, message by message: how many that need each other end with it.

    A chunk is as far behind as the message that it came with.
    """
    at: defaultdict[tuple[int, str, int], int] = defaultdict(int)  # rank, buffer, chunk
    flying: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, turn, begins in events:
        for step in program.turns[rank][turn]:
            chunks = chunks_of(step.spans)
            if step.kind == "send":
                if begins:
                    last = 1 + max(at[rank, step.buffer, chunk] for chunk in chunks)
                    found[rank, step.peer].append(last)
                    flying[rank, step.peer].append(last)
            elif not begins:
                came = 0 if step.source else flying[step.peer, rank].popleft()
                for chunk in chunks:
                    own = at[rank, step.buffer, chunk] if step.kind in ADDS else 0
                    before = at[rank, step.source, chunk] if step.source else came
                    at[rank, step.buffer, chunk] = max(own, before)
    return {pair: iter(some) for pair, some in found.items()}


def _standstill(now: Sequence[int], turns: Sequence[int], peers: dict[Place, list[Place]]) -> str:
    """Which ranks wait for each other."""
    rank = next(rank for rank, turn in enumerate(now) if turn < turns[rank])
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = next(peer for peer, at in peers[rank, now[rank]] if now[peer] < at)
    chain = ", ".join(f"rank {one} in its turn {now[one]}" for one in seen[seen.index(rank) :])
    return f"these wait for each other for ever: {chain}"
