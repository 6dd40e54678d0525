"""The desk of a server: what comes in, what is applied, and what goes out, without a wire.

    push ──> clocks ──> rounds ──> shard      weights of one server
    pull ──> wishes ──> clocks ──> answers    the most urgent first, those that wait stay

A transport calls it from one thread. Every update that is applied and every pull that is answered
is a line of its ledger, in that order. Everything that changes its state is also recorded as a
deed: another desk that does the same deeds (`redo`) is its replica to the last bit.

A push concerns the pulls of its key alone, so these are looked at; those of all keys when workers
come and go.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from howdah.server.clocks import Clocks, Refused, Round, Update
from howdah.server.ledger import Event
from howdah.server.messages import BEGIN, BYE, GONE, JOIN, PUSH, WEIGHTS
from howdah.server.shard import Shard, Term


class Wish(NamedTuple):
    """A pull that has not been answered; in the order in which pulls are: the most urgent first."""

    key: int
    arrived: int
    worker: int
    incarnation: int
    clock: int


Wishes = dict[int, dict[int, Wish]]  # by key and worker


class Answer(NamedTuple):
    """The weights of a key for a worker, valid until the next update of the key."""

    worker: int
    key: int
    clock: int
    version: int
    weights: Tensor


class Deed(NamedTuple):
    """What a desk has done.

    what   a message that it took (JOIN, BEGIN, PUSH, BYE), the end of a worker (GONE), or a pull
           that it answered (WEIGHTS)
    """

    what: int
    worker: int
    incarnation: int
    clock: int = 0
    key: int = 0


class Desk:
    """The state of one server.

    clocks   what is applied when
    shard    weights and optimizer states
    ledger   what was done so far
    fifo     whether pulls are answered in the order in which they came, not by urgency
    after    called with the latest clock of rounds that were applied; with None when a worker has
             joined, begun or left
    record   called with every deed, in order, and the term of a push
    applied  called with every term that was applied, and is not used any more but by `record`
    """

    def __init__(self, clocks: Clocks, shard: Shard, *, fifo: bool = False) -> None:
        self.clocks, self.shard, self.fifo = clocks, shard, fifo
        self._wishes: Wishes = {}
        self._looks: set[int] = set()  # keys of which a pull may be answered by now
        self.after: Callable[[int | None], None] = lambda clock: None
        self.record: Callable[[Deed, Term | None], None] = lambda deed, term: None
        self.applied: Callable[[Term], None] = lambda term: None
        self.ledger: list[Event] = []
        self._terms: dict[Update, Term] = {}  # of rounds that wait
        self._arrived = 0

    @property
    def wishes(self) -> list[Wish]:
        """The pulls that wait, the most urgent first."""
        return self._among([*self._wishes])

    @property
    def waiting(self) -> int:
        """How many pulls wait. Any thread may ask, while another one answers them."""
        return sum(map(len, [*self._wishes.values()]))

    def push(self, update: Update, term: Term) -> bool:
        """Takes an update; whether it was new. Raises Refused."""
        repeated = self.clocks.repeated
        rounds = self.clocks.push(update)
        if new := self.clocks.repeated == repeated:
            self._terms[update] = term
            self.record(Deed(PUSH, *update), term)
        self._looks.add(update.key)
        self._apply(rounds)
        return new

    def pull(self, worker: int, incarnation: int, *, clock: int, key: int) -> None:
        """Takes a pull, which `answers` answers when it may. Raises Refused."""
        self.clocks.may_pull(worker, incarnation, clock=clock, key=key)
        waiting = self._wishes.setdefault(key, {})
        if worker in waiting:
            raise Refused(f"worker {worker} pulls key {key} again, and has not been answered")
        self._arrived += 1
        waiting[worker] = Wish(key, self._arrived, worker, incarnation, clock)
        self._looks.add(key)

    def join(self, worker: int, incarnation: int = 0) -> tuple[int, int]:
        """A process takes a place; see `Clocks.join`. What its predecessor wanted is forgotten."""
        old = self.clocks.members.get(worker)
        found = self.clocks.join(worker, incarnation)
        self.record(Deed(JOIN, worker, incarnation), None)
        self._forget(worker, terms=old is not None and not old.bye and old.incarnation)
        self.after(None)
        return found

    def begin(self, worker: int, incarnation: int, clock: int) -> None:
        """A worker begins at a clock; rounds that are complete without it are applied."""
        rounds = self.clocks.begin(worker, incarnation, clock)
        self.record(Deed(BEGIN, worker, incarnation, clock), None)
        self._looks |= {*self._wishes}
        self._apply(rounds)
        self.after(None)

    def hang_up(self, worker: int, rank: int = 0) -> None:
        """The connection of a worker's rank has ended: it will ask again for what it waits for."""
        for key, waiting in self._wishes.items():
            if self.shard.chunks[key].rank == rank:
                waiting.pop(worker, None)

    def leave(self, worker: int, incarnation: int, *, finished: bool = False) -> None:
        """The process of a place has ended; see `Clocks.leave`."""
        one = self.clocks.members.get(worker)
        if one and one.live and one.incarnation == incarnation:
            self.record(Deed(BYE if finished else GONE, worker, incarnation), None)
            self._forget(worker, terms=not finished and incarnation)
            self._apply(self.clocks.leave(worker, incarnation, finished=finished))
            self.after(None)

    def answers(self) -> Iterator[Answer]:
        """Yields the pulls that may be answered now. Each must have been sent, or copied, before
        the next message is taken.
        """
        rest = iter(self._among(self._looks))
        self._looks = set()
        try:
            for wish in rest:
                key, _, worker, incarnation, clock = wish
                try:
                    may = self.clocks.may_pull(worker, incarnation, clock=clock, key=key)
                except Refused:
                    may = False  # it has gone
                    del self._wishes[key][worker]
                if may:
                    weights = self.shard.pulled(worker, key)
                    del self._wishes[key][worker]
                    version = self._pulled(Update(worker, incarnation, clock, key))
                    yield Answer(worker, key, clock, version, weights)
        finally:
            self._looks |= {wish.key for wish in rest}

    def _among(self, keys: Iterable[int]) -> list[Wish]:
        """The pulls of some keys that wait, in the order in which they are answered."""
        found = [wish for key in keys for wish in self._wishes.get(key, {}).values()]
        return sorted(found, key=attrgetter("arrived")) if self.fifo else sorted(found)

    def redo(self, deed: Deed, term: Term | None) -> None:
        """Does what another desk has done. Raises Refused for a deed that cannot follow."""
        what, worker, incarnation, clock, key = deed
        if what == PUSH and term is not None:
            self.push(Update(worker, incarnation, clock, key), term)
        elif what == WEIGHTS:
            self.clocks.may_pull(worker, incarnation, clock=clock, key=key)
            self.shard.pulled(worker, key)
            self._pulled(Update(worker, incarnation, clock, key))
        elif what == JOIN:
            self.join(worker, incarnation)
        elif what == BEGIN:
            self.begin(worker, incarnation, clock)
        elif what in (BYE, GONE):
            self.leave(worker, incarnation, finished=what == BYE)
        else:
            raise Refused(f"a deed of kind {what}")

    def _pulled(self, update: Update) -> int:
        """Notes an answered pull; returns the version that it got."""
        version = self.clocks.pulled(update.worker, update.key)
        self.ledger.append(Event("pull", update, version))
        self.record(Deed(WEIGHTS, *update), None)
        return version

    def _apply(self, rounds: list[Round]) -> None:
        for one in rounds:
            terms = {update.worker: self._terms.pop(update) for update in one.updates}
            self.shard.apply(one, terms)
            for term in terms.values():
                self.applied(term)
            version = self.clocks.versions[one.updates[0].key]
            self.ledger += [Event("push", update, version) for update in one.updates]
        if rounds:  # only now the weights are those of the clocks
            self.after(max(one.updates[0].clock for one in rounds))

    def _forget(self, worker: int, *, terms: int) -> None:
        """Forgets what a worker wants; others may be answered without it.

        terms  the incarnation whose terms are forgotten, too; 0: none, for it left in good order
        """
        for waiting in self._wishes.values():
            waiting.pop(worker, None)
        self._looks |= {*self._wishes}
        if terms:
            over = worker, terms
            self._terms = {
                one: term
                for one, term in self._terms.items()
                if (one.worker, one.incarnation) != over
            }
