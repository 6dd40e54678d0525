"""Frames: what arrives is what was sent, or an error says what is wrong and from whom."""

import random
import socket
import struct
import threading
from zlib import crc32

import pytest

from howdah.comm.frames import (
    AHEAD,
    FIELDS,
    HEADER,
    UNSENT,
    FrameError,
    Frames,
    Gone,
    Silent,
    after,
    own_room,
    pack,
)


@pytest.fixture
def pair():
    """Two ends of a connection."""
    one, other = socket.socketpair()
    yield Frames(one, "rank 0", seconds=30), Frames(other, "rank 1", seconds=30)
    one.close()
    other.close()


def views(*parts):
    return [memoryview(bytearray(part)) for part in parts]


def raw(kind=1, fields=b"key", payload=b"payload", number=0):
    """The bytes of a frame."""
    head, _ = pack(kind, fields, views(payload), number=number)
    return head + payload


@pytest.fixture
def heard():
    """What a reader makes of some bytes, after which the sender ends."""

    def hear(said, *, frames=1, into=own_room, most=1 << 20):
        one, other = socket.socketpair()
        with one, other:
            reader = Frames(other, "rank 1", seconds=30, most=most)
            one.sendall(said)
            one.close()
            return [reader.receive(into) for _ in range(frames)]

    return hear


def test_a_frame_arrives_as_it_was_sent(pair):
    sender, reader = pair
    assert sender.send(7, b"fields", views(b"some", b"", b"bytes"), flags=3) == 9
    frame = reader.receive(own_room)
    assert frame[:3] == (7, 3, b"fields")
    assert frame.payload == b"somebytes"
    assert sender.send(8) == 0
    assert reader.receive() == (8, 0, b"", ())


def test_frames_that_leave_together_arrive_one_by_one(pair):
    """Whatever is read ahead with a frame belongs to those behind it."""
    draw = random.Random(4)
    longest = [0, 1, 40, AHEAD - 1, AHEAD, AHEAD + 1, 3 * AHEAD]
    said = [
        (kind, draw.randbytes(draw.choice(longest)), views(draw.randbytes(draw.choice(longest))))
        for kind in range(300)
    ]
    sender, reader = pair
    sending = threading.Thread(
        target=lambda: [sender.send_all(said[at : at + 7]) for at in range(0, len(said), 7)]
    )
    sending.start()
    for kind, fields, (payload,) in said:
        frame = reader.receive(own_room)
        assert (frame.kind, frame.fields, frame.payload) == (kind, fields, bytes(payload))
    sending.join()


def test_frames_over_tcp_wait_neither_for_an_acknowledgement_nor_behind_megabytes():
    """A server's second acknowledgement waited 40 ms for the first one's to be acknowledged: 16 MB
    took four times as long. And what a worker asked for on a slow link stood in the kernel behind
    all that it had pushed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        frames = Frames(sock, "rank 1")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT
        frames.close()


def test_a_payload_lands_where_its_reader_says(pair):
    sender, reader = pair
    first, second = views(bytes(2), bytes(3))
    sender.send(1, b"key", views(b"abcde"))
    reader.receive(lambda head: [first, second] if head.fields == b"key" else [])
    assert (bytes(first), bytes(second)) == (b"ab", b"cde")


def test_large_frames_go_both_ways_at_once(pair):
    """More than sockets hold: one thread each sends, gathered from many buffers."""
    parts = [random.Random(n).randbytes(5000) for n in range(1000)]
    senders = [threading.Thread(target=end.send, args=(1, b"", views(*parts))) for end in pair]
    for thread in senders:
        thread.start()
    for end in pair:
        assert end.receive(own_room).payload == b"".join(parts)
    for thread in senders:
        thread.join()


@pytest.mark.parametrize("at", range(len(raw())))
def test_a_flipped_bit_anywhere_is_found(heard, at):
    said = bytearray(raw())
    said[at] ^= 0x10
    with pytest.raises(FrameError, match="rank 1"):
        heard(bytes(said) + raw(number=1))


def test_the_place_of_a_damaged_payload_is_told(heard):
    said = bytearray(raw() + raw(number=1))
    said[-1] ^= 1
    with pytest.raises(FrameError, match=r"payload of frame 1 of rank 1 has a wrong checksum"):
        heard(bytes(said), frames=2)


@pytest.mark.parametrize("length", range(len(raw())))
def test_a_cut_frame_is_told(heard, length):
    expected = "rank 1 ended the connection" + (" in the middle of frame 0" if length else "$")
    with pytest.raises(Gone, match=expected):
        heard(raw()[:length])


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "frame 0 again, or late: frame 1 was next"), (2, "frame 2 too early: frames are missing")],
)
def test_a_frame_that_comes_twice_or_not_is_told(heard, number, said):
    with pytest.raises(FrameError, match=f"rank 1 sent {said}"):
        heard(raw() + raw(number=number), frames=2)


def announced(**changes):
    """A header with a right checksum, and any numbers."""
    numbers = {"fields": 0, "size": 0, "check": 0, **changes}
    head = struct.pack("<4sHHQIQI", b"hwd1", 1, 0, 0, *numbers.values())
    return head + struct.pack("<I", crc32(head))


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(heard):
    with pytest.raises(FrameError, match=r"1048577 bytes of payload: 1048576 is the most"):
        heard(announced(size=(1 << 20) + 1))
    with pytest.raises(FrameError, match=r"65537 bytes of fields: 65536 is the most"):
        heard(announced(fields=FIELDS + 1))
    with pytest.raises(FrameError, match="0 is the most"):
        heard(raw(), into=None)
    with pytest.raises(FrameError, match="7 bytes in frame 0, for which there is room of 4"):
        heard(raw(), into=lambda head: views(bytes(4)))
    with pytest.raises(ValueError, match="fields of 65537 bytes"):
        pack(1, bytes(FIELDS + 1), [], number=0)


def test_a_peer_that_ends_or_is_silent_is_told(pair):
    sender, reader = pair
    reader = Frames(reader.sock, "rank 1", seconds=0.05)
    with pytest.raises(Silent, match=r"rank 1 sent nothing for 0\.05 s"):
        reader.receive()
    sender.close()
    with pytest.raises(Gone, match=r"rank 1 ended the connection$"):
        reader.receive()
    with pytest.raises(Gone, match="connection with rank 1 ended: Broken pipe"):
        reader.send(1, b"x" * 1000)


def test_what_is_left_of_buffers():
    parts = views(b"ab", b"", b"cde")
    for done in range(6):
        assert b"".join(after(parts, done)) == b"abcde"[done:]


def mutations(count):
    """Frames with damage of any kind: flips, cuts, noise, repetitions, other numbers."""
    draw = random.Random(1)
    for _ in range(count):
        said = bytearray(raw(payload=draw.randbytes(draw.randrange(64))))
        kind = draw.randrange(5)
        if kind == 0:
            for _ in range(draw.randrange(1, 5)):
                said[draw.randrange(len(said))] ^= draw.randrange(1, 256)
        elif kind == 1:
            del said[draw.randrange(len(said)) :]
        elif kind == 2:
            said = bytearray(draw.randbytes(draw.randrange(200)))
        elif kind == 3:
            said = bytearray(announced(size=draw.getrandbits(40), check=draw.getrandbits(32)))
        else:
            at = draw.randrange(HEADER.size)
            said[at : at + 8] = draw.randbytes(8)
        yield bytes(said)


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_damaged_frames_are_all_refused(heard, count):
    """Whatever comes, a reader raises FrameError, and reads the next connection as before."""
    for number, said in enumerate(mutations(count)):
        try:
            (frame,) = heard(said)
        except FrameError as error:
            assert "rank 1" in str(error)
        else:  # a flip that was none: four flips may undo each other
            assert frame.fields == b"key" and raw(payload=frame.payload) == said
        if number % 100 == 0:
            assert heard(raw())[0].payload == b"payload"
