"""The fork server: children in a family without ports, names, or members that outlive it."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest
import torch.distributed as dist

from howdah.comm.fork_server import ForkServer, ServerLost


def server():
    return ForkServer(farewell=signal.SIGKILL, grace=0, preload=["torch"], main=True)


def number(pipe, store, answer):
    """For children: exits with a number, when it is told to."""
    pipe.recv_bytes()
    return answer


def served(pipe, store, answer):
    """For children: as `number`, once the store has answered."""
    store.set("any", "thing")
    pipe.send_bytes(b"served")
    return number(pipe, store, answer)


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
    return family.status_of(child)


def test_children_tell_how_they_ended():
    family = server()
    first, second, third = (family.fork(number, answer) for answer in (0, 7, 1))
    first.pipe.send_bytes(b"now")
    second.pipe.send_bytes(b"now")
    os.kill(third.pid, signal.SIGKILL)
    assert [see_end(family, child) for child in (first, second, third)] == [0, 7, -signal.SIGKILL]
    family.close()


def test_a_caller_that_blocks_the_signal_of_ended_children_hears_of_them():
    """Its mask is inherited, and a run waited for ever for ranks that had ended."""
    asked = []

    def heed():
        asked.append(None)
        assert len(asked) < 100, "the server does not hear of its children"

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=[], main=True, heed=heed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child = family.fork(number, 7)
    child.pipe.send_bytes(b"now")
    assert see_end(family, child) == 7
    family.close()


def test_nothing_of_the_family_has_a_port_or_a_name():
    """No listening socket, no file that is not the program's own; a stranger finds no way in."""
    family = server()
    children = [family.fork(number, 0) for _ in range(2)]
    mine = {family.pid, *(child.pid for child in children)}
    held = set()
    for pid in mine:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed since: it begins and closes what it read
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


def test_a_server_that_is_stopped_is_not_waited_for():
    """Not even while it loads: nobody else would ever wake it."""
    family = server()
    os.kill(family.pid, signal.SIGSTOP)
    with pytest.raises(ServerLost, match="the process that started the ranks was killed"):
        family.fork(number, 0)
    family.close(kill=True)


class Asked(Exception):
    pass


def test_whoever_waits_for_a_server_is_asked_now_and_then():
    def heed():
        raise Asked

    family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=[], main=False, heed=heed)
    os.kill(family.pid, signal.SIGSTOP)
    with pytest.raises(Asked):
        family.fork(number, 0)
    family.close(kill=True)


def test_a_server_without_free_descriptors_refuses_and_serves_on():
    family = server()
    child = family.fork(served, 5)
    assert child.pipe.recv_bytes() == b"served"  # so what the fork took is closed again
    before = resource.prlimit(family.pid, resource.RLIMIT_NOFILE)
    held = {int(name) for name in os.listdir(f"/proc/{family.pid}/fd")}
    free = sorted({*range(100)} - held)
    for limit in free[:3]:  # none for the child's pipe, none and one for the ends of its line
        resource.prlimit(family.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        with pytest.raises(ServerLost, match="no process can be started: Too many open files"):
            family.fork(number, 0)
    resource.prlimit(family.pid, resource.RLIMIT_NOFILE, before)
    for one, status in ((family.fork(number, 6), 6), (child, 5)):
        one.pipe.send_bytes(b"now")
        assert see_end(family, one) == status
    family.close()


def hear_the_end(pipe, store):
    """For children: waits for a key that nobody sets; says what ends that."""
    pipe.send_bytes(b"here")
    try:
        store.get("nothing")
    except (dist.DistNetworkError, ConnectionError):
        pipe.send_bytes(b"ended")
    return 0


def test_a_child_hears_the_store_end():
    """It held the server's end of its own line, and so waited for an answer of itself."""
    family = ForkServer(farewell=signal.SIGTERM, grace=600, preload=["torch"], main=True)
    child = family.fork(hear_the_end)
    assert child.pipe.recv_bytes() == b"here"
    os.kill(family.pid, signal.SIGKILL)
    assert child.pipe.poll(600)
    assert child.pipe.recv_bytes() == b"ended"
    family.close(kill=True)
    gone([child.pid])


CALLER = """
import os, signal, sys
from howdah.comm.fork_server import ForkServer
sys.path.insert(0, {tests!r})
from test_fork_server import number
family = ForkServer(farewell=signal.{farewell}, grace={grace}, preload=["torch"], main=False)
children = [family.fork(number, 0) for _ in range(2)]
print(family.pid, *(child.pid for child in children), flush=True)
{before}
os.kill(os.getpid(), signal.{ending})
"""


@pytest.mark.parametrize("ending", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_when_the_caller_is_killed_or_stopped_all_end(ending):
    """A caller that was stopped is woken, so that it can tell; this one has nothing to tell."""
    see_family_end(ending, before="", farewell="SIGKILL", grace=0)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGKILL", "SIGSTOP"])
def test_a_child_that_is_stopped_does_not_keep_them(ending):
    """It cannot be asked to leave, and the others would wait as long as one may take to save."""
    before = "os.kill(children[0].pid, signal.SIGSTOP)\nchildren[1].pipe.send_bytes(b'now')"
    see_family_end(ending, before=before, farewell="SIGTERM", grace=100_000)


def see_family_end(ending, **how):
    text = textwrap.dedent(CALLER).format(tests=os.path.dirname(__file__), ending=ending, **how)
    see_all_end(text, code=-signal.SIGKILL if ending == "SIGKILL" else 0)


def see_all_end(text, *, code):
    """Of a program: the processes that its first line names, and then itself, with this code."""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as one:
        try:
            gone(map(int, one.stdout.readline().split()))
            assert one.wait(120) == code
        finally:
            one.kill()


UNSAID = """
import os, signal
from howdah.comm import fork_server

def stop(pipe, *things):
    fork_server.send = send
    print(family.pid, family._children[-1].pid, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

send, fork_server.send = fork_server.send, stop
how = {"farewell": signal.SIGTERM, "grace": 100_000, "preload": ["torch"], "main": False}
family = fork_server.ForkServer(**how)
family.fork(print)
"""


@pytest.mark.slow
def test_a_child_that_was_not_told_what_to_do_leaves():
    """A caller was stopped between asking for a child and telling it: the child waited on, deaf to
    the farewell, as long as one may take to save. Found by bench/chaos/kills.py.
    """
    see_all_end(UNSAID, code=0)


@pytest.mark.slow
def test_a_server_that_cannot_load_says_why():
    family = ForkServer(farewell=signal.SIGKILL, grace=0, preload=["no.such.module"], main=False)
    with pytest.raises(ServerLost, match="No module named 'no'"):
        family.fork(number, 0)
    family.close()
