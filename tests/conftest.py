"""What several test files train with: a small corpus, a small recipe, a cache, four workers."""

import pytest
import torch
from hypothesis import settings
from small_runs import RECIPE

from howdah.comm.spawn import Workers
from howdah.run import Machine, load_run, resolve_run

# No test has a time limit, for machines are noisy; and the same tests run twice try the same cases.
settings.register_profile("howdah", deadline=None, derandomize=True)
settings.load_profile("howdah")


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


@pytest.fixture(scope="session")
def workers():
    """Four processes that run functions together; started once."""
    with Workers(4) as four:
        yield four
