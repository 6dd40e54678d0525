"""Launching: whatever ends a run on this machine, its end is told once, and nothing is left."""

import os
import signal
from pathlib import Path
from time import sleep

import pytest
import torch.distributed as dist

from howdah.base.errors import Unfinished, UserError
from howdah.base.signals import Stopped, listen
from howdah.comm import launch as launching
from howdah.comm.counters import Counters
from howdah.comm.fork_server import ForkServer
from howdah.comm.group import Group
from howdah.comm.launch import Ending, Failure, Terms, explain, launch
from howdah.comm.rendezvous import choose
from howdah.comm.transport import PeerLost


def run(function, *arguments, ranks=2, restarts=0, said=None):
    terms = Terms(ranks=ranks, save_seconds=60, restarts=restarts)
    return launch(function, arguments, terms, say=(said if said is not None else []).append)


def meet(seat, folder):
    """For ranks: adds up their numbers, and writes down the sum."""
    transport = choose(seat.store, rank=seat.rank, size=seat.size, seconds=60)
    group = Group(transport, axis="dp", counters=Counters())
    (total,) = group.sum_scalars([seat.rank + 1])
    (folder / f"{seat.rank} of {seat.size}").write_text(str(total))
    transport.close()
    return 0


def test_ranks_meet(tmp_path):
    assert run(meet, tmp_path, ranks=3) == Ending(0)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"{rank} of 3": "6.0" for rank in range(3)
    }


def wait(transport):
    """For ranks: waits for all others, who will not come."""
    Group(transport, axis="dp", counters=Counters()).barrier()
    return 0


ENDS = {
    "mistake": lambda: UserError("the wheel: is missing"),
    "defect": lambda: ValueError("a defect"),
    "limit": lambda: Unfinished("no room"),
    "memory": MemoryError,
    "disk": lambda: OSError(28, "No space left on device", "there"),
    "early": lambda: Stopped(signal.SIGINT),
}


def end(seat, how):
    """For ranks: rank 1 ends in some way, and rank 0 waits for it."""
    transport = choose(seat.store, rank=seat.rank, size=seat.size, seconds=60)
    if seat.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "stopped":
            return 128 + signal.SIGUSR1
        if how in {"exit", "leave"}:
            os._exit(7 if how == "exit" else 0)
        raise ENDS[how]()
    return wait(transport)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("how", "code", "kind", "why"),
    [
        ("killed", 1, "killed", ") was killed by SIGKILL; the system does so when memory runs out"),
        pytest.param(
            *("frozen", 1, "killed", ") was stopped, and all were ended"), marks=pytest.mark.slow
        ),
        ("exit", 1, "defect", "rank 1 left with exit code 7"),
        ("leave", 1, "defect", "rank 1 left with exit code 0"),
        ("disk", 1, "limit", "No space left on device: there"),
        ("early", 130, "early", "stopped before the first step: there is nothing to save"),
    ],
)
def test_what_ends_a_run_is_told_and_not_what_follows_from_it(how, code, kind, why):
    """Rank 0 loses its peer every time; that alone would help nobody."""
    ending = run(end, how)
    assert (ending.code, ending.kind) == (code, kind)
    assert ending.why.endswith(why)
    if how == "killed":
        assert ending.why.startswith("rank 1 (process ")


def leave(seat):
    """For ranks: a user's code ends them all."""
    os._exit(0)


def test_ranks_that_leave_before_their_work_is_done_have_failed():
    """The exit code was 0, and nobody was told that steps are missing."""
    assert run(leave, ranks=1) == Ending(1, "rank 0 left with exit code 0", "defect")


def fail_until(seat, folder, times):
    """For ranks: the first starts fail."""
    (folder / f"{seat.rank} {len(list(folder.iterdir()))}").touch()
    if seat.rank == 0 and len([path for path in folder.iterdir() if path.name[0] == "0"]) <= times:
        raise Unfinished("not yet")
    return 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("restarts", "code"), [(1, 1), (3, 0)])
def test_a_run_that_failed_is_started_again(tmp_path, restarts, code):
    said = []
    ending = run(fail_until, tmp_path, 2, ranks=1, restarts=restarts, said=said)
    assert ending.code == code
    assert said == [
        f"not yet; starting it again, {start} of {restarts} times"
        for start in range(1, min(restarts, 2) + 1)
    ]


@pytest.mark.slow
def test_a_stop_is_not_and_neither_is_a_mistake():
    said = []
    assert run(end, "stopped", restarts=3, said=said) == Ending(138, kind="stopped")
    with pytest.raises(UserError, match="the wheel: is missing"):
        run(end, "mistake", restarts=3, said=said)
    assert said == []


def ask_launcher(seat, number):
    """For ranks: rank 0 sends the launcher a signal; all wait until it reaches them."""
    with listen(patient=True) as request:
        if seat.rank == 0:
            (launcher,) = parents(parents([os.getpid()]))
            os.kill(launcher, number)
        while not request.signal:
            sleep(0.01)  # a pause would miss a signal that comes before it
        return 128 + request.signal


class Frozen(ForkServer):
    """A server that is stopped before it has forked anybody."""

    def __init__(self, **how):
        super().__init__(**how)
        os.kill(self.pid, signal.SIGSTOP)


class Asking(Frozen):
    """One that has its launcher asked to end while this waits for it."""

    def fork(self, *what):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().fork(*what)


def test_a_launcher_hears_signals_while_its_server_is_stopped(monkeypatch):
    monkeypatch.setattr(launching, "ForkServer", Asking)
    with pytest.raises(Stopped), listen(patient=True):
        run(meet, None)


def test_a_server_that_is_stopped_while_it_loads_is_told_as_killed(monkeypatch):
    """The launcher waited for it for ever."""
    monkeypatch.setattr(launching, "ForkServer", Frozen)
    assert run(meet, None) == Ending(1, "the process that started the ranks was killed", "killed")


class Interrupted(ForkServer):
    """A server during whose end the launcher is asked to stop."""

    def close(self, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        super().close(**how)
        assert self._process.returncode is not None


@pytest.mark.slow
def test_a_signal_while_all_ends_breaks_nothing_off(tmp_path, monkeypatch):
    """It was raised in the middle of ending the family, whose processes stayed."""
    monkeypatch.setattr(launching, "ForkServer", Interrupted)
    with listen() as request:
        assert run(meet, tmp_path) == Ending(0)
        request.patient = True


def parents(pids):
    return [int(open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[1]) for p in pids]


def test_a_signal_to_the_launcher_reaches_all_ranks():
    assert run(ask_launcher, signal.SIGHUP, ranks=3) == Ending(128 + signal.SIGHUP, kind="stopped")


def leave_family(seat):
    """For ranks: the server is killed, as the system does when memory runs out."""
    with listen(patient=True) as request:
        if seat.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        while not request.signal:
            sleep(0.01)
        return 128 + request.signal


@pytest.mark.slow
def test_when_the_fork_server_is_killed_ranks_save_and_leave():
    ending = run(leave_family)
    assert (ending.code, ending.why) == (1, "the process that started the ranks was killed")


def die_early(seat):
    """For ranks: the server is killed before anything has begun."""
    if seat.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    with listen():
        signal.pause()
    return 0


@pytest.mark.slow
def test_when_it_is_killed_before_the_first_step_it_is_no_stop_and_may_be_tried_again():
    said = []
    assert run(die_early, restarts=1, said=said).kind == "killed"
    assert said == [
        "the process that started the ranks was killed; starting it again, 1 of 1 times"
    ]


def test_what_an_error_is():
    kinds = {name: explain(make()).kind for name, make in ENDS.items()}
    assert kinds == {
        "mistake": "mistake",
        "defect": "defect",
        "limit": "limit",
        "memory": "limit",
        "disk": "limit",
        "early": "early",
    }
    assert explain(PeerLost("rank 1 left")).kind == "lost"
    assert explain(ConnectionResetError(104, "Connection reset by peer")).kind == "lost"
    assert explain(dist.DistNetworkError("the store has ended")) == Failure(
        "lost", "the ranks cannot meet: the store has ended"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            "enough memory: [",
        ),
        ("std::bad_alloc", "enough memory: std::bad_alloc"),
        ("could not create a primitive", "enough memory: could not"),
        ("can't start new thread", "no thread can be started; start fewer ranks, or raise the lim"),
    ],
)
def test_what_torch_and_python_say_of_limits_is_a_sentence(said, told):
    failure = explain(RuntimeError(said))
    assert (failure.kind, told in failure.told) == ("limit", True)


def test_nothing_is_left_of_a_launch(tmp_path):
    """No process and no descriptor of this one."""
    held, children = set(os.listdir("/proc/self/fd")), children_of(os.getpid())
    run(meet, tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= len(held)
    assert children_of(os.getpid()) == children


def children_of(process):
    """The live children of a process, and those that nobody has waited for."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}
