"""The cluster in a box: hosts that share nothing, bytes on its wires, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from shutil import which

import pytest

pytestmark = pytest.mark.root
CLUSTER = Path(__file__).parents[2] / "bench" / "cluster"
RUN = [sys.executable, CLUSTER / "run.py"]


def command(*words, **how):
    """A run of run.py to its end."""
    words = [*map(str, RUN), *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **how)


def test_hosts_share_nothing_but_files(box):
    with box("fat-tree", 4) as cluster:
        for host in range(4):
            cluster.run(host, ["sh", "-c", f"echo {host} >/tmp/own; echo {host} >/dev/shm/own"])
        for host in range(4):
            seen = cluster.run(host, ["sh", "-c", "cat /tmp/own /dev/shm/own; hostname; echo $$"])
            *own, pid = seen.split()
            assert own == [str(host), str(host), f"host{host}"]
            assert int(pid) < 100  # of a host that has just begun to count
            assert cluster.file(host, "/tmp/own").read_text() == f"{host}\n"
        spaces = ("net", "pid", "uts", "mnt", "ipc", "time")
        words = ["readlink", *(f"/proc/self/ns/{kind}" for kind in spaces)]
        found = [cluster.run(host, words).split() for host in range(4)]
        assert len({one for each in found for one in each}) == 4 * len(spaces)


def test_what_a_program_sends_is_what_its_card_counts(box):
    send = "import socket; socket.create_connection(('host1', 2000)).sendall(bytes(1 << 20))"
    take = (
        "import socket; s = socket.create_server(('', 2000)); print('ready', flush=True); c, _ = "
        "s.accept(); n = 0\nwhile b := c.recv(1 << 16): n += len(b)\nprint(n)"
    )
    with box("spine-leaf", 4) as cluster:
        assert [cluster.sent(host) for host in range(4)] == [0] * 4
        taker = cluster.start(1, [sys.executable, "-c", take], stdout=subprocess.PIPE, text=True)
        taker.stdout.readline()
        cluster.run(3, [sys.executable, "-c", send])
        assert taker.communicate()[0].strip() == str(1 << 20)
        bounds = 1 << 20, (1 << 20) * 1.1
        assert bounds[0] < cluster.sent(3) < bounds[1]
        assert bounds[0] < cluster.received(1) < bounds[1]
        assert cluster.sent(0) == 0
        assert cluster.received(2) < 1 << 10  # a bridge floods frames to an unknown address


def test_all_pairs_of_hosts_reach_one_another(box):
    """By one datagram each: a switch that does not know a host says nothing."""
    take = (
        "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 2000)); "
        "print('ready', flush=True); print(sorted({s.recv(9) for _ in range(4)}))"
    )
    send = (
        "import os, socket; s = socket.socket(type=socket.SOCK_DGRAM)\n"
        "for h in range(5): s.sendto(os.environ['BOX_HOST'].encode(), (f'host{h}', 2000))"
    )
    send = send.replace("range(5)", "{*range(5)} - {int(os.environ['BOX_HOST'])}")
    for profile in ("fat-tree", "spine-leaf"):
        with box(profile, 5) as cluster:
            pipe = {"stdout": subprocess.PIPE, "text": True}
            python = [sys.executable, "-S", "-c"]
            takers = [cluster.start(host, [*python, take], **pipe) for host in range(5)]
            for taker in takers:
                taker.stdout.readline()
            for host in range(5):
                cluster.run(host, [*python, send])
            for host, taker in enumerate(takers):
                heard = [str(other).encode() for other in range(5) if other != host]
                assert taker.communicate()[0].strip() == str(heard)


def test_howdah_counts_as_tcp_what_the_cards_send(modules, box):
    (prove,) = modules("prove")
    with box("flat-1g", 2) as cluster:
        rows = prove.all_reduce(cluster, 1 << 20, 2)
    assert [row["counted"] for row in rows] == [{"tcp": 2 << 22}] * 2
    assert [prove.crossed(row) for row in rows] == ["", ""]


def test_a_command_runs_on_every_host(box):
    words = ["sh", "-c", "echo {host} of {hosts} at {address} by {head} $BOX_HOST; exit {host}"]
    done = command("--profile", "flat-1g", "--hosts", 3, "--", *words)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [
        f"host{h}: {h} of 3 at 10.77.0.{h + 1} by 10.77.0.1 {h}" for h in range(3)
    ]


def test_nothing_is_left_by_a_run_that_ends_or_is_killed(box, left, tmp_path):
    """Killed with -9, too: nothing has a name, and the first process of each host sees the end."""
    before = left()
    assert command("--", "true").returncode == 0
    wait_until(lambda: left() == before)
    for number in (signal.SIGKILL, signal.SIGTERM):
        mark = tmp_path.name + number.name
        words = ["sh", "-c", f": {mark}; touch /tmp/{mark} /dev/shm/{mark}; echo on; sleep 1000"]
        run = subprocess.Popen([*RUN, "--", *words], stdout=subprocess.PIPE, text=True)
        run.stdout.readline()
        assert len(processes_of(mark)) >= 2
        assert left()[1] != before[1]
        run.send_signal(number)
        run.wait()
        run.stdout.close()
        wait_until(lambda mark=mark: not processes_of(mark))
        wait_until(lambda: left() == before)
        assert not list(Path("/tmp").glob(f"{mark}*"))


def test_a_command_that_was_stopped_does_not_hold_up_the_end(box):
    """nsenter stops with it and reaps nobody, and the kernel waited with the end of the host."""
    with box("flat-1g", 2) as cluster:
        run = cluster.start(1, ["sh", "-c", "kill -STOP $$; sleep 1000"])
        os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WNOWAIT)
        end = threading.Thread(target=cluster.close)
        end.start()
        end.join(60)
        held_up = end.is_alive()
        run.kill()
        end.join()
        run.wait()
    assert not held_up


def processes_of(mark):
    """The processes with a word in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def wait_until(holds):
    """Returns when it holds; what never comes is the test's end by the one that runs it."""
    while not holds():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--profile", "flat-1G"], "there is no profile 'flat-1G'; did you mean 'flat-1g'?"),
        (["--hosts", "65"], "--hosts is 65; a box has 1 to 64"),
    ],
)
def test_what_is_wrong_is_one_sentence(words, told):
    done = command(*words, "--", "true")
    assert (done.returncode, done.stderr) == (2, f"cluster: {told}\n")


def test_without_root_there_is_one_sentence(monkeypatch, modules, capsys):
    (run,) = modules("run")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["run.py", "--", "true"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert run.main() == 2
    told = "cluster: a cluster in a box needs root: it makes network namespaces\n"
    assert capsys.readouterr().err == told


def test_without_its_tools_there_is_one_sentence(monkeypatch, modules):
    (made,) = modules("box")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(made, "which", lambda tool: None if tool == "tc" else which(tool) or tool)
    assert made.problem() == "a cluster in a box needs tc, of util-linux and iproute2"


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["flat-1g", "spine-leaf", "fat-tree", "edge-100m", "slow-card"])
def test_no_wire_carries_more_than_its_rate(modules, box, profile):
    """By the cards' counters, which a busy machine cannot push past the rate (what programs have
    read in a while can be more: it waited for them). That no wire carries much less, bench/cluster
    asks on a quiet machine.
    """
    prove, made = modules("prove", "box")
    with box(profile, 4) as cluster:
        wires = made.wires(cluster.profile, 4)
        for flows in prove.patterns(4).values():
            ended, seen = threading.Event(), []
            args = cluster, wires, ended, seen
            watcher = threading.Thread(target=watch, args=args, daemon=True)
            watcher.start()
            try:
                assert min(prove.measured(cluster, flows, 1.0)) > 0
            finally:
                ended.set()
                watcher.join()
            for (began, _, old), (_, until, new) in pairwise(seen):
                for wire, a, b in zip(wires, old, new, strict=True):
                    bucket = max(wire.rate * 250, made.LEAST_BURST)
                    most = wire.rate * 1e6 / 8 * (until - began) + bucket
                    assert max(b[0] - a[0], b[1] - a[1]) <= most, (flows, wire)


def watch(cluster, wires, ended, seen):
    """Reads all counters now and then, each time between two looks at the clock."""
    while True:
        last = ended.wait(0.2)
        began = time.monotonic()
        counts = [cluster.carried(wire) for wire in wires]
        seen.append((began, time.monotonic(), counts))
        if last:
            return
