"""Long calls of a library: a signal handler that raises is not kept waiting for their end."""

import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

from howdah.base.errors import Unfinished
from howdah.text import building, tokenizer
from howdah.text.encoding import Stream, encode
from howdah.text.interruptible import interruptible
from howdah.text.sources import Data, Source


def test_what_it_returns_and_raises_is_the_callers():
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_a_library_that_panics_is_a_sentence():
    """pyo3's exception is no Exception: a limit of threads was a traceback."""
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(
        Unfinished, match=r"^a library has failed \(no pool\); it may be a limit of"
    ):
        interruptible(partial(raising, panic("no pool")))


def raising(error):
    raise error


def test_other_threads_just_call():
    names = []
    thread = threading.Thread(
        target=lambda: interruptible(lambda: names.append(threading.current_thread().name)),
        name="mine",
    )
    thread.start()
    thread.join()
    assert names == ["mine"]


# The call computes for half a minute, in C: no handler would have its turn before the end.
LEAVE = """
import hashlib, os, signal
from howdah.text.interruptible import interruptible

class Stop(BaseException): pass

def stop(*_):
    raise Stop

def long():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
    print("computed")

signal.signal(signal.SIGALRM, stop)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    interruptible(long)
except Stop:
    print("left")
    os._exit(0)
"""


def test_a_signal_leaves_at_once():
    done = subprocess.run([sys.executable, "-uc", LEAVE], capture_output=True, check=True)
    assert done.stdout == b"left\n"


def threads_of(monkeypatch, owner, name):
    """The threads that call a function from now on."""
    seen, function = [], getattr(owner, name)

    def noted(*arguments, **keywords):
        seen.append(threading.current_thread())
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, noted)
    return seen


def test_tokenizers_learn_and_encode_beside_the_main_thread(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    (tmp_path / "out").mkdir()
    seen = threads_of(monkeypatch, building.tokenizers, "train")
    data = Data((Source(str(tmp_path)),))
    building.build(data, tmp_path / "out", vocab=300, say=str, progress=float)
    assert seen and threading.main_thread() not in seen

    class Spelled:
        """The library's own cannot be watched."""

        def __init__(self):
            self.encode_batch_fast = tokenizer.train(["abcd"], 257).encode_batch_fast

    spelled = Spelled()
    seen = threads_of(monkeypatch, spelled, "encode_batch_fast")
    stream = Stream(tmp_path, "one", dtype=np.dtype(np.uint16), end=9)
    encode([("one", "abcd")], {"one": stream}, spelled, done=float)
    assert seen and threading.main_thread() not in seen


BUILD = """
import signal
from pathlib import Path
from howdah.text.sources import Data, Source
from howdah.text.tokens import prepare

class Stop(BaseException): pass

def stop(*_):
    raise Stop

def say(sentence):
    if sentence.startswith("training a tokenizer"):
        signal.setitimer(signal.ITIMER_REAL, 0.2)

signal.signal(signal.SIGALRM, stop)
try:
    prepare(Data((Source({path!r}),)), vocab=60_000, cache=Path({cache!r}), say=say)
    print("built")
except Stop:
    print("left")
"""


def test_a_builder_that_is_stopped_in_the_library_clears_up(tmp_path):
    """The call that it leaves would take seconds more; the exit of the process does not mind it."""
    words = np.random.default_rng(0).integers(97, 123, (2, 150_000, 8), dtype=np.uint8)
    (tmp_path / "text").mkdir()
    for number, part in enumerate(words):
        spaced = np.concatenate([part, np.full((len(part), 1), 32, np.uint8)], axis=1)
        (tmp_path / "text" / f"{number}.txt").write_bytes(spaced.tobytes())
    code = BUILD.format(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-uc", code], capture_output=True, check=True)
    assert done.stdout == b"left\n"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
