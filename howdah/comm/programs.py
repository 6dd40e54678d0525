"""Programs on tensors: the tasks and rounds of one rank, with the places of its chunks in them.

`collectives/places.py` has found where every chunk is and what each task waits for. Here pieces
become views of tensors. Between machines they run as a flow (`flow.py`), whose tasks start as soon
as what they read is final; in shared memory, round by round (`rounds.py`).

Additions are those of the lists, in their order: the bits are those of `collectives/execute.py`,
however early a task starts. bf16 and fp16 are added in float32. What one turn adds to a chunk is
rounded once; a partial sum that is sent on is rounded before, because it travels in the dtype of
the tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from howdah.collectives.places import Effect, Piece, Transfer, Way
from howdah.comm.flow import Flow, Task
from howdah.comm.reduction import COMBINE, HALF, reduce_in_order
from howdah.comm.rounds import Message, Round, nothing


class OnTensors(NamedTuple):
    """A way on tensors.

    memories  flat tensors by name
    op        the reduction; a mean is a sum, which `finish` divides
    finish    called at the end
    """

    way: Way
    memories: Mapping[str, Tensor]
    op: str = "sum"
    finish: Callable[[], object] = nothing

    def flow(self) -> Flow:
        """The tasks. What the first turn packs is packed now."""
        way = self.way
        self.happen(way.turns[0].packs if way.turns else ())
        tasks = []
        for turn, does, after in way.tasks:
            if isinstance(does, Effect):
                tasks.append(Task(turn, after, do=partial(self.happen, [does])))
            else:
                tensors = (self._view(does.piece),)
                tasks.append(Task(turn, after, does.peer, tensors, sends=does.sends))
        tasks.append(Task(len(way.turns), tuple(range(len(tasks))), do=self.finish))
        return tasks

    def rounds(self) -> list[Round]:
        """The program as rounds, of which each ends before the next one starts."""
        turns = self.way.turns
        self.happen(turns[0].packs if turns else ())
        rounds = []
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            then = partial(self.happen, [*turn.effects, *(after.packs if after else ())])
            rounds.append(Round(self._messages(turn.sends), self._messages(turn.receives), then))
        return [*rounds, Round(after=self._end)]

    def happen(self, effects: Iterable[Effect]) -> None:
        """Copies and adds."""
        combine = COMBINE[self.op]
        for into, terms in effects:
            to, first, *others = self._view(into), *map(self._view, terms)
            if len(others) > 1 and to.dtype in HALF:
                op = "sum" if self.op == "mean" else self.op
                reduce_in_order(to, [first, *others], op)
            elif others:
                combine(first, others[0], out=to)
                for other in others[1:]:
                    combine(to, other, out=to)
            elif to.data_ptr() != first.data_ptr():
                to.copy_(first)

    def _view(self, piece: Piece) -> Tensor:
        return self.memories[piece.memory][piece.start : piece.stop]

    def _messages(self, listed: Sequence[Transfer]) -> list[Message]:
        return [(self._view(one.piece), one.peer) for one in listed]

    def _end(self) -> None:
        self.happen(self.way.last)
        self.finish()
