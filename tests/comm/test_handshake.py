"""The handshake: only who knows the secret hears anything, and strangers hold nobody up."""

import random
import socket
import threading
from contextlib import closing, suppress

import pytest

from howdah.comm.handshake import (
    CALLER,
    HELLO,
    LISTENER,
    MAGIC,
    NONCE,
    PROOF,
    Door,
    Stranger,
    greet,
    greeting,
    spell,
)

SECRET = bytes(range(32))
ENDS = b"a 1", b"b 2"


def steps(role, secret=SECRET, hello=b"", ends=ENDS):
    """One end of a handshake, without a socket."""
    return greeting(role, secret, hello, ends)


def talk(caller, listener, change=lambda number, said: said):
    """What both ends return, when each hears the other; `change` alters message `number`."""
    results, number = {}, 0
    sides = {"caller": caller, "listener": listener}
    inbox, wanted = {"caller": b"", "listener": b""}, {}
    for name, side in sides.items():
        out, wanted[name] = next(side)
        other = "listener" if name == "caller" else "caller"
        if out:
            inbox[other] += change(number, out)
            number += 1
    while len(results) < 2:
        for name, side in sides.items():
            other = "listener" if name == "caller" else "caller"
            if name in results or len(inbox[name]) < wanted[name]:
                continue
            said, inbox[name] = inbox[name][: wanted[name]], inbox[name][wanted[name] :]
            try:
                out, wanted[name] = side.send(said)
            except StopIteration as stop:
                results[name] = stop.value
                continue
            if out:
                inbox[other] += change(number, out)
                number += 1
    return results


def test_both_hear_what_the_other_has_proved():
    heard = talk(steps(CALLER, hello=b"I am 1"), steps(LISTENER, hello=b"I am 0"))
    assert heard == {"caller": b"I am 0", "listener": b"I am 1"}


def test_an_empty_hello_is_one():
    assert talk(steps(CALLER), steps(LISTENER)) == {"caller": b"", "listener": b""}
    with pytest.raises(ValueError, match="at most 4096 bytes"):
        next(steps(CALLER, hello=b"x" * (HELLO + 1)))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_byte_of_every_message_counts(number):
    """A flipped bit in any byte: one of the two is a stranger for the other."""
    lengths = {}
    talk(
        steps(CALLER, hello=b"hello"),
        steps(LISTENER, hello=b"hello"),
        lambda n, said: lengths.setdefault(n, len(said)) and said,
    )
    for at in range(lengths[number]):

        def flip(n, said, at=at):
            return said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :] if n == number else said

        with pytest.raises(Stranger):
            talk(steps(CALLER, hello=b"hello"), steps(LISTENER, hello=b"hello"), flip)


@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"x" * 32},
        {"secret": b""},
        {"ends": (b"a 1", b"b 3")},
        {"ends": (b"a 2", b"b 2")},
        {"ends": (b"b 2", b"a 1")},
    ],
)
def test_another_secret_or_address_is_a_strangers(other):
    with pytest.raises(Stranger, match="does not know the run's secret"):
        talk(steps(CALLER), steps(LISTENER, **other))


def test_a_proof_is_no_answer_to_itself():
    """Who sends back what he hears: the role is in the proof."""
    caller = steps(CALLER, hello=b"x")
    out, _ = next(caller)
    proof, _ = caller.send(out[len(MAGIC) :])  # its own number as the listener's
    with pytest.raises(Stranger):
        caller.send(proof[: PROOF.size])


def test_an_old_handshake_cannot_be_sent_again():
    recorded = []
    talk(steps(CALLER), steps(LISTENER), lambda n, said: recorded.append(said) or said)
    again = steps(LISTENER)
    next(again)
    again.send(recorded[0])
    with pytest.raises(Stranger):
        again.send(recorded[2][: PROOF.size])


def test_addresses_are_spelled_alike_at_both_ends():
    assert spell(("fe80::1%eth0", 7, 0, 2)) == spell(("fe80::1%eth1", 7, 0, 9)) == b"fe80::1 7"
    assert spell("") == b""


# -- over sockets


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def called(listener, secret=SECRET, hello=b"caller", deadline=30.0):
    """Connects and greets, on a thread; the thread, and what it found."""
    found = []

    def run():
        sock = socket.create_connection(listener.getsockname())
        try:
            found.append((greet(sock, secret, hello, deadline, role=CALLER), sock))
        except Stranger as error:
            found.append((error, sock))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_two_ends_of_a_connection_greet(listener):
    thread, found = called(listener)
    with closing(listener.accept()[0]) as sock:
        assert greet(sock, SECRET, b"listener", 30, role=LISTENER) == b"caller"
        thread.join()
        heard, other = found[0]
        assert heard == b"listener"
        other.sendall(b"payload")
        assert sock.recv(7) == b"payload"
        other.close()


def test_who_sends_nothing_is_a_stranger_in_time(listener):
    with closing(socket.create_connection(listener.getsockname())):
        sock, _ = listener.accept()
        with closing(sock), pytest.raises(Stranger, match=r"did not greet within 0\.05 s"):
            greet(sock, SECRET, b"", 0.05, role=LISTENER)


def answered(door, threads):
    """Those who were let in, when all callers are done."""
    found = []
    while any(thread.is_alive() for thread in threads) or not found:
        found += door.look(0.01)
    return found


def test_a_door_lets_in_who_knows_the_secret(listener):
    door = Door(listener, SECRET, b"door")
    callers = [called(listener, hello=b"%d" % n) for n in range(5)]
    wrong = [called(listener, secret=b"w" * 32) for _ in range(3)]
    let_in = answered(door, [thread for thread, _ in callers + wrong])
    assert sorted(hello for _, hello in let_in) == [b"0", b"1", b"2", b"3", b"4"]
    for _, found in callers:
        assert found[0][0] == b"door"
    for _, found in wrong:
        assert "ended the connection" in str(found[0][0])
    assert (door.strangers, door.why) == (3, "it does not know the run's secret")
    for sock in [sock for sock, _ in let_in] + [found[0][1] for _, found in callers + wrong]:
        sock.close()


def test_a_stranger_hears_one_random_number_and_no_more(listener):
    door = Door(listener, SECRET, b"a hello that tells something")
    with closing(socket.create_connection(listener.getsockname())) as sock:
        sock.sendall(MAGIC + bytes(NONCE) + bytes(PROOF.size) + bytes(1000))
        heard = b""
        while door.strangers == 0:
            door.look(0.01)
        with suppress(ConnectionResetError):  # for it has said more than was read
            while part := sock.recv(1 << 12):
                heard += part
        assert len(heard) in (0, NONCE)
    with closing(socket.create_connection(listener.getsockname())) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: somebody's scanner, which says much\r\n\r\n")
        while door.strangers == 1:
            door.look(0.01)
        with suppress(ConnectionResetError):
            assert sock.recv(1 << 12) == b""
    assert door.why == "it does not speak this protocol, or another version of it"


def test_many_silent_strangers_hold_nobody_up(listener):
    """More of them than a door waits for: the oldest are dropped, and a rank gets in."""
    door = Door(listener, SECRET, b"door", waiting=8)
    silent = [socket.create_connection(listener.getsockname()) for _ in range(40)]
    while door.strangers < 32:
        door.look(0.01)
    thread, found = called(listener)
    ((sock, hello),) = answered(door, [thread])
    assert hello == b"caller" and found[0][0] == b"door"
    assert door.strangers >= 32
    door.close()
    for one in [*silent, sock, found[0][1]]:
        one.close()


def strangers(listener, count):
    """Connections that send random bytes, of any length, some of them after a right beginning."""
    draw = random.Random(0)
    for number in range(count):
        with closing(socket.create_connection(listener.getsockname())) as sock:
            begin = MAGIC if number % 2 else b""
            with suppress(OSError):
                sock.sendall(begin + draw.randbytes(draw.choice((0, 1, 40, 108, 5000))))
        yield number


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_bytes_never_open_a_door(listener, count):
    door = Door(listener, SECRET, b"door")
    for _ in strangers(listener, count):
        assert door.look(0) == []
    while door.strangers < count:
        assert door.look(0.01) == []
    thread, found = called(listener)
    ((sock, hello),) = answered(door, [thread])
    assert hello == b"caller" and found[0][0] == b"door"
    sock.close()
    found[0][1].close()
