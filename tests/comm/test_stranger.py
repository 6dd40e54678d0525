"""Another user of the machine finds nothing of a run to talk to, to read, or to put hands on."""

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import which

import pytest
from real_train import ENDLESS, TRAIN, shell, training
from small_runs import RECIPE

from howdah.comm.fork_server import ForkServer

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root"),
]

STRANGER = """
import ctypes, json, os, socket, sys
user, pids, sockets = json.loads(sys.argv[1])
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
    if len(words) > 7 and int(words[6]) in sockets:
        there = socket.socket(socket.AF_UNIX, int(words[4], 16))
        name = words[7].replace("@", "\\0", 1)
        attempt(words[7], lambda: there.connect(name))
for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and int(words[9]) in sockets:
            port = int(words[1].rpartition(":")[2], 16)
            there = socket.socket(kind)
            attempt(f"port {port}", lambda: there.connect(("localhost", port)))
print(json.dumps([one for one in found if not one.startswith("pidfd of")]))
"""


def wait_to_end(pipe, store):
    """For children: lives until it is told otherwise."""
    pipe.recv_bytes()
    return 0


@pytest.fixture(scope="module")
def family():
    """A family of processes: the server and two children."""
    family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=["torch"], main=True)
    children = [family.fork(wait_to_end) for _ in range(2)]
    yield [family.pid, *(child.pid for child in children)]
    family.close(kill=True)


@pytest.fixture(scope="module")
def run(text, cache, tmp_path_factory):
    """A real run that trains on two ranks: the launcher, the server and the ranks."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.toml").write_text(RECIPE.format(text=text))
    words = [*TRAIN, folder / "small.toml", f"folder={folder / 'a'}", "layout=dp2", *ENDLESS]
    with training(words, shell(cache), folder) as found:
        assert len(found) == 4
        yield found


@pytest.fixture(params=["family", "run"])
def pids(request):
    """What is looked over: the processes alone, or in a real run."""
    return request.getfixturevalue(request.param)


def sockets_of(pids):
    """The sockets that processes hold, by their numbers in the kernel."""
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                held.add(os.readlink(link))
    return [int(name[8:-1]) for name in held if name.startswith("socket:[")]


def told(user, pids, sockets, *place):
    """What a stranger has found."""
    # The tests' own Python may lie where nobody else may look: the system's will do.
    python = next(p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists())
    words = [*place, python, "-c", STRANGER, json.dumps([user, pids, sockets])]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("place", [pytest.param([], marks=pytest.mark.slow), ["unshare", "--net"]])
def test_a_stranger_finds_nothing(pids, place):
    """Neither on this machine's network, nor on another one, as a container has."""
    if place and not which(place[0]):
        pytest.skip("needs unshare")
    sockets = sockets_of(pids)
    assert sockets  # unless there is nothing to find
    assert told(pwd.getpwnam("nobody").pw_uid, pids, sockets, *place) == []


def test_the_test_can_fail(family, tmp_path):
    """The same, asked by the user who started them; and where somebody listens."""
    assert f"descriptors of {family[1]}" in told(0, family[1:2], [])
    with (
        socket.create_server(("localhost", 0)) as port,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        path = tmp_path / "howdah"
        for one, name in ((named, str(path)), (abstract, f"\0howdah-{os.getpid()}")):
            one.bind(name)
            one.listen()
        found = told(0, [], sockets_of([os.getpid()]))
        assert {f"port {port.getsockname()[1]}", str(path), f"@howdah-{os.getpid()}"} <= {*found}
