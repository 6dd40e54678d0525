"""The queue of a connection: what leaves when, and who is woken."""

import socket
from threading import Thread

from howdah.comm.frames import Frames, own_room
from howdah.server.awaited import Awaited
from howdah.server.messages import ACK, PULL, PUSH, Fields, fields_of
from howdah.server.outbox import SHORT, Letter, Outbox

LONG = memoryview(bytes(2 * SHORT))


def pull(key):
    return Letter(PULL, Fields(key=key).packed, urgency=key)


def push(key):
    return Letter(PUSH, Fields(key=key).packed, [LONG], key, LONG.nbytes)


def test_short_letters_leave_together_the_most_urgent_first_and_a_long_one_alone():
    outbox = Outbox()
    outbox.post(push(1), push(0), pull(3), pull(2))
    assert [[one.urgency for one in outbox.take()] for _ in range(3)] == [[2, 3], [0], [1]]


def test_no_more_leave_together_than_a_socket_takes_at_once():
    outbox = Outbox()
    outbox.post(*(pull(key) for key in range(200)))
    taken = [outbox.take() for _ in range(3)]
    assert [one.urgency for some in taken for one in some] == list(range(200))
    assert all(SHORT / 2 < sum(one.bytes for one in some) <= SHORT for some in taken)


def test_what_has_a_size_waits_for_the_window_and_what_has_none_passes_it():
    outbox = Outbox(window=LONG.nbytes)
    outbox.post(push(0), push(1))
    outbox.take()
    outbox.post(pull(2))
    assert [one.kind for one in outbox.take()] == [PULL]
    assert not outbox._called()
    outbox.landed(LONG.nbytes)
    assert outbox._called() and [one.urgency for one in outbox.take()] == [1]


def test_an_outbox_in_which_nothing_waits_is_one_all_the_same():
    """Who has one asks whether there is one: it once had a length, and was none when empty."""
    outbox = Outbox()
    assert outbox and not outbox.waiting
    outbox.post(pull(0))
    assert outbox and outbox.waiting == 1


def test_an_outbox_that_finishes_sends_what_it_has():
    outbox = Outbox(window=1)
    outbox.post(push(0), push(1))
    outbox.finish()
    outbox.take()
    assert not outbox._called()  # what is left waits for the window, and nobody spins
    outbox.landed(LONG.nbytes)
    assert len(outbox.take()) == 1 and outbox.take() == []


def test_letters_of_all_who_post_arrive_in_the_frames_of_one_connection():
    ours, theirs = socket.socketpair()
    sender, reader, outbox = Frames(ours, "a"), Frames(theirs, "b"), Outbox()
    threads = [Thread(target=outbox.carry, args=(sender,))]
    threads += [
        Thread(target=lambda n=n: [outbox.post(ack(n, m)) for m in range(50)]) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    found = [fields_of(reader.receive(own_room).fields)[:2] for _ in range(150)]
    assert sorted(found) == [(n, m) for n in range(3) for m in range(50)]
    assert all([m for k, m in found if k == n] == list(range(50)) for n in range(3))
    outbox.close()
    for thread in threads:
        thread.join()
    sender.close()
    reader.close()


def ack(clock, key):
    return Letter(ACK, Fields(clock, key).packed, [LONG] if key % 10 == 0 else ())


def test_who_waits_is_woken_when_it_is_so():
    changed, seen = Awaited(), set()
    threads = [Thread(target=changed.wait, args=(lambda n=n: n in seen, 60.0)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for wanted in (1, 0):
        with changed:
            seen.add(wanted)
        threads[wanted].join()
        assert threads[0].is_alive() == bool(wanted)
    assert changed._waiting == []


def test_who_waits_in_vain_is_told_and_forgotten():
    changed = Awaited()
    assert not changed.wait(lambda: False, 0.0)
    assert changed._waiting == [] and changed.wait(lambda: True, 0.0)
