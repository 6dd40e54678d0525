"""What several test files train with: a small corpus, a small recipe, a cache, four workers.

And what keeps a test from depending on the machine, and on the tests that ran before it: cases and
random numbers that are always the same, one thread, workers that a failure does not take along.
"""

import signal
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from selection import EIGHTHS, eighth_of, is_of_processes, later_cases
from small_runs import RECIPE

from howdah.comm.spawn import Workers
from howdah.config.recipe import Machine, load_run, resolve_run

# No test has a time limit, for machines are noisy; and the same tests run twice try the same cases.
settings.register_profile(
    "howdah", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("howdah")
# hypothesis also draws from the constants of all local modules that are loaded so far: a property's
# cases would be others alone than among the other tests.
providers._get_local_constants = lambda: providers._local_constants


# -- which tests are run -----------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption(
        "--slow-eighth",
        type=int,
        choices=range(EIGHTHS),
        help="run this eighth of the slow tests too",
    )


def pytest_configure(config):
    for number in (signal.SIGHUP, signal.SIGINT):  # ignored under nohup, and behind a shell's `&`:
        if signal.getsignal(number) == signal.SIG_IGN:  # tests of signals would wait for ever
            signal.signal(number, signal.SIG_DFL)
    if config.option.slow_eighth is not None and config.option.markexpr == "not slow":
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        if is_of_processes(item.path, item.fixturenames):
            item.add_marker("processes")
    for item in later_cases(items):
        item.add_marker("slow")
    if config.option.slow_eighth is not None:
        others = [
            item
            for item in items
            if item.get_closest_marker("slow")
            and eighth_of(item.nodeid) != config.option.slow_eighth
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_sessionfinish(session, exitstatus):
    """An eighth may be empty."""
    if session.config.option.slow_eighth is not None and exitstatus == 5:
        session.exitstatus = 0


# -- what they have in common --------------------------------------------------------


@pytest.fixture(autouse=True)
def the_same_numbers():
    """Random tensors are those that the test draws when it runs alone."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """For tiny tensors: with more threads, they mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of eight files that a model of any size can learn something from."""
    folder = tmp_path_factory.mktemp("text")
    for file in range(8):
        lines = (
            f"{n} follows {n - 1}, says file {file}" for n in range(file * 90, file * 100 + 400)
        )
        (folder / f"{file}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Where tokens are kept; one for the whole session, so that they are made once."""
    return tmp_path_factory.mktemp("cache") / "howdah"


@pytest.fixture
def recipe(text, tmp_path):
    """A recipe that trains a model of two layers in a fraction of a second."""
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(text=text))
    return path


@pytest.fixture
def make_job(recipe, cache, tmp_path):
    """Makes a Job of the small recipe in tmp_path/NAME, with overrides as on the command line."""
    machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)

    def make(name, *overrides):
        run = load_run(recipe, [f"folder={tmp_path / name}", *overrides])
        return resolve_run(run, machine)

    return make


class Team:
    """Workers; started when they are first needed, and anew after a test in which one failed."""

    def __init__(self, size):
        self._size, self._workers = size, None

    def run(self, *what, **how):
        self._workers = self._workers or Workers(self._size)
        try:
            return self._workers.run(*what, **how)
        except BaseException:
            self.close(kill=True)  # they may wait for each other
            raise

    def close(self, *, kill=False):
        if self._workers:
            self._workers.close(kill=kill)
        self._workers = None


@pytest.fixture
def ended_workers():
    """Two processes that are killed after the test: for wires with operations that no rank ends. A
    process that frees such a wire waits for them.
    """
    two = Workers(2)
    yield two
    two.close(kill=True)


@pytest.fixture(scope="session")
def workers():
    """Four processes that run functions together."""
    with closing(Team(4)) as four:
        yield four
