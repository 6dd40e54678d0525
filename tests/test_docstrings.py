"""The examples in docstrings are run."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import howdah

PACKAGE = Path(howdah.__file__).parent
SHOWN = sorted(p for p in PACKAGE.rglob("*.py") if ">>>" in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_in_docstrings_are_true(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    said = []
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    for example in finder.find(import_module(name)):
        runner.run(example, out=said.append)
    assert runner.tries and not runner.failures, "".join(said)
