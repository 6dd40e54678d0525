"""Another user of the machine finds nothing of a run to talk to, to read, or to put hands on."""

import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from howdah.comm.fork_server import ForkServer

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root"),
]

STRANGER = """
import ctypes, json, os, socket, sys
user, *pids = map(int, sys.argv[1:])
os.setgroups([]); os.setgid(user); os.setuid(user)
found = []

def attempt(what, act):
    try:
        act()
    except OSError:
        return
    found.append(what)

def grab(pid):
    pidfd = os.pidfd_open(pid)
    for number in range(64):  # the descriptors of another process, by pidfd_getfd
        if ctypes.CDLL(None).syscall(438, pidfd, number, 0) >= 0:
            found.append(f"descriptor {number} of {pid}")

for pid in pids:
    attempt(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"memory of {pid}", lambda: open(f"/proc/{pid}/mem", "rb"))
    attempt(f"signal to {pid}", lambda: os.kill(pid, 0))
    attempt(f"pidfd of {pid}", lambda: grab(pid))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    words = line.split()
    if len(words) > 7 and "howdah" in words[7]:
        there = socket.socket(socket.AF_UNIX)
        attempt(words[7], lambda: there.connect("\\0" + words[7][1:]))
print(json.dumps([one for one in found if not one.startswith("pidfd of")]))
"""


def wait_to_end(pipe, store):
    """For children: lives until it is told otherwise."""
    pipe.recv_bytes()
    return 0


@pytest.fixture(scope="module")
def pids():
    """Of a family of processes: the server and two children."""
    family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=["torch"], main=True)
    children = [family.fork(wait_to_end) for _ in range(2)]
    yield [str(pid) for pid in (family.pid, *(child.pid for child in children))]
    family.close(kill=True)


def told(*words):
    """What a stranger has found."""
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("place", [[], ["unshare", "--net"]])
def test_a_stranger_finds_nothing(pids, place):
    """Neither on this machine's network, nor on another one, as a container has."""
    if place and not which(place[0]):
        pytest.skip("needs unshare")
    user = pwd.getpwnam("nobody").pw_uid
    # The tests' own Python may lie where nobody else may look: the system's will do.
    python = next(p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists())
    assert told(*place, python, "-c", STRANGER, str(user), *pids) == []


def test_the_test_can_fail(pids):
    """The same, asked by the user who started them."""
    assert f"descriptors of {pids[1]}" in told(sys.executable, "-c", STRANGER, "0", pids[1])
