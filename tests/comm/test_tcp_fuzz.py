"""What comes over the lines of a rank is damaged in any way: told, or no damage, and no hang."""

import random
import socket

import numpy as np
import pytest
import torch

from howdah.comm import frames
from howdah.comm.flow import WITH_CALL
from howdah.comm.frames import HEADER
from howdah.comm.segments import segments
from howdah.comm.signature import Disagreement, number, pack
from howdah.comm.tcp import TcpTransport
from howdah.comm.tcp_connect import LINES
from howdah.comm.transport import PeerLost

LENGTHS = (16, WITH_CALL // 2)  # elements: one message goes with its call, the other behind it


def said_by(values):
    """The bytes of line 0 of rank 1, which sends these values."""
    call = pack(number(1, f"send(float32 [{len(values)}], 1 to 0)"), "fuzz.py:1")
    payload = [memoryview(values).cast("B")]
    if values.nbytes <= WITH_CALL:
        found = [*segments(1, 0, payload, call)]
    else:
        found = [*segments(1, 0, [], call), *segments(1, 1, payload)]
    parts = []
    for at, one in enumerate(found):
        head, _ = frames.pack(one.kind, one.fields, one.buffers, number=at)
        parts += [head, *one.buffers]
    return b"".join(parts)


def damaged(draw, said):
    """The bytes with one damage, or more."""
    said = bytearray(said)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(said) + 1)
        how = draw.randrange(7)
        if how == 0 and at < len(said):
            said[at] ^= draw.randrange(1, 256)
        elif how == 1:
            del said[at:]
        elif how == 2:
            said[at:at] = draw.randbytes(draw.randrange(1, 100))
        elif how == 3:  # repeated
            said[at:at] = said[: draw.randrange(1, 600)]
        elif how == 4:
            del said[at : at + draw.randrange(1, 100)]
        elif how == 5:  # in the first header, which has a right checksum then
            magic, *fields, _ = HEADER.unpack(said[: HEADER.size].ljust(HEADER.size, b"\0"))
            place = draw.randrange(len(fields))
            fields[place] = draw.getrandbits(16 if place < 2 else 32)
            head = HEADER.pack(magic, *fields, 0)[:-4]
            said[: HEADER.size] = head + frames.CHECK.pack(frames.crc32(b"", frames.crc32(head)))
        else:
            said[:] = draw.randbytes(draw.randrange(2000))
    return bytes(said)


def heard(said, length):
    """What rank 0 receives when rank 1 says this on line 0 and ends; or how it is refused."""
    pairs = [socket.socketpair() for _ in range(LINES)]
    transport = TcpTransport(0, 2, {1: [ours for ours, _ in pairs]}, seconds=30.0)
    x = torch.full((length,), -7.0)
    try:
        pairs[0][1].sendall(said)
        for _, theirs in pairs:
            theirs.shutdown(socket.SHUT_WR)
        transport.receive(x, 1)
        return x.numpy().tobytes()
    except (PeerLost, Disagreement) as error:
        assert "rank 1" in str(error)
        assert "silent" not in str(error)  # it was not waited for
        return None
    finally:
        transport.close()
        for ours, theirs in pairs:
            ours.close()
            theirs.close()


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_what_is_damaged_on_a_line_is_told_and_used_nowhere(count):
    draw = random.Random(3)
    values = [np.arange(length, dtype=np.float32) for length in LENGTHS]
    whole = [said_by(one) for one in values]
    for one, said in zip(values, whole, strict=True):
        assert heard(said, len(one)) == one.tobytes()
    told = 0
    for turn in range(count):
        which = turn % 50 == 0  # a long one now and then
        said = damaged(draw, whole[which])
        found = heard(said, LENGTHS[which])
        assert found in (None, values[which].tobytes())
        told += found is None
    assert told > count * 0.8  # what is behind the message is read by nobody
