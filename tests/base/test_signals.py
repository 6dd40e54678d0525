"""Stop signals: raised once where nothing is lost, noted where a run must save first."""

import signal

import pytest

from howdah.base.signals import SIGNALS, Stopped, blocked, listen, stop_behind


def send(number):
    signal.raise_signal(number)  # to this thread: a test before may have left others


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_is_raised_and_the_others_do_not_break_off_what_it_made_leave(number):
    left = []
    with pytest.raises(Stopped) as stopped, listen() as request:
        try:
            send(number)
        finally:
            for again in SIGNALS:
                send(again)
            left.append("tidied up")
    assert (stopped.value.number, request.signal, left) == (number, number, ["tidied up"])


def test_a_patient_one_notes_the_first_and_leaves_when_it_is_ready():
    with listen(patient=True) as request:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert request.signal == signal.SIGTERM
        with pytest.raises(Stopped):
            request.hurry()
    with listen(patient=True) as request:
        request.hurry()
        with pytest.raises(Stopped):
            send(signal.SIGHUP)


class Named:
    """What a class is made of: Python says that it fails in an error of its own (until 3.12)."""

    def __set_name__(self, owner, name):
        send(signal.SIGQUIT)


def test_a_stop_that_python_wraps_is_one():
    with pytest.raises(BaseException) as told, listen():
        type("Made", (), {"named": Named()})
    assert stop_behind(told.value).number == signal.SIGQUIT
    assert stop_behind(ValueError("a defect")) is None


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with listen():
        assert all(signal.getsignal(n) != b for n, b in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before


class Deaf:
    """Python drops what is raised while this is finalized."""

    def __del__(self):
        send(signal.SIGTERM)
        sum(range(1000))


def test_a_signal_that_python_drops_comes_again():
    """In an import it once was: the run went on to its end."""
    with pytest.raises(Stopped), listen():
        Deaf()
        while True:
            signal.pause()


def test_after_the_last_block_signals_do_nothing():
    """Threads of the process may still take them when the handlers are gone."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with listen(last=True):
            pass
        for number in SIGNALS:
            send(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listen() as request:
            send(signal.SIGHUP)
        assert request.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_blocked_signals_come_when_somebody_listens():
    with listen(patient=True) as outer, blocked():
        send(signal.SIGTERM)
        assert outer.signal == 0
        with pytest.raises(Stopped), listen():
            pytest.fail("the signal has waited, and comes first")
    assert outer.signal == signal.SIGTERM


def test_what_a_block_inside_was_asked_breaks_nothing_off_outside():
    """A run that had saved once said that it was stopped before its first step: the second of two
    signals came when it had left the inner block.
    """
    with listen() as outer:
        with listen(patient=True):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert outer.signal == signal.SIGTERM


def test_what_was_asked_before_a_block_counts_in_it():
    with listen(patient=True):
        send(signal.SIGINT)
        with listen(patient=True) as inner:
            assert inner.signal == signal.SIGINT
        with pytest.raises(Stopped) as stopped, listen():
            pytest.fail("it was asked already")
        assert stopped.value.number == signal.SIGINT
