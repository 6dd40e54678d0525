"""Runs whose members are threads of one process, each with a run folder of its own."""

from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

from howdah.base.signals import StopRequest
from howdah.train.gathering import Gathering, listening
from howdah.train.serving import corpus_of, found_start

SECRET = bytes(range(32))
SERVED = (
    *("layout=server2", "method.grad_clip=0.0", "batch.global_batch=2", "batch.micro_batch=1"),
    *("method.precision=float64", "train.log_every=1", "method.lr.schedule=inverse_sqrt"),
)


class Members(list):
    """Threads of members, and what ended them."""

    def start(self, play, job, corpus, address, **given):
        """Starts a member; returns its stop request."""
        request, given = StopRequest(patient=True), {"secret": SECRET, **given}

        def run():
            try:
                play(job, corpus, request, at=address, **given)
                self.append(None)
            except Exception as error:
                self.append(error)

        self.threads = [*getattr(self, "threads", []), Thread(target=run)]
        self.threads[-1].start()
        return request

    def join(self):
        for thread in self.threads:
            thread.join()
        return [error for error in self if error]


@contextmanager
def gathering(job):
    """The coordinator of a run, in this thread; its address."""
    said = []
    job.folder.mkdir(parents=True, exist_ok=True)
    with listening(("127.0.0.1", 0)) as listener:
        run = Gathering(
            job,
            StopRequest(patient=True),
            said.append,
            listener=listener,
            secret=SECRET,
            corpus=corpus_of(job),
            step=found_start(job, said.append),
        )
        run.said = said
        try:
            yield run, listener.getsockname()
        finally:
            run.close("the test is over")


def elsewhere(job, tmp_path, name):
    """The same job, with another run folder."""
    return replace(job, folder=tmp_path / name)
