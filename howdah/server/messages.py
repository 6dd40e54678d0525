"""What workers and servers say to each other, each a frame of `comm/frames.py`.

    worker                                      server
      JOIN   key: incarnation, or 0       ──>
                                          <──   JOINED   clock, key: incarnation
      BEGIN  clock                        ──>
      PULL   clock, key                   ──>
                                          <──   WEIGHTS  clock, key; payload: the chunk
      PUSH   clock, key, value: tokens;
             payload: the summed gradient ──>
                                          <──   ACK      clock, key
      TRADE  a PUSH, and the PULL of the
             next clock of its key        ──>
      PING   after a few seconds without  <─>   PING   from both ends
             anything else
      BYE    it has finished              ──>
                                          <──   BYE      it has left
                                          <──   REFUSED  a sentence in the place of the fields

A worker that has lost its connection joins again with its incarnation, and sends what was not
acknowledged once more. One that has finished, or is asked to leave, says BYE until it is heard, for
the servers drop what an unfinished worker has pushed of an open round. One that is silent for too
long has left, and so has a server: both ends notice when the other is frozen, or its
machine is gone. What a server and its replica say to each other is in `chain.py`, what members and
the coordinator of a run, in `line.py`.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

JOIN, JOINED, BEGIN, PULL, WEIGHTS, PUSH, ACK, PING, BYE, REFUSED = range(1, 11)
GONE, DEED, HAS, SAID, FILE = range(11, 16)  # of chains and lines
TRADE = 16
FIELDS = struct.Struct("<qqd")
SILENCE = 10.0  # seconds without a byte, after which the other end counts as gone


class Fields(NamedTuple):
    """The fields of every message but REFUSED."""

    clock: int = 0
    key: int = 0
    value: float = 0.0

    @property
    def packed(self) -> bytes:
        """The bytes that are sent."""
        return FIELDS.pack(*self)


def fields_of(packed: bytes) -> Fields:
    """The fields of a message. Raises ValueError for bytes that are none."""
    if len(packed) != FIELDS.size:
        raise ValueError(f"{len(packed)} bytes of fields, where {FIELDS.size} are a message's")
    return Fields(*FIELDS.unpack(packed))


def bytes_of(flat: Tensor) -> list[memoryview]:
    """The memory of a flat CPU tensor of any dtype; nothing for one without elements."""
    return [flat.detach().view(torch.uint8).numpy().data] if flat.numel() else []
