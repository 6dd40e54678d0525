"""TLS around connections, by certificates made here: both ends show one of the same authority."""

import shutil
import socket
import ssl
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Queue
from threading import Thread

import pytest
from made_certificates import NEEDS_OPENSSL, made

from howdah.base.errors import UserError
from howdah.comm import tls
from howdah.comm.frames import Frames, Gone
from howdah.comm.handshake import CALLER, Door, Stranger, greet
from howdah.comm.tls import sealing
from howdah.plan.comm import Tls

SECRET = bytes(range(32))
pytestmark = NEEDS_OPENSSL


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return made(tmp_path_factory.mktemp("tls"))


@contextmanager
def door(files):
    """A door behind TLS, of which somebody looks after; and those who came in."""
    came, over = Queue(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Door(listener, SECRET, b"server", seal=sealing(files, calls=False))

        def look():
            while not over:
                for one in there.look(0.01):
                    came.put(one)

        thread = Thread(target=look)
        thread.start()
        try:
            yield listener.getsockname(), came
        finally:
            over.append(True)
            thread.join()
            there.close()
            while not came.empty():
                came.get()[0].close()


def call(address, files):
    sock = sealing(files, calls=True)(socket.create_connection(address))
    try:
        greet(sock, SECRET, b"worker", role=CALLER)
    except BaseException:
        sock.close()
        raise
    return sock


def test_frames_of_any_size_cross_and_nothing_can_be_read_on_the_way(certificates):
    files = certificates("member")
    with door(files) as (address, came), socket.create_server(("127.0.0.1", 0)) as tap:
        heard = Thread(target=pass_on, args=(tap, address, seen := []))
        heard.start()
        with pytest.raises(Stranger):  # a proof is bound to the addresses of both ends
            call(tap.getsockname(), files)
        heard.join()
        assert seen and SECRET not in b"".join(seen) and b"worker" not in b"".join(seen)
        mine = Frames(call(address, files), "the server", seconds=20)
        theirs = Frames(came.get(timeout=20)[0], "the worker", seconds=20)
        payloads = [bytes([n % 251]) * n for n in (0, 1, 16_385, 3_000_000)]
        back = Thread(target=echo, args=(theirs, len(payloads)))
        back.start()
        for payload in payloads:
            mine.send(1, b"fields", [memoryview(payload)])
        for payload in payloads:
            room = bytearray(len(payload))
            mine.receive(lambda head, room=room: [memoryview(room)] if room else [])
            assert room == payload
        back.join()
        mine.close()
        with pytest.raises(Gone):
            theirs.receive()
        theirs.close()


def echo(frames, count):
    """Sends frames back, each while the next may already come."""
    found = []
    for _ in range(count):
        room = []

        def into(head, room=room):
            room.append(bytearray(head.size))
            return [memoryview(room[0])] if head.size else []

        frames.receive(into)
        found.append(room[0] if room else b"")
    for payload in found:
        frames.send(1, b"fields", [memoryview(payload)])


def pass_on(tap, address, seen):
    """Stands between a caller and a listener, and keeps what he hears."""
    sock, _ = tap.accept()
    with sock, socket.create_connection(address) as there:

        def carry(one, other):
            with suppress(OSError):
                while part := one.recv(1 << 16):
                    seen.append(part)
                    other.sendall(part)
                other.shutdown(socket.SHUT_WR)

        back = Thread(target=carry, args=(there, sock))
        back.start()
        carry(sock, there)
        back.join()


@pytest.mark.parametrize("who", ["stranger", "plain", "old"])
def test_who_shows_no_certificate_of_the_authority_is_refused(certificates, who):
    with door(certificates("member")) as (address, came), pytest.raises((Stranger, OSError)):
        if who == "stranger":  # who believes the server, and is not believed
            call(address, certificates("stranger", ca="ca"))
        elif who == "plain":
            call(address, None)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            files = certificates("member")
            context.load_cert_chain(files.cert, files.key)
            with socket.create_connection(address) as sock:
                context.wrap_socket(sock)
    assert came.empty()


def test_a_server_without_a_certificate_of_the_authority_is_not_believed(certificates):
    failed = pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed")
    with door(certificates("stranger", ca="other-ca")) as (address, came), failed:
        call(address, certificates("member"))
    assert came.empty()


def test_who_never_greets_is_given_up_and_keeps_nobody_waiting(certificates, monkeypatch):
    monkeypatch.setattr(tls, "GREETING", 0.05)
    files = certificates("member")
    with door(files) as (address, _), socket.create_connection(address) as silent:
        call(address, files).close()
        assert silent.recv(1) == b""


# -- files


def wrong(certificates, tmp_path):
    """Files of no use, and what is said of each."""
    files = certificates("member")
    text, open_key = tmp_path / "text", tmp_path / "open.key"
    text.write_text("no certificate")
    shutil.copy(files.key, open_key)
    open_key.chmod(0o644)
    yield replace(files, ca=""), "comm.tls has no ca: it names a certificate"
    yield Tls(ca=files.ca), "comm.tls has no cert and no key"
    yield replace(files, key=str(open_key)), "comm.tls.key .*open.key has mode 0644"
    yield replace(files, key=str(tmp_path / "none")), "comm.tls.key .*none cannot be read: No such"
    yield replace(files, cert=str(tmp_path / "none")), "comm.tls.cert .*none: No such file"
    yield replace(files, ca=str(text)), "comm.tls.ca .*text: no certificate in PEM form"
    yield replace(files, cert=certificates("stranger").cert), "comm.tls.cert .*: not of the key"


def test_files_of_no_use_are_one_sentence(certificates, tmp_path):
    for files, said in wrong(certificates, tmp_path):
        with pytest.raises(UserError, match=said) as caught:
            sealing(files, calls=True)
        assert "\n" not in str(caught.value)
