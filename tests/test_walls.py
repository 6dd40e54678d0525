"""Each wall of test_floors.py can fail: made-up houses in which it does."""

from collections import Counter
from pathlib import Path

import pytest
from test_floors import (
    CHECKS,
    FLOORS,
    HOUSE_LINES,
    environment_is_read_at_the_top,
    files_are_one_idea,
    files_open_with_a_docstring,
    floors_open_with_a_docstring_alone,
    functions_are_one_story,
    imports_go_down,
    light_floors_name_no_torch,
    light_modules,
    lines_of_floors,
    load,
    no_global_is_changed,
    nothing_is_pickled,
    problems,
    too_many_lines,
    unknown_places,
)


def house(tmp_path: Path, path: str, body: str, *, docstring: str = '"""Made up."""\n') -> Path:
    """A made-up package with one sound file, and `body` in the file `path`."""
    root = tmp_path / "howdah"
    for place, text in (("plan/boxes.py", '"""Sound."""\n'), (path, docstring + body)):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text, encoding="utf-8")
    return root


BROKEN = [
    (imports_go_down, "plan/a.py", "import howdah.sim.cost", "plan/a.py:2 imports howdah.sim.cost"),
    (imports_go_down, "plan/a.py", "from howdah import sim", "sim lies above plan"),
    (imports_go_down, "plan/a.py", "from ..comm.group import Group", "howdah.comm.group.Group"),
    (imports_go_down, "plan/a.py", "from .. import comm", "comm lies above plan"),
    (imports_go_down, "plan/a.py", "def f():\n    import howdah.cli.main", "plan/a.py:3"),
    (imports_go_down, "train/a.py", "import howdah.config.recipe", "config lies above train"),
    (imports_go_down, "config/a.py", "from howdah.cli import main", "cli lies above config"),
    (imports_go_down, "train/a.py", "from howdah import Trainer", "name the floor"),
    (
        imports_go_down,
        "plan/a.py",
        "import importlib\nimportlib.import_module('howdah.model.loss')",
        "plan/a.py:3 imports howdah.model.loss",
    ),
    (light_floors_name_no_torch, "sim/a.py", "def f():\n    import torch.nn", "sim/a.py:3"),
    (light_floors_name_no_torch, "plan/a.py", "from safetensors.torch import save", "plan/a.py:2"),
    (nothing_is_pickled, "comm/a.py", "import pickle", "comm/a.py:2 imports pickle"),
    (nothing_is_pickled, "comm/a.py", "from torch import load", "imports torch.load"),
    (nothing_is_pickled, "comm/a.py", "import torch\ntorch.load('x')", "uses torch.load"),
    (nothing_is_pickled, "comm/a.py", "read('x', weights_only=True)", "passes weights_only"),
    (no_global_is_changed, "comm/a.py", "def f():\n    global x\n    x = 1", "comm/a.py:3"),
    (no_global_is_changed, "comm/a.py", "def f():\n    globals()['x'] = 1", "calls globals()"),
    (no_global_is_changed, "comm/a.py", "seen = {}\ndef f():\n    seen['x'] = 1", "changes seen"),
    (no_global_is_changed, "comm/a.py", "seen = []\ndef f():\n    seen.append(1)", "changes seen"),
    (no_global_is_changed, "comm/a.py", "seen = {}\ndef f():\n    del seen['x']", "changes seen"),
    (
        environment_is_read_at_the_top,
        "config/a.py",
        "import os\nos.environ['X']",
        "reads os.environ",
    ),
    (environment_is_read_at_the_top, "config/a.py", "import os\nos.getenv('X')", "reads os.getenv"),
    (environment_is_read_at_the_top, "config/a.py", "from os import environ", "imports os.environ"),
    (environment_is_read_at_the_top, "config/a.py", "Path.home()", "reads Path.home"),
    (environment_is_read_at_the_top, "config/a.py", "p.expanduser()", "reads p.expanduser"),
    (files_are_one_idea, "plan/a.py", "x = 1\n" * 400, "plan/a.py has 401 lines"),
    (functions_are_one_story, "plan/a.py", "def f():\n" + "    x = 1\n" * 70, "f has 71 lines"),
    (floors_open_with_a_docstring_alone, "plan/__init__.py", "import math", "plan/__init__.py"),
]


@pytest.mark.parametrize(("check", "path", "body", "sentence"), BROKEN)
def test_each_wall_can_fail(tmp_path, check, path, body, sentence):
    found = problems(house(tmp_path, path, body), check)
    assert len(found) == 1
    assert sentence in found[0]


def test_a_missing_docstring_is_found(tmp_path):
    root = house(tmp_path, "plan/a.py", "x = 1\n", docstring="")
    assert problems(root, files_open_with_a_docstring) == ["plan/a.py does not say what it is for"]


SOUND = [
    ("sim/a.py", "from howdah.plan.boxes import Box\nfrom ..plan import boxes\nfrom . import b"),
    ("comm/a.py", "import torch\nimport howdah.plan.boxes\nfrom howdah import __version__"),
    ("cli/main.py", "import os\nos.environ['X']\nimport howdah.config.recipe"),
    ("comm/settings.py", "import os\nos.environ.get('X')"),
    ("__init__.py", "def __getattr__(name):\n    from howdah.train import loop\n    return loop"),
    ("plan/a.py", "seen = {}\ndef f(seen):\n    seen['x'] = 1\ndef g():\n    return seen['x']"),
]


@pytest.mark.parametrize(("path", "body"), SOUND)
def test_what_is_allowed_is_not_refused(tmp_path, path, body):
    root = house(tmp_path, path, body)
    assert [sentence for check in CHECKS for sentence in problems(root, check)] == []


def test_unknown_folders_and_files_are_found(tmp_path):
    root = house(tmp_path, "helpers/a.py", "")
    (root / "tools.py").write_text("")
    assert unknown_places(root) == [
        "helpers is no floor and no file of the house",
        "tools.py is no floor and no file of the house",
    ]


@pytest.mark.parametrize("path", ["plan/a.py", "cli/a.py", "__init__.py"])
def test_torch_is_found_however_it_is_loaded(tmp_path, path):
    """A stand-in for torch beside the made-up package keeps this quick."""
    (tmp_path / "torch.py").write_text("")
    root = house(tmp_path, path, "import helper\n")
    (tmp_path / "helper.py").write_text("import torch\n")
    (root / "__init__.py").touch()
    assert "loads torch" in load(root, light_modules(root))


def test_a_floor_that_grows_too_much_is_found(tmp_path):
    root = house(tmp_path, "optim/a.py", "x = 1\n" * FLOORS["optim"])
    most = FLOORS["optim"]
    assert too_many_lines(lines_of_floors(root)) == [
        f"optim has {most + 1:,} lines; it may have {most:,}"
    ]
    full = Counter(FLOORS)
    most = f"{HOUSE_LINES:,}"
    assert too_many_lines(full) == [f"the house has {full.total():,} lines; it may have {most}"]
