"""A worker whose link to one server is cut for good, while all others are sound."""

import socket
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread

import pytest
from small_gatherings import SERVED, Members, elsewhere, gathering

from howdah.base.errors import Unfinished
from howdah.server.ledger import read_ledger, twice
from howdah.server.outbox import PULSE
from howdah.server.way import ServerGone, Way
from howdah.train import member
from howdah.train.member import serve_there, work_there
from howdah.train.serving import corpus_of


class Relay:
    """A link to a server: what arrives here is passed on, both ways, until it is cut for good. Then
    nothing more comes, and nobody is told.
    """

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address, self.target = self._listener.getsockname(), None
        self._cut, self._ends = Event(), []
        Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self.target)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, to):
        with suppress(OSError):
            while (some := source.recv(1 << 16)) and not self._cut.is_set():
                to.sendall(some)

    def cut(self):
        self._cut.set()
        self._listener.close()

    def close(self):
        self.cut()
        for end in self._ends:
            end.close()


@pytest.mark.slow
def test_a_worker_whose_link_to_a_server_is_cut_for_good_leaves_and_the_run_goes_on(
    make_job, tmp_path, monkeypatch
):
    """It ended the run, whose servers all lived. Another does the rest of its steps."""
    monkeypatch.setattr(member, "Way", partial(Way, silence=3 * PULSE, patience=2.0))
    job = make_job("cut", *SERVED, 'method.sync={kind = "asp", workers = 2}', "train.steps=6")
    corpus, members, relay = corpus_of(job), Members(), Relay()
    with closing(relay), gathering(job) as (run, address):
        way, hear, say = run._crew.way, run._crew.hear, run._say

        def way_by_relay(secret, process):
            found = way(secret, process)
            if process != 1:
                return found
            relay.target = found.addresses[1]
            return replace(found, addresses=[found.addresses[0], relay.address])

        def hear_and_cut(one, said):
            hear(one, said)
            if one.process == 1 and said.get("step") == 2:
                relay.cut()

        def say_and_start(line):
            say(line)
            if "has left after step" in line:
                members.start(work_there, job, corpus, address)

        run._crew.way, run._crew.hear, run._say = way_by_relay, hear_and_cut, say_and_start
        for number in range(2):
            members.start(serve_there, elsewhere(job, tmp_path, f"s{number}"), corpus, address)
        for _ in range(2):
            members.start(work_there, job, corpus, address)
        assert run.see_through() == 0
    (error,) = members.join()
    assert isinstance(error, ServerGone | Unfinished)
    assert "server 1 at 127.0.0.1:" in str(error) and "did not answer for 2 s" in str(error)
    (line,) = [line for line in run.said if "has left after step" in line]
    assert "did not answer for 2 s" in line and line.endswith("another may take its place")
    ledgers = [*tmp_path.glob("s?/ledgers/server-*-from-0")]
    assert len(ledgers) == 2
    for path in ledgers:
        events = read_ledger(path)
        pushes = [event.update for event in events if event.kind == "push"]
        keys = {update.key for update in pushes}
        assert twice(events) == [] and len(pushes) == 2 * 6 * len(keys)
