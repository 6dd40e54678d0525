"""The script of bench/offload beside DeepSpeed: what it makes of the results of its contestants."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from howdah.base.errors import UserError
from howdah.host.scratch import require_folder

SCRIPT = Path(__file__).parents[2] / "bench/offload/beside_deepspeed.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    spec = spec_from_file_location("beside_deepspeed", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_table_says_who_is_slower_who_differs_and_who_does_not_run(script):
    def ran(seconds, losses):
        return {"seconds": seconds, "losses": losses, "resident": 2_000_000}

    first = {
        "howdah, in memory": ran([1.0, 1.0, 9.0], [4.0, 3.0]),
        "howdah, optimizer=disk": ran([2.0, 2.0, 2.0], [4.0, 3.0]),
        "DeepSpeed, in memory": ran([2.0, 2.0, 2.0], [4.0, 3.00001]),
        "DeepSpeed, ZeRO-Offload": ran([3.0, 3.0, 3.0], [4.0, 3.1]),
        "DeepSpeed, ZeRO-Infinity": {"failed": "no libaio"},
    }
    rows = {row["name"]: row for row in script.summary([first, first])}
    assert rows["howdah, optimizer=disk"]["slowdown"] == 2.0
    assert rows["DeepSpeed, ZeRO-Offload"]["slowdown"] == 1.5
    assert rows["DeepSpeed, in memory"]["equal"] and not rows["DeepSpeed, ZeRO-Offload"]["equal"]
    alone = [
        {"howdah, the update alone": {"seconds": [t]}, "DeepSpeed, CPUAdam alone": one}
        for t, one in ((1.0, {"failed": "no compiler"}), (3.0, {"seconds": [1.0]}))
    ]
    text = script.markdown("", [*rows.values()], script.updates(alone))
    assert text.endswith("- howdah, the update: 2000.0 ms\n- DeepSpeed, CPUAdam: no compiler\n")
    assert "| DeepSpeed, ZeRO-Infinity | does not run here: no libaio |" in text
    assert "| DeepSpeed, ZeRO-Offload | 3.000 | 1.50 | 2 | differ |" in text


def test_every_home_on_the_disk_is_there_past_the_page_cache_as_those_of_deepspeed_are(script):
    disks = {name: words for name, words in script.HOWDAH.items() if "disk" in words}
    past = {words for name, words in disks.items() if name.endswith(script.DIRECT)}
    assert past == {*disks.values()} and len(disks) == 2 * len(past)
    nvme = [name for name, zero in script.DEEPSPEED.items() if script.NVME in zero.values()]
    assert nvme and all(name.endswith(script.DIRECT) for name in nvme)


def test_the_threads_of_a_process_are_told(script):
    """Results named one thread of runs that set all cores."""
    assert script.machine().endswith(", one thread per process.")
    assert script.machine(8).endswith(", 8 threads per process.")


@pytest.mark.slow
def test_every_home_runs_in_a_process_of_its_own_with_equal_losses(script, tmp_path):
    names = [*script.HOWDAH]
    try:
        require_folder(tmp_path, direct=True)
    except UserError:  # this file system does not take O_DIRECT
        names = [name for name in names if not name.endswith(script.DIRECT)]
    rows = script.summary([{n: script.started(n, str(tmp_path), tiny=True) for n in names}])
    assert [row.get("equal") for row in rows] == [True] * len(names), rows
