"""What an addition costs: a made-up schedule and a made-up optimizer, in a copy of the package.

CONTRIBUTING.md says how many files each kind of addition touches. Here both are made, counted, and
proved by `howdah verify` on a layout that uses them.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import howdah

ROOT = Path(__file__).parent.parent
PACKAGE = Path(howdah.__file__).parent


LAST_FIRST = '''"""A made-up schedule."""

from howdah.plan.schedule.actions import Action, Kind, Schedule


def last_first(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards from the last micro-batch to the first."""
    programs = tuple(
        (
            *(Action(Kind.FORWARD, rank, micro) for micro in range(micros)),
            *(Action(Kind.BACKWARD, rank, micro) for micro in reversed(range(micros))),
        )
        for rank in range(ranks)
    )
    return Schedule("last-first", ranks, micros, 1, programs)
'''

SCHEDULE = {
    "plan/schedule/registry.py": [
        (
            "from howdah.plan.schedule.one_f_one_b import",
            "from howdah.plan.schedule.last_first import last_first\n"
            "from howdah.plan.schedule.one_f_one_b import",
        ),
        ("SCHEDULES = {\n", 'SCHEDULES = {\n    "last-first": Family(last_first, "made up"),\n'),
    ],
}

OPTIMIZER = {
    "plan/method.py": [
        ("STATES = {\n", 'STATES = {\n    "adamax": ("exp_avg", "exp_inf"),\n'),
        ('name: Literal["adamw"', 'name: Literal["adamax", "adamw"'),
    ],
    "optim/optimizers.py": [
        (
            '    if settings.name == "adamw":\n',
            '    if settings.name == "adamax":\n'
            "        return torch.optim.Adamax(groups, betas=(b1, b2), eps=settings.epsilon)\n"
            '    if settings.name == "adamw":\n',
        ),
    ],
    "verify/reference.py": [
        (
            '    if settings.name == "adamw":\n',
            '    if settings.name == "adamax":\n'
            "        b1, b2 = settings.betas\n"
            "        return torch.optim.Adamax(groups, betas=(b1, b2), eps=settings.epsilon)\n"
            '    if settings.name == "adamw":\n',
        ),
    ],
}


def edit(package, edits):
    for name, pairs in edits.items():
        text = (package / name).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, f"{name}: {old!r}"
            text = text.replace(old, new)
        (package / name).write_text(text)


def promised(kind):
    """The number of files of howdah/ that CONTRIBUTING.md names for an addition."""
    row = re.search(rf"^\| {kind} \| (\d+) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return int(row[1])


def changed(package):
    """The files that differ from the package's, or are new."""
    return [
        path
        for path in package.rglob("*.py")
        if not (PACKAGE / path.relative_to(package)).exists()
        or path.read_bytes() != (PACKAGE / path.relative_to(package)).read_bytes()
    ]


@pytest.mark.slow
def test_a_schedule_and_an_optimizer_touch_as_many_files_as_promised(tmp_path):
    package = tmp_path / "howdah"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "plan" / "schedule" / "last_first.py").write_text(LAST_FIRST)
    edit(package, SCHEDULE)
    assert len(changed(package)) == promised("a pipeline schedule") == 2
    edit(package, OPTIMIZER)
    assert len(changed(package)) - 2 == promised("an optimizer") == 3
    (tmp_path / "made_up.toml").write_text((ROOT / "recipes" / "laptop.toml").read_text())
    words = ["made_up.toml", "layout=pp2 last-first x3", "method.optimizer.name=adamax"]
    words += ["batch.micro_batch=1", "batch.global_batch=3", "--steps", "2"]
    command = [sys.executable, "-m", "howdah", "verify", *words]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith("pp2 last-first x3 against one device")
    assert lines[-1].startswith("equal: bytes sent and held")
