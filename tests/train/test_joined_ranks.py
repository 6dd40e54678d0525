"""A worker of several ranks that joins a run by its address: one member, whose first rank joins."""

import os
import signal
import sys
from contextlib import closing, contextmanager
from subprocess import PIPE, STDOUT, Popen, run
from threading import Thread

import pytest
from small_gatherings import SECRET, SERVED, Members, elsewhere, gathering
from small_runs import tensors, train_on
from test_gathering_commands import commands, until

from howdah.base.errors import Unfinished, UserError
from howdah.base.signals import StopRequest
from howdah.comm.launch import Seat
from howdah.plan.trace_file import FOLDER, read_members
from howdah.server.ledger import read_ledger, twice
from howdah.train.member import serve_there, work_there
from howdah.train.serving import corpus_of

STEPS = 3
RANKS = (*SERVED, "layout=tp2 server1", f"train.steps={STEPS}", "train.save_every=0")
ALONE = 'method.sync={kind = "bsp", workers = 1}'


def join_as_rank(transport, job, address, leaving=-1, early=False):
    """A rank of a worker; what it raised. `leaving`: the rank that has a stop signal, when the
    ranks meet or, `early`, before the first has joined.
    """
    request, stopped = StopRequest(patient=True), transport.rank == leaving
    request.signal = signal.SIGTERM * (stopped and early)

    def meet():
        request.signal = signal.SIGTERM * stopped
        return own

    own = transport.among(range(transport.size))  # which the worker closes
    seat = Seat(own.rank, own.size, own.among.aside)
    given = {"secret": SECRET, "seat": seat, "meet": meet}
    with closing(own):
        try:
            work_there(job, corpus_of(job), request, at=address, **given)
        except (UserError, Unfinished) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def joined(workers, job, tmp_path, *stop):
    """Trains with one worker of two ranks; what each has raised, and what was said."""
    members = Members()
    with gathering(job) as (run, address):
        thread = Thread(target=run.see_through)
        thread.start()
        members.start(serve_there, elsewhere(job, tmp_path, "server"), corpus_of(job), address)
        found = workers.run(join_as_rank, elsewhere(job, tmp_path, "w"), address, *stop, ranks=2)
        # A worker that did not train to the end leaves a place that would be waited for.
        run._request.signal = signal.SIGTERM * bool(stop or any(found))
        thread.join()
    return found, run.said, members.join()


def test_a_worker_of_two_ranks_that_joins_is_local_training(workers, make_job, tmp_path):
    job = make_job("joined", *RANKS, ALONE)
    found, said, ended = joined(workers, job, tmp_path)
    assert (found, ended) == (["", ""], []), said
    assert [line for line in said if "has joined" in line] == [
        "server 0 has joined, of 1",
        "worker 0 has joined: 1 there",
    ]
    train_on(workers, make_job("alone", *RANKS, "layout=single"))
    one, other = (tensors(tmp_path / name, STEPS) for name in ("alone", "joined"))
    assert len(one) > 20
    for name, tensor in one.items():
        if name[0] == "weight":
            assert (other[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name
    # what members did last is with the coordinator
    traces = read_members(job.folder / FOLDER, str(job.layout), workers=1, servers=1)
    assert set(traces) == {"worker-0", "server-0"}
    assert [step.number for step in traces["worker-0"].steps] == [1, 2, 3]
    assert not (tmp_path / "w" / FOLDER).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_at_one_rank_is_heeded_by_all(workers, make_job, tmp_path, rank):
    """They leave before the same step: else one would wait for the other's exchanges."""
    job = make_job("left", *RANKS, 'method.sync={kind = "asp", workers = 1}')
    found, said, _ = joined(workers, job, tmp_path, rank, False)
    assert found == ["", ""]
    assert "worker 0 has joined: 1 there" in said


def test_a_signal_before_the_first_rank_has_joined_ends_all(workers, make_job, tmp_path):
    job = make_job("early", *RANKS, 'method.sync={kind = "asp", workers = 1}')
    found, _, _ = joined(workers, job, tmp_path, 0, True)
    assert found == ["Unfinished: stopped before the run began here"] * 2


def test_what_the_first_rank_is_refused_for_is_told_by_all(workers, make_job, tmp_path):
    job = make_job("refused", *RANKS, ALONE)
    other = make_job("refused", *RANKS, ALONE, "seed=5")
    with gathering(job) as (run, address):
        thread = Thread(target=run.see_through)
        thread.start()
        found = workers.run(join_as_rank, elsewhere(other, tmp_path, "w"), address, ranks=2)
        run._request.signal = signal.SIGTERM
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert found[0].startswith("UserError: the run refuses: the seed of this worker")


# -- commands


@contextmanager
def served(recipe, tmp_path, *changes):
    """A run that a server has joined: what starts commands, its own, and its address."""
    with commands(recipe, tmp_path, *changes) as start:
        train = start("run", "train", "--listen", "127.0.0.1:0")
        port = until(train, "listening at").split("listening at ")[1].split(":")[1]
        at = f"127.0.0.1:{port}"
        start("s", "server", "--join", at)
        until(train, "server 0 has joined")
        yield start, train, at


@pytest.mark.slow
def test_commands_start_their_ranks_and_torchrun_starts_those_of_another(recipe, tmp_path):
    """Two workers of two ranks: `howdah worker` starts its own, the other's are torchrun's."""
    sync = 'method.sync={kind = "asp", workers = 2}'
    changes = (*SERVED, sync, "layout=tp2 server1", "train.steps=20", "train.log_every=1")
    with served(recipe, tmp_path, *changes) as (start, train, at):
        first = start("w0", "worker", "--join", at)
        until(train, "worker 0 has joined")
        env = {**os.environ, "HOWDAH_SECRET_FILE": str(tmp_path / "secret"), "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words = ["-m", "howdah", "worker", str(recipe), *changes, "--join", at]
        whole = [*torchrun, "--standalone", *words, f"folder={tmp_path / 'w1'}"]
        with Popen(whole, env=env, stdout=PIPE, stderr=STDOUT, text=True) as second:
            rest = train.communicate()[0]
            told, _ = second.communicate()
        said, _ = first.communicate()
        assert train.returncode == 0, rest
        assert "held-out at step 20" in rest
        for number, (code, words) in enumerate(
            [(first.returncode, said), (second.returncode, told)]
        ):
            assert code == 0, words
            assert words.count(f"joined as worker {number} of") == 1
            assert words.count("finished step 20") == 1
    (path,) = (tmp_path / "s" / "ledgers").iterdir()
    events = read_ledger(path)
    assert twice(events) == []
    done = [event.update for event in events if event.kind == "push"]
    assert {one.worker for one in done} == {0, 1}
    assert len(done) == 2 * 20 * len({one.key for one in done})


@pytest.mark.slow
def test_a_worker_one_of_whose_ranks_is_killed_ends_and_another_takes_its_place(recipe, tmp_path):
    sync = 'method.sync={kind = "asp", workers = 1}'
    endless = "train.steps=1000000"
    changes = (*SERVED, sync, "layout=tp2 server1", endless, "train.log_every=1")
    with served(recipe, tmp_path, *changes) as (start, train, at):
        first = start("w0", "worker", "--join", at)
        until(train, "step: ")
        os.kill(rank_of(first.pid), signal.SIGKILL)
        assert "another may take its place" in until(train, "worker 0 has left")
        said, _ = first.communicate()
        assert first.returncode == 1 and "was killed by SIGKILL" in said, said
        start("w1", "worker", "--join", at)
        until(train, "worker 0 has joined")
        until(train, "step: ")


def rank_of(pid):
    """The process of a rank below a command: a child of its fork server."""
    (server,) = children(pid)
    return max(children(server))


def children(pid):
    told = run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [*map(int, told.stdout.split())]


@pytest.mark.slow
def test_a_torchrun_of_another_number_of_ranks_is_told(recipe, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    env = {**os.environ, "HOWDAH_SECRET_FILE": str(secret), "RANK": "0", "WORLD_SIZE": "3"}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for role, words in (
        ("worker", "torchrun has started 3 ranks, and layout 'tp2 server1 x2' gives a worker 2"),
        ("server", "servers are started one by one, not by torchrun"),
    ):
        command = [sys.executable, "-m", "howdah", role, str(recipe), *RANKS, ALONE]
        done = run(
            [*command, "--join", "a:1"], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and words in done.stderr, done.stderr
