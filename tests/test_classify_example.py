"""The example of docs/tasks/classification.md: BERT tells modules of the standard library apart, by
data parallelism whose sums are a ring, under torchrun.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from run_examples import ROOT, load
from small_runs import metrics

from howdah.cli.main import main as howdah_main

RECIPE = ROOT / "examples" / "classify.toml"


def make_rows(folder):
    script = load("examples/labelled_rows.py")
    script.main(folder / "rows")
    return script


def test_rows_are_balanced_and_none_is_in_both_files(tmp_path):
    script = make_rows(tmp_path)
    kinds = {}
    for name in ("train", "held_out"):
        lines = (tmp_path / "rows" / f"{name}.jsonl").read_text().splitlines()
        kinds[name] = [json.loads(line) for line in lines]
    texts = [{row["text"] for row in rows} for rows in kinds.values()]
    assert not texts[0] & texts[1] and all(texts[0])
    counts = [Counter(row["label"] for row in rows) for rows in kinds.values()]
    assert set(counts[0]) == set(counts[1]) == set(script.MODULES)
    assert max((counts[0] + counts[1]).values()) <= script.MOST


def torchrun(folder, *words, ranks):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", ranks, "-m", "howdah", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_two_ranks_of_torchrun_sum_gradients_in_a_ring(tmp_path, monkeypatch, capsys):
    """Rank and world are torchrun's; what the trace has is the ring, and its bytes are counted."""
    make_rows(tmp_path)
    few = ["train.steps=12", "train.evaluate_every=6"]
    run = torchrun(tmp_path, "train", RECIPE, *few, ranks=2)
    assert run.returncode == 0, run.stderr
    assert "dp2 x1" in run.stdout and "algorithms  all_reduce ring" in run.stdout
    assert "sent " in run.stdout and ": equal" in run.stdout
    assert set(metrics(tmp_path / "runs/classify", "held_out_all")) == {6, 12}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["howdah", "trace", "runs/classify"])
    with pytest.raises(SystemExit) as ended:
        howdah_main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "algorithms  all_reduce ring" in said
    assert "dp          all_reduce" in said
