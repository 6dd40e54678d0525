"""Where servers of one machine listen: at names that are in no folder, for their own user alone."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from howdah.comm.handshake import Door
from howdah.server.addresses import address_in, address_of, bound, connected, spell
from howdah.train import serving
from howdah.train.shards import Shards

SECRET = bytes(32)
STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sock.settimeout(60)
try:
    sock.send(b"howdah1" + bytes(33))
    print(len(sock.recv(100)))
except ConnectionError:
    print(0)
"""


def test_a_name_of_this_machine_opens_no_port_and_goes_with_its_socket():
    with bound() as door:
        address = address_of(door)
        assert spell(address).startswith(f"@howdah-{os.getpid()}-")
        assert not [*Path.cwd().glob("*howdah-*")]
        with pytest.raises(ConnectionRefusedError):
            connected(address)  # nobody listens yet
        door.listen()
        with connected(address) as sock:
            assert sock.family == socket.AF_UNIX
    with pytest.raises(ConnectionRefusedError):
        connected(address)


def test_another_user_hears_nothing():
    """Not even the numbers that a stranger over TCP hears."""
    if os.geteuid():
        pytest.skip("needs root, to be another user")
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    with bound() as listener:
        listener.listen()
        door = Door(listener, SECRET, b"")
        name = address_of(listener)[1:]
        words = [python, "-c", STRANGER, name]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stranger:
            while not door.strangers:
                assert door.look(0.1) == []
            assert stranger.communicate()[0].strip() == "0"
        door.close()


def test_servers_of_a_run_on_one_machine_listen_at_names(make_job):
    sync = 'method.sync={kind = "asp", workers = 1, replicas = 1}'
    job = make_job("named", "layout=server2", "method.grad_clip=0.0", sync)
    start, corpus = serving.start_of(job, -1, serving.corpus_of(job)), serving.corpus_of(job)
    given = {"corpus": corpus, "secret": SECRET, "at": "", "saver": None, "keep": None}
    shards = Shards(job, 0, start=start, tell=lambda said: None, **given)
    every = [*shards.addresses.values(), *shards.feeds.values()]
    assert len(every) == 3 and all(one.startswith("\0howdah-") for one in every)
    shards._close()


def test_addresses_are_read_as_they_are_told():
    assert address_in("\0name") == "\0name"
    assert address_in(["node1", 5]) == ("node1", 5)
    for wrong in (5, ["node1"], ["node1", "5"], None):
        with pytest.raises(ValueError, match="no address"):
            address_in(wrong)
