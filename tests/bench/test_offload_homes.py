"""The script of bench/offload beside DeepSpeed: what it makes of the results of its contestants."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_every_home_runs_in_a_process_of_its_own_with_equal_losses(script, tmp_path):
    names = [*script.HOWDAH]
    rows = script.summary([{n: script.started(n, str(tmp_path), tiny=True) for n in names}])
    assert [row.get("equal") for row in rows] == [True] * len(names), rows
