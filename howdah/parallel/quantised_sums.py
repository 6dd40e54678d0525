"""Sums of gradients in 4 bits by all-to-all, in one hop or two (`plan/quantised.py`;
https://arxiv.org/abs/2306.10209, section 3.3).

    flat gradient     shares of ranks  |0|1|2|3|     4 ranks, nodes of 2
    hop 1, in a node  rank 0 sends 1   |1|3|, rounded, and adds what 1 has of |0|2|
    hop 2, between    rank 0 sends 2   |2|,   rounded, and adds what 2 has of |0|

What is added was rounded, a rank's own terms too, and is added in the order of the ranks in the
precision of gradients. So a sum is rounded once in each hop, whatever the number of ranks, and all
that follows from it is equal on all ranks.

With feedback, each hop's `errors` of a unit are added to what is sent, and are then what of it was
rounded away. What is not finite leaves none: an update that is left out must not spoil the next.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.comm.handle import DONE, Handle
from howdah.model.blockwise import add, quantise, restore
from howdah.parallel.unit_messages import Arriving
from howdah.plan.quantised import hops, reducing_bytes

BITS = 4


class QuantisedSums:
    """Sums flat gradients over ranks, one bucket at a time.

    groups  of the hops, in order; this rank is in each of them
    room    for messages and for the sums between hops: that of the largest bucket
    kept    the lengths of units whose errors are kept; none: they are forgotten
    errors  by unit, what each hop has rounded away
    """

    def __init__(
        self,
        groups: Sequence[Group],
        longest: int,
        like: Tensor,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._groups, self._busy = groups, DONE
        sizes = [group.size for group in groups]
        length = reducing_bytes(longest, sizes, like.element_size())
        self.room = like.new_empty(length, dtype=torch.uint8)
        self.errors = {
            unit: [like.new_zeros(hop.elements) for hop in hops(length, sizes)]
            for unit, length in kept.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        kept = sum(error.nbytes for every in self.errors.values() for error in every)
        return self.room.nbytes + kept

    def settle(self) -> None:
        """Waits for the sum under way, whose memory the next one uses."""
        self._busy.result()

    def start(
        self, units: Iterable[str], flats: Iterable[Tensor], owns: Iterable[Tensor]
    ) -> Handle:
        """Starts to sum flat gradients of units, when all is settled; each of `owns` is the share
        of one, which becomes the sum.
        """
        rest, handles = self.room, list[Handle]()
        for unit, flat, own in zip(units, flats, owns, strict=True):
            handle, rest = self._reduce(self.errors.get(unit), flat, own, rest)
            handles.append(handle)

        def every() -> None:
            for handle in handles[:-1]:
                handle.result()

        self._busy = Arriving(handles[-1], every)
        return self._busy

    def _reduce(
        self, errors: Sequence[Tensor] | None, flat: Tensor, own: Tensor, rest: Tensor
    ) -> tuple[Handle, Tensor]:
        """The handle of one sum, and the room that it leaves."""
        sizes, handle, terms = [group.size for group in self._groups], DONE, flat
        for number, hop in enumerate(hops(len(flat), sizes)):
            cut = hop.ranks * hop.message
            message, heard, rest = rest[:cut], rest[cut : 2 * cut], rest[2 * cut :]
            total = own
            if number < len(sizes) - 1:
                length = hop.elements // hop.ranks * flat.element_size()
                total, rest = rest[:length].view(flat.dtype), rest[length:]
            error = errors[number] if errors else None
            send = partial(_round, terms, message, hop.ranks, prod(sizes[number + 1 :]), error)
            if number:
                handle = Arriving(handle, send)  # on the thread that sends it
            else:
                send()
            group = self._groups[number]
            heard_of = group.all_to_all(heard, message, async_op=True, after=handle)
            handle, terms = Arriving(heard_of, partial(_add, heard, total, hop.ranks)), total
        return handle, rest


def _round(
    terms: Tensor, message: Tensor, ranks: int, behind: int, error: Tensor | None = None
) -> None:
    """Writes the message to each of `ranks` to `message`: every share that is on the way to it, as
    many as there are ranks behind it. What `error` has in the order of messages is sent too.
    """
    shares = terms.view(behind, ranks, -1).transpose(0, 1).reshape(ranks, -1)
    errors = repeat(None) if error is None else error.view(ranks, -1)
    for share, out, away in zip(shares, message.view(ranks, -1), errors, strict=False):
        if away is not None:
            share = share + away  # noqa: PLW2901
        quantise(share, out, BITS)
        if away is not None:
            restore(out, away, shares=1, bits=BITS)
            torch.sub(share, away, out=away).nan_to_num_(0.0, 0.0, 0.0)


def _add(heard: Tensor, total: Tensor, ranks: int) -> None:
    """Sets `total` to the sum of what all ranks have sent."""
    first, *others = heard.view(ranks, -1)
    restore(first, total, shares=1, bits=BITS)
    for message in others:
        add(message, total, bits=BITS)
