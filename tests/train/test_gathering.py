"""Servers and workers that join a run by its address, each with a run folder of its own."""

import re
import signal
import socket
from errno import ENOSPC
from os import sched_yield
from pathlib import Path
from threading import Semaphore, Thread
from unittest.mock import patch

import pytest
from small_gatherings import SECRET, SERVED, Members, elsewhere, gathering
from small_runs import tensors, train_on

from howdah.base.errors import Unfinished, UserError
from howdah.base.signals import StopRequest
from howdah.checkpoint.folders import draft_folder, step_folder
from howdah.checkpoint.load import open_checkpoint
from howdah.comm.handshake import CALLER, greet
from howdah.server.clocks import Update
from howdah.server.ledger import Event, read_ledger, twice
from howdah.server.line import Line
from howdah.train import member
from howdah.train.crew import STALLED, Crew, Member, ServerDied
from howdah.train.gathering import member_hello
from howdah.train.member import serve_there, work_there
from howdah.train.parcels import Parcels
from howdah.train.served import Server
from howdah.train.serving import corpus_of, start_of

BSP = 'method.sync={kind = "bsp", workers = 2}'


def gathered(job, tmp_path):
    """Trains with members that have folders of their own; what was said."""
    corpus, members = corpus_of(job), Members()
    with gathering(job) as (run, address):
        for number in range(job.layout.server):
            members.start(serve_there, elsewhere(job, tmp_path, f"s{number}"), corpus, address)
        for number in range(job.method.sync.workers):
            members.start(work_there, elsewhere(job, tmp_path, f"w{number}"), corpus, address)
        assert run.see_through() == 0
    assert members.join() == []
    return run.said


def test_members_with_folders_of_their_own_train_and_go_on_from_a_checkpoint(
    workers, make_job, tmp_path
):
    """Their checkpoints lie with the coordinator, and are those of all-reduce training."""
    alone = ("layout=dp2", "batch.global_batch=4")
    train_on(workers, make_job("never", *SERVED, *alone, "train.steps=4", "train.save_every=1"))
    for steps in (2, 4):
        job = make_job("joined", *SERVED, BSP, f"train.steps={steps}", "train.save_every=1")
        said = gathered(job, tmp_path)
        assert sum("has joined" in line for line in said) == 4
        assert "worker 0 has joined: 1 there, of 2 for bsp" in said
        assert "worker 1 has joined: 2 there" in said
    assert any("going on from step 2" in line for line in said)
    one, other = (tensors(tmp_path / name, 4) for name in ("never", "joined"))
    assert one.keys() == other.keys() and len(one) > 20
    for name, tensor in one.items():
        assert (other[name] - tensor).abs().max() <= 1e-10 * max(tensor.abs().max(), 1e-30), name
    assert not list((tmp_path / "joined").glob("**/*.tmp"))
    assert not list(tmp_path.glob("s?/server-*"))  # what was sent is not kept
    there = open_checkpoint(step_folder(tmp_path / "joined" / "checkpoints", 4))
    assert not there.verify()


def test_a_last_step_that_cannot_be_saved_is_said_and_is_code_1(make_job, tmp_path):
    """It counted as dead servers, or as success."""
    job = make_job("full", *SERVED, BSP, "train.steps=2", "train.save_every=0")
    corpus, members = corpus_of(job), Members()
    with gathering(job) as (run, address):
        draft = draft_folder(job.folder / "checkpoints", 2)
        draft.parent.mkdir(exist_ok=True)
        draft.write_text("in the way")
        for number in range(2):
            members.start(serve_there, elsewhere(job, tmp_path, f"s{number}"), corpus, address)
            members.start(work_there, elsewhere(job, tmp_path, f"w{number}"), corpus, address)
        assert run.see_through() == 1
    assert members.join() == []
    assert run.said[-1] == (
        "step 2 is not saved: File exists; mend that, and the same commands go on"
    )
    assert sum("so that its step is not saved: File exists" in line for line in run.said) == 1


# -- who comes and goes


def test_a_worker_that_leaves_is_replaced_by_one_that_joins_later(make_job, tmp_path):
    """It finishes its step, and says so; the other one does not wait. Under asp its place's steps
    are done by who comes, so that every update of every step is there once.
    """
    job = make_job("elastic", *SERVED, 'method.sync={kind = "asp", workers = 2}', "train.steps=4")
    corpus, members, started, leaving = corpus_of(job), Members(), Semaphore(0), []
    tell = Line.tell

    def tell_and_leave(line, said):
        """On the worker's own thread, so that it cannot have done its other steps."""
        tell(line, said)
        if "loss" in said and not leaving:
            started.acquire()
            leaving.append(said["step"])
            first.signal = signal.SIGTERM

    with patch.object(Line, "tell", tell_and_leave), gathering(job) as (run, address):
        for number in range(2):
            members.start(serve_there, elsewhere(job, tmp_path, f"s{number}"), corpus, address)
        first = members.start(work_there, job, corpus, address)
        started.release()
        ended = run._ended

        def ended_and_another(one, why):
            ended(one, why)
            if one.role == "worker" and len(members.threads) == 3:
                for _ in range(2):
                    members.start(work_there, job, corpus, address)

        run._ended = ended_and_another
        assert run.see_through() == 0
    assert members.join() == [] and leaving == [1]
    assert any("worker 0 has left after step" in line for line in run.said)
    for number in range(2):
        (path,) = (tmp_path / f"s{number}" / "ledgers").iterdir()
        events = read_ledger(path)
        assert twice(events) == []
        pushes = [event.update for event in events if event.kind == "push"]
        assert {(one.worker, one.clock) for one in pushes} == {
            (p, c) for p in (0, 1) for c in range(4)
        }
        assert {one.incarnation for one in pushes if one.worker == 0} == {1, 2}


def refusal(job, hello, address):
    """What a coordinator says to who says this hello."""
    with pytest.raises(UserError) as told, patch.object(member, "member_hello", lambda *_: hello):
        work_there(job, None, StopRequest(patient=True), at=address, secret=SECRET)
    return str(told.value)


def serving_in_a_thread(run):
    """Lets the coordinator see through in a thread, until its request has a signal."""
    thread = Thread(target=run.see_through)
    thread.start()
    return thread


def test_members_that_differ_are_told_in_what(make_job):
    job = make_job("differ", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    hello = member_hello(job, corpus_of(job))
    with gathering(job) as (run, address):
        thread = serving_in_a_thread(run)
        for name in hello:
            told = refusal(job, {**hello, name: "0.0"}, address)
            words = rf"the {name} of this worker is not that of the run.*: start it with the"
            assert re.search(words, told), told
            assert ("(0.0, and here" in told) == (name in ("version of howdah", "run", "layout"))
        crew = run._crew
        crew.arranged, crew.way = True, lambda secret: None
        crew.steps[0] = {"step": job.train.steps}
        assert "all 1 places of workers are taken, or have done" in refusal(job, hello, address)
        run._request.signal = signal.SIGTERM
        thread.join()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("run", "name=other"),
        ("model", "model.layers=1"),
        ("method", "method.lr.peak=0.5"),
        ("layout", "layout=server1"),
        ("comm.server_shares", "comm.server_shares=[2, 1]"),
        ("comm.push_chunk", "comm.push_chunk=262144"),
        ("batch", "data.sequence_length=16"),
        ("number of steps", "train.steps=77"),
        ("train.save_every", "train.save_every=5"),
        ("seed", "seed=77"),
    ],
)
def test_members_are_compared_in_all_that_changes_what_they_do(make_job, name, key):
    job, other = (
        make_job("all", *SERVED, 'method.sync={kind = "asp", workers = 1}', *more)
        for more in ((), (key,))
    )
    corpus = corpus_of(job)
    one, two = (member_hello(each, corpus) for each in (job, other))
    assert [at for at in one if one[at] != two[at]] == [name]


def test_who_has_another_secret_or_sends_what_is_none_hears_nothing_and_holds_nobody_up(
    make_job, monkeypatch
):
    job = make_job("strange", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    corpus = corpus_of(job)
    monkeypatch.setattr(member, "PATIENCE", 0.3)
    with gathering(job) as (run, address):
        thread = serving_in_a_thread(run)
        silent = socket.create_connection(address)  # it never says anything
        with pytest.raises(UserError, match=r"let this worker in for 0\.3 s .*same secret"):
            work_there(job, corpus, StopRequest(patient=True), at=address, secret=bytes(32))
        for said in (b"[]", b"[" * 4000, b'{"role": 3}', b'{"role": "guest"}'):
            with socket.create_connection(address) as sock:
                greet(sock, SECRET, said, role=CALLER)
                told = sock.recv(1 << 12)
                assert b"the hello is none of a server or worker" in told
        assert run._door.strangers > 0
        run._request.signal = signal.SIGTERM
        thread.join()
        silent.close()


REPORT = {"step": 1, "loss": 1.0, "tokens": 1, "seconds": 1.0, "waited": 0.0, "queue": 0}
UNSOUND = [
    ("server", {"foo": 1}),
    ("server", {"done": "x"}),
    ("server", {"done": 7}),
    ("server", {"addresses": 3}),
    ("server", {"addresses": {"0": ["host", "port"]}, "feeds": {}}),
    ("server", {"server": 0, "queue": "many"}),
    ("server", {"server": 0, "clocks": {"0": {"0": 1}}}),
    ("server", {"server": 0, "ages": {"0": 1}}),
    ("server", {"server": 0, "ages": {"0": {"one": 1}}}),
    ("server", {"server": 0, "ages": {"0": {"1": {}}}}),
    ("server", {"said": 3}),
    ("server", {"step": 3}),
    ("server", {"server": 0, "gone": 1}),
    ("server", {"addresses": {"1": ["host", 1]}, "feeds": {}}),
    ("server", {"addresses": {"0": ["host", 1]}, "feeds": {"0": ["host", 1]}}),
    ("server", {"addresses": {}, "feeds": {}}),
    ("worker", {"step": 1, "loss": "low"}),
    ("worker", REPORT | {"step": {"0": 1}}),
    ("worker", REPORT | {"step": 4.0}),
    ("worker", REPORT | {"step": -1}),
    ("worker", REPORT | {"loss": {"0": 1}}),
    ("worker", REPORT | {"tokens": 10**400}),
    ("worker", {"done": 0}),
]


def test_what_no_member_says_ends_its_line_alone_and_is_counted(make_job, tmp_path):
    """It ended the run, with a traceback. And no line of one that has left stays open."""
    job = make_job("unsound", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    corpus = corpus_of(job)
    with gathering(job) as (run, address):
        thread = serving_in_a_thread(run)
        for role, said in UNSOUND:
            inbox, request = member.Inbox(), StopRequest(patient=True)
            line, _ = member.join(
                job, corpus, role, inbox, at=address, secret=SECRET, folder=tmp_path
            )
            if role == "server":
                assert inbox.next(request)["seat"] == 0  # nobody has it
            line.tell(said)
            with pytest.raises(UserError, match=f"the run refuses: a {role} does not say"):
                inbox.next(request)
            line.close()
            while run._lines:  # until the coordinator has heard of its end
                sched_yield()
        assert run._crew.refused == len(UNSOUND)
        run._request.signal = signal.SIGTERM
        thread.join()


def test_nobody_at_the_address_is_told_with_what_to_check(make_job, monkeypatch):
    job = make_job("nobody", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    monkeypatch.setattr(member, "PATIENCE", 0.1)
    with pytest.raises(UserError, match=r"nobody at 127\.0\.0\.1:1 let this server in for 0\.1 s"):
        at = ("127.0.0.1", 1)
        serve_there(job, corpus_of(job), StopRequest(patient=True), at=at, secret=SECRET)


def test_a_server_that_is_lost_ends_the_run_and_all_members_are_told_why(make_job, tmp_path):
    job = make_job("lost", *SERVED, 'method.sync={kind = "asp", workers = 1}', "train.steps=500")
    corpus, members = corpus_of(job), Members()
    with gathering(job) as (run, address):
        requests = [
            members.start(serve_there, elsewhere(job, tmp_path, f"s{n}"), corpus, address)
            for n in range(2)
        ]
        members.start(work_there, job, corpus, address)
        hear = run._crew.hear

        def hear_and_end(one, said):
            hear(one, said)
            if said.get("step") == 2:
                requests[1].signal = signal.SIGTERM

        run._crew.hear = hear_and_end
        lost = r"server [01] has ended .*is lost: go on with the same"  # by who came first
        with pytest.raises(ServerDied, match=lost) as told:
            run.see_through()
        who, _, _ = str(told.value).partition(" (")
        run.close(who)
    errors = members.join()
    assert len(errors) == 2 and all(isinstance(error, Unfinished) for error in errors)
    assert all(who in str(error) for error in errors)


# -- what is reported


def test_lines_are_said_of_those_who_are_there(make_job):
    """A run of three places said nothing while one was free, before it was taken or after."""
    job = make_job("few", *SERVED, 'method.sync={kind = "asp", workers = 3}', "train.steps=9")
    said, rest = [], {"loss": 1.0, "tokens": 1.0, "seconds": 1.0, "waited": 0.0, "queue": 0}
    job.folder.mkdir()
    crew = Crew(job, said.append, step=-1, again="it")

    def join(place):
        one = Member("worker", place, said.append, said.clear)
        crew.members[one.name] = one

    def report(place, step):
        crew.hear(crew.members[f"worker {place}"], {"step": step, **rest})
        return [int(line.split()[1]) for line in said]

    join(0)
    assert report(0, 1) == [1] and report(0, 2) == [1, 2]
    join(1)
    assert report(0, 3) == [1, 2]  # it has told nothing yet
    assert report(1, 1) == [1, 2, 1] and report(0, 4) == [1, 2, 1]
    del crew.members["worker 1"]
    assert report(0, 5) == [1, 2, 1, 5]
    assert report(0, 9) == [1, 2, 1, 5, 9]
    del crew.members["worker 0"]
    join(1)
    assert report(1, 2) == [1, 2, 1, 5, 9, 2]


def test_a_server_that_waits_for_others_is_not_stalled(make_job):
    """It has nothing to say, and was ended after a minute."""
    sync = 'method.sync={kind = "asp", workers = 1, replicas = 1}'
    crew, ended = Crew(make_job("late", *SERVED, sync), print, step=-1, again="it"), []
    for number in range(2):
        end, at = (lambda number=number: ended.append(number)), ("127.0.0.1", number)
        one = Member("server", number, lambda said: None, end)
        crew.members[one.name] = one
        one.heard -= 2 * STALLED
        crew.end_stalled()
        crew.hear(one, {"addresses": {0: at, 1: at}, "feeds": {0: at, 1: at}})
        one.heard -= STALLED * (number == 0)
    crew.end_stalled()
    assert crew.arranged and ended == []
    crew.members["server 1"].heard -= 2 * STALLED
    crew.end_stalled()
    assert ended == [1]


def test_of_two_servers_that_do_not_reach_each_other_the_first_that_says_so_stays(make_job):
    """Each has a replica of the other. Who ended both would have lost the run."""
    sync = 'method.sync={kind = "asp", workers = 1, replicas = 1}'
    crew, ended, told = Crew(make_job("cut", *SERVED, sync), print, step=-1, again="it"), [], []
    for number in range(2):
        end, at = (lambda number=number: ended.append(number)), ("127.0.0.1", number)
        one = Member("server", number, told.append, end)
        crew.members[one.name] = one
        crew.hear(one, {"addresses": {0: at, 1: at}, "feeds": {0: at, 1: at}})
    zero, one = crew.members["server 0"], crew.members["server 1"]
    crew.hear(zero, {"unreached": 0})
    assert ended == [1] and one.told == (
        "stalled",
        "server 1 copies nothing of server 0, or is cut off from it",
    )
    crew.hear(one, {"unreached": 1})
    crew.hear(zero, {"unreached": 0})
    assert ended == [1]
    del crew.members["server 1"]
    told.clear()
    crew.server_died(one, one.told[1])
    assert {"promote": 1} in told and {"moved": [1]} in told
    crew.hear(zero, {"unreached": 0})  # what was said before it was told
    assert ended == [1]


def test_the_ledger_of_each_start_begins_empty(make_job):
    """A run that was ended before it had saved anything, and was started again, wrote behind the
    ledger of the first start, so that each update was there twice.
    """
    job = make_job("again", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    start, event = start_of(job, -1, corpus_of(job)), Event("push", Update(0, 1, 0, 0), 1)
    for _ in range(2):
        with socket.socket() as door:
            server = Server(job, 0, start=start, listener=door, secret=SECRET)
            for _ in range(2):
                server.desk.ledger.append(event)
                server.write_ledger()
            server.host.close()
    assert read_ledger(server.ledger) == [event, event]


def test_what_a_full_disk_has_not_taken_of_a_ledger_is_written_later(make_job):
    """It was lost, and the ledger had a gap that nobody could see."""
    job = make_job("later", *SERVED, 'method.sync={kind = "asp", workers = 1}')
    start = start_of(job, -1, corpus_of(job))
    events = [Event("push", Update(0, 1, clock, 0), clock + 1) for clock in range(3)]
    with socket.socket() as door:
        server = Server(job, 0, start=start, listener=door, secret=SECRET)
        for number, event in enumerate(events):
            server.desk.ledger.append(event)
            if number != 1:
                server.write_ledger()
                continue
            whole = server.ledger.stat().st_size
            full = patch.object(Path, "open", side_effect=OSError(ENOSPC, "full"))
            with full, pytest.raises(OSError, match="full"):
                server.write_ledger()
            with server.ledger.open("ab") as file:
                file.write(b"push 0 1 1")  # and a line that was cut
            assert server.ledger.stat().st_size > whole
        server.host.close()
    assert read_ledger(server.ledger) == events


def test_a_damaged_part_of_a_checkpoint_ends_no_run(tmp_path):
    said, draft = [], tmp_path / "step-00000004.tmp"
    draft.mkdir()
    parcels = Parcels(tmp_path, 1, keep=1, say=said.append)
    (draft / "rank-00000.done").write_bytes(b"{")
    parcels.take("step-00000004.tmp/rank-00000.safetensors")
    parcels.take("step-00000004.tmp/rank-00000.done")
    assert said and said[0].startswith("the checkpoint of step 4 was not saved: ")
    assert parcels.failed and parcels.saved == -1
