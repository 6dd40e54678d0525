"""`howdah.train_run`: a training from a script and from a notebook."""

import subprocess
import sys
from pathlib import Path

import pytest

import howdah
from howdah.base.errors import Unfinished, UserError
from howdah.base.named_code import load

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
RUNNER = Path(__file__).parents[1] / "run_notebook.py"
SCRIPT = """
import howdah

seen = []

def watch(now):
    now.log(double=2 * now.loss)

class Stops:
    def __call__(self, now):
        if now.step == 2:
            now.stop("enough")

if __name__ == "__main__":
    run = howdah.train_run("small.toml", ["layout=dp2"], callbacks=[watch, Stops])
    print("step", run.checkpoint.step)
"""


@pytest.fixture
def here(recipe, environment, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    for name in ("HOWDAH_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, environment[name])
    return recipe.parent


seen = []


def watch(now):
    seen.append(now.step)


def test_in_this_process_functions_are_given_as_they_are(here):
    seen.clear()
    run = howdah.train_run("small.toml", ["train.steps=3", "train.callbacks=[]"], callbacks=[watch])
    assert run.checkpoint.step == 3
    rows = (here / "runs" / "small" / "metrics.jsonl").read_text()
    assert rows.count('"kind": "train"') == 3
    assert howdah.train_run(here / "runs" / "small").checkpoint.step == 3


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_trains_on_processes_with_functions_of_its_own(here, environment):
    (here / "script.py").write_text(SCRIPT)
    how = {"cwd": here, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "script.py"], check=False, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("step 3\n")
    assert '"double": ' in (here / "runs" / "small" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_the_notebook_runs_cell_by_cell(environment, tmp_path):
    command = [sys.executable, str(RUNNER), str(NOTEBOOK)]
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert "stopped by a callback; to train on: howdah train" in done.stdout
    own = (tmp_path / "runs" / "two" / "metrics.jsonl").read_text()
    assert '"perplexity": ' in own


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"callbacks": [lambda now: None]}, "has no name at the top of a module"),
        ({"callbacks": ["nowhere.py:watch"]}, "nowhere.py does not exist; write FILE.py"),
        ({"loss": "mine:loss"}, "method.loss: there is no module mine"),
        ({"callbacks": "watch.py:watch"}, "callbacks must be a list, even of one"),
        ({"callbacks": print}, "callbacks must be a list, even of one"),
        ({"overrides": "layout=dp2"}, "overrides must be a list, even of one"),
        ({"callbacks": ["__main__:x"], "overrides": ["layout=dp2"]}, "and 2 processes need it"),
        ({"overrides": ["train.stepz=3"]}, "unknown key 'train.stepz'"),
        ({"overrides": ["train.callbacks=3"]}, "train.callbacks is 3; it must be a list"),
        (
            {
                "callbacks": ["math:floor"],
                "overrides": [
                    'method.sync={kind = "asp", workers = 2}',
                    *("layout=single server1", "method.grad_clip=0"),
                ],
            },
            "under method.sync workers have steps of their own",
        ),
    ],
)
def test_what_keeps_a_run_from_starting_is_raised(here, how, said):
    with pytest.raises(UserError, match=said):
        howdah.train_run("small.toml", **how)
    assert not (here / "runs").exists()


def test_a_file_that_trains_when_it_is_loaded_is_one_sentence(here):
    """Each rank would start a run, whose ranks would load the file."""
    name, call = "mine_that_trains", 'howdah.train_run("small.toml", ["folder=other"])'
    code = f"import howdah\ndef watch(now): pass\n{call}\n"
    (here / f"{name}.py").write_text(code)
    with pytest.raises(UserError, match="train_run is called by a file that a rank loads"):
        load("train.callbacks", str(here / f"{name}.py:watch"))
    assert not (here / "other").exists()


@pytest.mark.slow
def test_a_run_that_does_not_end_is_raised(here, capfd):
    (here / "mine_that_fails.py").write_text("def watch(now):\n    now.log(x=1 / 0)\n")
    with pytest.raises((Unfinished, UserError)) as caught:
        howdah.train_run("small.toml", ["layout=dp2"], callbacks=["mine_that_fails.py:watch"])
    told = str(caught.value) + capfd.readouterr().err
    assert "mine_that_fails.py:watch at step 1 failed in" in told and "line 2: ZeroDivision" in told
    assert "Traceback" not in told


def test_an_average_is_exported_or_refused(howdah, refused, here):
    assert howdah("train", "small.toml", "train.steps=1", "method.optimizer.average=0.9")[0] == 0
    assert howdah("export", "runs/small", "--to", "x", "--average")[0] == 0
    assert (here / "x" / "model.safetensors").is_file()
    assert howdah("train", "small.toml", "train.steps=1", "folder=other")[0] == 0
    told = refused("export", "other", "--to", "y", "--average")
    assert "has no average of the weights; train with method.optimizer.average=0.999" in told
