"""The fork server: children in a family without ports, names, or members that outlive it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from howdah.comm.fork_server import ForkServer, ServerLost


def server():
    return ForkServer(farewell=signal.SIGKILL, grace=0, preload=["torch"], main=True)


def number(pipe, store, answer):
    """For children: exits with a number, when it is told to."""
    pipe.recv_bytes()
    return answer


def gone(pids):
    """Waits until the processes are gone: descriptors of them become readable."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor) as ended:
            import select

            assert select.select([ended], [], [], 120)[0], f"process {pid} lives on"


def see_end(family, child):
    while child.status is None:
        family.look()
    return child.status


def test_children_tell_how_they_ended():
    family = server()
    first, second, third = (family.fork(number, answer) for answer in (0, 7, 1))
    first.pipe.send_bytes(b"now")
    second.pipe.send_bytes(b"now")
    os.kill(third.pid, signal.SIGKILL)
    assert [see_end(family, child) for child in (first, second, third)] == [0, 7, -signal.SIGKILL]
    family.close()


def test_nothing_of_the_family_has_a_port_or_a_name():
    """No listening socket, no file that is not the program's own; a stranger finds no way in."""
    family = server()
    children = [family.fork(number, 0) for _ in range(2)]
    mine = {family.pid, *(child.pid for child in children)}
    held = set()
    for pid in mine:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    inodes = {name.partition("[")[2].rstrip("]") for name in held if name.startswith("socket:")}
    assert inodes
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/{family.pid}/net/{table}") as lines:
            assert not inodes & {line.split()[9] for line in lines.readlines()[1:]}
    with open(f"/proc/{family.pid}/net/unix") as lines:
        rows = [line.split() for line in lines.readlines()[1:]]
    assert not [row for row in rows if row[6] in inodes and len(row) > 7]  # a name would be the 8th
    family.close(kill=True)
    gone(mine)


def test_stop_signals_wait_until_a_child_listens():
    family = server()
    child = family.fork(number, 3)
    os.kill(child.pid, signal.SIGTERM)
    os.kill(family.pid, signal.SIGINT)
    child.pipe.send_bytes(b"now")
    assert see_end(family, child) == 3
    family.close()


def test_when_the_server_is_killed_its_children_end():
    family = server()
    children = [family.fork(number, 0) for _ in range(2)]
    os.kill(family.pid, signal.SIGKILL)
    gone([child.pid for child in children])
    with pytest.raises(ServerLost, match="the process that started the ranks was killed"):
        family.fork(number, 0)
    family.close(kill=True)


CALLER = """
import os, signal, sys
from howdah.comm.fork_server import ForkServer
sys.path.insert(0, {tests!r})
from test_fork_server import number
family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=["torch"], main=False)
children = [family.fork(number, 0) for _ in range(2)]
print(family.pid, *(child.pid for child in children), flush=True)
os.kill(os.getpid(), signal.{ending})
"""


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGSTOP"])
def test_when_the_caller_is_killed_or_stopped_all_end(ending):
    """A caller that was stopped is woken, so that it can tell; this one has nothing to tell."""
    text = textwrap.dedent(CALLER).format(tests=os.path.dirname(__file__), ending=ending)
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        gone(map(int, caller.stdout.readline().split()))
        assert caller.wait() == (-signal.SIGKILL if ending == "SIGKILL" else 0)


def test_a_server_that_cannot_load_says_why():
    family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=["no.such.module"], main=False)
    with pytest.raises(ServerLost, match="No module named 'no'"):
        family.fork(number, 0)
    family.close()
