"""Runs the scripts of examples/ in this process, and what they start on workers of the session."""

import sys
from contextlib import chdir, contextmanager
from importlib import util
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]


def load(path):
    """The module of a script, such as examples/gradients.py; its `main` is not called."""
    name = f"example_{Path(path).stem}"
    if name not in sys.modules:
        spec = util.spec_from_file_location(name, ROOT / path)
        module = sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def called(transport, path, name, arguments, folder="."):
    """For workers: calls a function of a script, which they could not import by its name, in the
    folder in which the script runs.
    """
    with chdir(folder):
        return getattr(load(path), name)(transport, *arguments)


def run_example(path, *words, workers):
    """Calls main(*words) of a script; its Workers are `workers`."""
    script = load(path)

    class Lent:
        def run(self, function, *arguments, ranks):
            call = path, function.__name__, arguments, Path.cwd()
            return workers.run(called, *call, ranks=ranks)

    @contextmanager
    def lent(size, *, threads=1):
        yield Lent()

    with patch.object(script, "Workers", lent, create=True):
        script.main(*words)
