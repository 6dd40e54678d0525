"""Stop requests: one rank is asked, all stop after the same step, and nothing is lost by it."""

import os
import signal

import pytest
from small_runs import assert_same_bits, losses, tensors, train_on

from howdah.checkpoint.folders import steps
from howdah.train.loop import train
from howdah.train.stop import SIGNALS, listen


class Asked:
    """A transport whose process gets a signal at its n-th all-gather, or sum of scalars."""

    def __init__(self, transport, *, number, after):
        self._transport, self._number, self._left = transport, number, after

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def all_gather(self, out, x, counts):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return self._transport.all_gather(out, x, counts)


def train_and_ask(transport, job, asked, number):
    """For workers: trains, and the rank `asked` gets the signal after about 10 steps."""
    if transport.rank == asked:
        transport = Asked(transport, number=number, after=20)
    outcome = train(job, transport)
    return outcome.step, outcome.signal, outcome.exit_code


@pytest.mark.parametrize(("asked", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_all_ranks_stop_after_the_same_step(workers, make_job, tmp_path, asked, number):
    job = make_job("a", "layout=dp3", "pace.save_every=0")
    ends = workers.run(train_and_ask, job, asked, number, ranks=3)
    (step,) = {end[0] for end in ends}
    assert 0 < step < 20
    assert ends[asked] == (step, number, 128 + number)
    assert {end[1:] for end in ends} <= {(number, 128 + number), (signal.SIGTERM, 143)}
    assert steps(tmp_path / "a" / "checkpoints") == [step]

    train_on(workers, job, make_job("b", "layout=dp3", "pace.save_every=0"))
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_request_names_its_signal_and_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    for number in SIGNALS:
        with listen() as request:
            assert request.signal == 0
            os.kill(os.getpid(), number)
            assert request.signal == number
    assert [signal.getsignal(number) for number in SIGNALS] == before
