"""Functions of the user's own, found by their names in files and modules."""

import sys

import pytest

from howdah.base.errors import UserError
from howdah.base.named_code import absolute, load, name_of, name_problems

CODE = """
from dataclasses import dataclass
from math import sqrt as root
import beside
number = 3
def twice(x):
    return 2 * x * beside.one
def fails():
    return 1 // 0
@dataclass
class Counts:
    calls: "int" = 0
    def __call__(self, x):
        self.calls += x
        return self.calls
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("one = 1")
    (tmp_path / "mine_for_test.py").write_text(CODE)
    yield tmp_path / "mine_for_test.py"
    for name in ("beside", "mine_for_test"):
        sys.modules.pop(name, None)


def test_functions_classes_and_what_is_imported_are_loaded(file):
    """Files beside it are found, and the path of modules is as before."""
    before = [*sys.path]
    assert load("key", f"{file}:twice")(4) == 8 and sys.path == before
    counts = load("key", f"{file}:Counts")
    assert (counts(1), counts(2)) == (1, 3)
    assert load("key", f"{file}:root")(9) == 3 and load("key", "math:floor")(1.5) == 1
    for name in ("twice", "Counts", "root", "number"):
        assert [*name_problems("key", f"{file}:{name}")] == []
    assert [*name_problems("key", "math:floor", ranks=8)] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("watch", "key: 'watch' names no function; write FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("a b:c", "names no function"),
        ("mine.py:a.b", "names no function"),
        ("nowhere.py:watch", "key: nowhere.py does not exist"),
        ("no.such.module:watch", "key: No module named 'no'; write FILE.py:FUNCTION or MODULE"),
        ("nosuchmodule:watch", "there is no module nosuchmodule; name a file, such as mine.py:w"),
        ("{file}:twise", "has no function twise at its top; did you mean 'twice'?"),
        ("{folder}.py:twice", "is a folder"),
        ("{bad}:twice", "is no Python: invalid syntax"),
        ("{deep}:twice", "deep.py is no Python: maximum recursion depth exceeded"),
        ("{deeper}:twice", "deeper.py is no Python: nested too deep"),
        ("__main__:nothing_there", "__main__ of this process has no nothing_there"),
    ],
)
def test_a_name_that_is_none_is_one_sentence(file, tmp_path, name, said):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "bad.py").write_text("def twice(:")
    (tmp_path / "deep.py").write_text("a" + ".b" * 100_000)
    (tmp_path / "deeper.py").write_text("-" * 100_000 + "1")
    places = {one: tmp_path / f"{one}.py" for one in ("bad", "deep", "deeper")}
    name = name.format(file=file, folder=tmp_path / "folder", **places)
    (problem,) = name_problems("key", name)
    assert said in problem


def test_main_is_of_one_process():
    (problem,) = name_problems("key", "__main__:pytest", ranks=2)
    assert "is in this process alone, and 2 processes need it" in problem


def test_what_fails_is_told_with_its_line(file):
    file.write_text("x = 1\ny = 1 // 0\n")
    with pytest.raises(UserError, match=r"key: .*:f failed in .*, line 2: ZeroDivisionError"):
        load("key", f"{file}:f")
    file.write_text("f = 3")
    with pytest.raises(UserError, match="is no function, but 3"):
        load("key", f"{file}:f")


def test_names_of_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_of(test_main_is_of_one_process) == f"{__file__}:test_main_is_of_one_process"
    assert name_of("a.py:b") == "a.py:b" and name_of(UserError) == "howdah.base.errors:UserError"
    assert absolute("a.py:b") == f"{tmp_path}/a.py:b" and absolute("a.b:c") == "a.b:c"
    for nameless in (lambda now: None, pytest.raises(UserError).__exit__):
        with pytest.raises(UserError, match="has no name at the top of a module"):
            name_of(nameless)
