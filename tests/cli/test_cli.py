"""The command line from outside: what it prints, how it exits, and what it leaves behind.

Starting Python with torch takes seconds, so mistakes are made in this process, and only what is
about processes (launchers, signals, a rank that dies) starts some.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_runs import assert_same_bits, forget, losses, metrics, opened, tensors, train_on

from howdah.base.errors import UserError
from howdah.checkpoint.folders import steps
from howdah.cli import main as cli
from howdah.cli import train as cli_train
from howdah.train import loop
from howdah.train.run_folder import lock

HOWDAH = [sys.executable, "-m", "howdah"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def environment(cache):
    """That of a person's shell: no launcher in it, and the tests' token cache."""
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {**plain, "HOWDAH_CACHE": str(cache.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def howdah(environment, monkeypatch, capsys):
    """Runs a command in this process: (exit code, standard output, standard error)."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOWDAH_CACHE", environment["HOWDAH_CACHE"])

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        return (cli.run(), *capsys.readouterr())

    return run


@pytest.fixture
def refused(howdah):
    """Runs a command that must fail as a user's mistake; returns its one sentence."""

    def run(*words):
        code, _, error = howdah(*words)
        assert code == 2, error
        assert error.startswith("howdah: ") and error.count("\n") == 1, error
        assert "Traceback" not in error
        return error.removeprefix("howdah: ").strip()

    return run


@pytest.fixture
def trained(workers, make_job, recipe, howdah, tmp_path):
    """A run folder with checkpoints of steps 10 and 20."""
    code, _, error = howdah("train", recipe, f"folder={tmp_path / 'a'}")
    assert code == 0, error
    return tmp_path / "a"


def everything(folder):
    """Every file below a folder with its bytes."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# -- mistakes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.stepz=3"], "unknown key 'train.stepz'; did you mean 'steps'?"),
        (["train.steps=soon"], "train.steps is 'soon'; it must be a whole number"),
        (["layout=dp2 dq2"], "layout 'dp2 dq2': unknown word 'dq2'"),
        (["layout=single dp2"], "layout 'single dp2': 'dp2' says dp a second time; say it once"),
        (["batch.micro_batch=2", "layout=x5"], "batch.global_batch 6 on 1 replicas with"),
        (["data.sources=['nowhere/at/all']"], "data.sources: nowhere/at/all does not exist; "),
        (["batch.global_batch=100000"], "data.sources: there are "),
        (["data.tokenizer=nowhere"], "data.tokenizer: nowhere does not exist; name a "),
        (["model.vocab=100"], "model.vocab is 100, but 256 bytes and "),
        (["folder=/dev/null/x"], "cannot write the run folder /dev/null/x: Not a directory; "),
        (["init_from=gpt2"], f"{Path.cwd() / 'gpt2'} does not exist; init_from names the folder "),
        (["device=cuda"], "device is cuda, but "),
        (["quick"], "'quick' changes nothing; write key=value, such as seed=1"),
        (["train.steps.x=1"], "train.steps.x: steps is a single value, not a table"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_2(recipe, refused, tmp_path, words, sentence):
    place = [] if words[0].startswith("folder=") else [f"folder={tmp_path / 'a'}"]
    if words == ["device=cuda"] and cli_train.this_machine().cuda:
        pytest.skip("there is a CUDA device")
    assert refused("train", recipe, *place, *words).startswith(sentence)
    assert set(everything(tmp_path / "a")) <= {tmp_path / "a" / "lock"}


def test_a_recipe_that_is_none(refused, tmp_path):
    assert refused("train", tmp_path / "x.toml").startswith("cannot read the recipe ")
    assert refused("train", tmp_path).startswith("cannot read the recipe ")
    (tmp_path / "x.toml").write_bytes(bytes(range(256)))
    assert " is not TOML: " in refused("train", tmp_path / "x.toml")


def test_text_that_cannot_be_used(recipe, refused, text, tmp_path):
    place = f"folder={tmp_path / 'a'}"
    (tmp_path / "empty").mkdir()
    assert " holds no text; " in refused(
        "train", recipe, place, f"data.sources=['{tmp_path / 'empty'}']"
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n{"body": "b"}\n')
    sentence = refused("train", recipe, place, f"data.sources=['{lines}']")
    assert f"{lines}" in sentence and "line 2" in sentence and "text" in sentence
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "1.txt").write_bytes(b"good until \xff here")
    sentence = refused(
        "train", recipe, place, f"data.sources=['{tmp_path / 'bytes'}']", "data.undecodable=stop"
    )
    assert "1.txt" in sentence and "repair it, or set data.undecodable to 'skip'" in sentence


def test_an_unusable_cache(recipe, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("HOWDAH_CACHE", "/dev/null")
    sentence = refused("train", recipe, f"folder={tmp_path / 'a'}")
    assert sentence.startswith("the token cache /dev/null/howdah cannot be used (Not a directory)")


def test_a_layout_that_does_not_fit_torchrun(recipe, refused, howdah, monkeypatch, tmp_path):
    launched = {**os.environ, "RANK": "1", "WORLD_SIZE": "3"}
    monkeypatch.setattr(os, "environ", launched)
    command = ["train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2"]
    assert "needs 2 processes but there are 3; use dp3 or dp*" in refused(*command)
    monkeypatch.setattr(os, "environ", {**launched, "LOCAL_RANK": "1"})
    assert howdah(*command) == (2, "", "")  # another rank of the machine has said it


@pytest.mark.parametrize("launched", [False, True])
def test_a_live_run_is_left_alone(recipe, refused, monkeypatch, tmp_path, launched):
    """Under torchrun the second run once wrote its run.toml before it looked at the lock."""
    with lock(tmp_path / "a"):
        (tmp_path / "a" / "run.toml").write_text("the live run's")
        if launched:
            rank = {"RANK": "0", "WORLD_SIZE": "1"}
            monkeypatch.setattr(os, "environ", {**os.environ, **rank})
        sentence = refused("train", recipe, f"folder={tmp_path / 'a'}")
        assert sentence.startswith(f"another live run is writing {tmp_path / 'a'}; wait for it")
        assert (tmp_path / "a" / "run.toml").read_text() == "the live run's"


def test_a_run_that_cannot_go_on_is_left_as_it_was(trained, refused, recipe):
    before = everything(trained)
    assert " holds a model with layers 2, this run has 3; " in refused(
        "train", trained, "model.layers=3"
    )
    assert refused("train", trained, "train.steps=5").endswith(
        "step-00000020 is past train.steps 5; make it 20 or more, or give another folder=PATH"
    )
    assert " was trained with seed 1, this run has 2" in refused("train", trained, "seed=2")
    assert " holds the state of adamw, this run uses sgd; " in refused(
        "train", recipe, f"folder={trained}", "method.optimizer.name=sgd", "--resume"
    )
    assert everything(trained) == before


def test_damaged_checkpoints(trained, howdah, refused):
    parts = sorted((trained / "checkpoints").glob("step-*/*.safetensors"))
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    code, out, _ = howdah("train", trained)
    assert code == 0
    assert "step-00000020 is passed over: rank-00000.safetensors has " in out
    assert "going on from step 10, saved on single" in out
    for part in parts:
        part.write_bytes(part.read_bytes()[:-1])
    before = everything(trained)
    assert refused("train", trained).startswith(f"every checkpoint in {trained / 'checkpoints'} is")
    assert everything(trained) == before


def test_folders_that_hold_no_run(refused, tmp_path):
    nothing = f"{tmp_path} has no whole checkpoint; train it first, or name a run folder"
    assert refused("sample", tmp_path, "a") == nothing
    assert refused("export", tmp_path, "--to", tmp_path / "b") == nothing
    assert refused("export", tmp_path, "--best", "--to", tmp_path / "b") == nothing.replace(
        "whole", "best"
    )
    assert not (tmp_path / "b").exists()
    assert refused("trace", tmp_path / "b").startswith(f"{tmp_path / 'b'} is no run folder; give")
    assert refused("trace", tmp_path).startswith("cannot read the recipe ")


def test_an_export_never_replaces_anything_else(trained, refused, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    sentence = refused("export", trained, "--to", tmp_path / "mine")
    assert sentence.startswith(f"{tmp_path / 'mine'} is not empty and holds more than an export")
    assert everything(tmp_path / "mine") == {tmp_path / "mine" / "letter.txt": b"dear"}
    assert "a file; " in refused("export", trained, "--to", tmp_path / "mine" / "letter.txt")
    assert refused("export", trained, "--to", "/dev/null/x").startswith("cannot export to /dev/nu")


def test_compiled_blocks_need_a_compiler(recipe, refused, tmp_path, monkeypatch):
    """torch asks for it at the first step: it was a traceback."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = refused("train", recipe, "compile=true", f"folder={tmp_path / 'a'}")
    assert told.startswith("compile is true, but the C++ compiler that torch.compile uses, no-such")
    assert not (tmp_path / "a").exists()


def test_a_draw_that_means_nothing(trained, refused):
    assert refused("sample", trained, "a", "--temperature=-1").startswith("temperature is -1.0; ")
    assert refused("sample", trained, "a", "--top-p=2").startswith("top_p is 2.0; ")
    assert refused("sample", trained, "a", "--top-k=-1").startswith("top_k is -1; ")


def test_a_defect_keeps_its_traceback(recipe, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ValueError("a defect")

    monkeypatch.setattr(loop, "place", broken)
    monkeypatch.setattr(sys, "argv", ["howdah", "train", str(recipe), f"folder={tmp_path / 'a'}"])
    with pytest.raises(ValueError, match="a defect"):
        cli.run()


# -- what the commands do ----------------------------------------------------------


def test_a_run_is_trained_sampled_exported_and_begun_from(howdah, trained, recipe, tmp_path):
    first = howdah("sample", trained, "7 follows", "--length", 12, "--seed", 3)
    assert first[0] == 0 and first[1].startswith("7 follows")
    assert first == howdah("sample", trained, "7 follows", "--length", 12, "--seed", 3)

    code, out, _ = howdah("export", trained, "--to", tmp_path / "out")
    assert (code, out) == (0, f"step 20 of {trained} is in {tmp_path / 'out'}\n")
    assert howdah("export", trained, "--to", tmp_path / "out")[0] == 0  # replaces its own

    code, out, _ = howdah("trace", trained)
    assert code == 0 and out.startswith("layout      single x1, step ")
    assert (trained / "trace" / "trace.svg").read_text().count("</svg>") == 1

    text = recipe.read_text()
    recipe.write_text(text[: text.index("[model]")] + text[text.index("[data]") :])
    begin = [f"init_from={tmp_path / 'out'}"]  # its tokenizer is used
    code, out, error = howdah("train", recipe, f"folder={tmp_path / 'b'}", *begin, "train.steps=1")
    assert code == 0, error
    assert losses(tmp_path / "b")[1] < 1.1 * losses(trained)[20]


def test_a_run_whose_settings_have_changed_is_not_resumed_by_accident(
    howdah, refused, trained, recipe, tmp_path
):
    """A sweep over learning rates into one folder gave equal losses and wrong records."""
    before = everything(trained)
    words = ["train", recipe, f"folder={trained}", "train.steps=22"]
    told = refused(*words, "method.lr.peak=5e-4", "seed=9")
    assert told == (
        f"{trained} has a run with other settings: seed was 1 and is 9; method.lr.peak was 0.003 "
        "and is 0.0005; go on with it by --resume, or start another run with folder=PATH"
    )
    assert everything(trained) == before
    told = refused("train", trained, f"init_from={tmp_path}", "data.tokenizer=" + str(trained))
    assert told == (
        f"init_from is {tmp_path}, but {trained} has begun from random weights; start another run "
        "with folder=PATH"
    )
    assert everything(trained) == before
    code, out, error = howdah(*words, "method.lr.peak=5e-4", "--resume")
    assert code == 0, error
    (note,) = [line for line in out.splitlines() if line.startswith("note")]
    assert note.startswith("note        the learning rate has changed: step 21 has 5.3")
    assert note.endswith(" where it had 0.0003")
    before = everything(trained)
    assert refused("train", trained, "method.lr.peak=1e-3").endswith(
        "has no step left, 22 of 22 are done, and method.lr.peak would change nothing; raise "
        "train.steps too"
    )
    assert everything(trained) == before
    code, _, error = howdah("train", trained, "train.steps=23", "method.lr.schedule=constant")
    assert code == 0, error  # the run folder itself is meant
    lines = (trained / "history.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert [line["step"] for line in (first, second, third)] == [0, 20, 22]
    assert first["changed"] == {}
    assert second["changed"] == {"method.lr.peak": [0.003, 0.0005], "train.steps": [20, 22]}
    assert third["changed"]["method.lr.schedule"] == ["cosine", "constant"]
    assert third["command"][1:3] == ["train", str(trained)]
    assert {"howdah", "torch", "python"} == set(third["versions"]) and third["host"]


def test_doctor_finds_what_the_machine_has(howdah):
    code, out, _ = howdah("doctor")
    assert code == 0 and "torch" in out and "cores" in out


# -- processes ---------------------------------------------------------------------


@contextmanager
def started(command, environment, tmp_path):
    """A command in a session of its own. Whatever happens, nothing of it outlives the test."""
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        words = list(map(str, command))
        process = subprocess.Popen(
            words, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def stat(pid):
    """(state, parent, session) of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[3])


def session(leader):
    """The live processes of a session."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    found = {pid: stat(pid) for pid in pids}
    return [pid for pid, is_ in found.items() if is_ and is_[2] == leader and is_[0] != "Z"]


def ranks_of(process):
    """The rank processes: grandchildren, behind the fork server."""
    live = session(process.pid)
    parents = {pid: is_[1] for pid in live if (is_ := stat(pid))}
    return [pid for pid, parent in parents.items() if parents.get(parent) == process.pid]


def children_of(process):
    """The processes that it has started itself."""
    everyone = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in everyone if (is_ := stat(pid)) and is_[1] == process.pid]


def wait_until(true):
    """Looks again and again until it is so."""
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(process, line, tmp_path):
    """Returns when a line of standard output begins with `line`."""
    wait_until(lambda: f"\n{line}" in (tmp_path / "out").read_text() or process.poll() is not None)
    assert process.poll() is None


def ended(process, tmp_path):
    """(exit code, standard output, standard error) of a process that ends and leaves none behind.

    Five minutes are short beside the ten that a rank may take to save.
    """
    code = process.wait(300)
    wait_until(lambda: not session(process.pid))
    return code, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def run(command, environment, tmp_path):
    with started(command, environment, tmp_path) as process:
        return ended(process, tmp_path)


def test_two_processes_train_and_go_on(recipe, environment, tmp_path):
    place = f"folder={tmp_path / 'a'}"
    words = [*HOWDAH, "train", recipe, place, "layout=dp2", "train.export=true"]
    code, out, error = run([*words, "train.prompt=1 follows"], environment, tmp_path)
    assert (code, error) == (0, "")
    assert "(2 ranks)" in out and ": equal\n" in out and "\n1 follows" in out
    assert (tmp_path / "a" / "export" / "model.safetensors").is_file()

    forget(tmp_path / "a", 20)
    again = [*HOWDAH, "train", tmp_path / "a", "layout=single"]
    code, out, error = run(again, environment, tmp_path)
    assert (code, error) == (0, "")
    assert "going on from step 10, saved on dp2 x1" in out
    assert steps(tmp_path / "a" / "checkpoints") == [10, 20]
    assert list(losses(tmp_path / "a")) == list(range(1, 21))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def test_torchrun_starts_a_run(recipe, environment, tmp_path, workers, make_job):
    words = ["-m", "howdah", "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp*"]
    code, out, error = run([*TORCHRUN, 2, "--standalone", *words], environment, tmp_path)
    assert code == 0, error
    assert out.count("step: 20 ") == 1  # rank 0 alone speaks
    train_on(workers, make_job("b", "layout=dp2"))
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))


@pytest.mark.slow
def test_two_agents_start_a_run(recipe, environment, tmp_path, workers, make_job):
    """As on two machines: an agent each, that find each other by address."""
    port = 20_000 + os.getpid() % 10_000  # no system gives such a one to whoever asks for any
    agents = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port]
    words = ["-m", "howdah", "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp*"]
    (tmp_path / "second").mkdir()
    second = [*TORCHRUN, 1, *agents, "--node-rank", 1, *words]
    with started(second, environment, tmp_path / "second") as other:
        code, _, error = run(
            [*TORCHRUN, 1, *agents, "--node-rank", 0, *words], environment, tmp_path
        )
        assert code == 0, error
        assert ended(other, tmp_path / "second")[:2] == (0, "")
    train_on(workers, make_job("b", "layout=dp2"))
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))


# A run that nobody can miss, however long they are off their core; its rate knows no end.
ENDLESS = ["train.steps=200000", "train.save_every=0", "method.lr.schedule=constant"]


@pytest.mark.parametrize(
    ("layout", "number"),
    [("dp2", signal.SIGTERM), pytest.param("single", signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_stopped_run_saves_and_goes_on(  # noqa: PLR0917
    recipe, environment, tmp_path, workers, make_job, layout, number
):
    """Five times, to the whole group, as a batch system and an impatient user do."""
    words = [f"layout={layout}", *ENDLESS]
    train = [*HOWDAH, "train", recipe, f"folder={tmp_path / 'a'}", *words]
    with started(train, environment, tmp_path) as process:
        wait_for(process, "step:  3 ", tmp_path)
        for _ in range(5):
            os.killpg(process.pid, number)
        code, out, error = ended(process, tmp_path)
    assert (code, error) == (128 + number, "")
    (step,) = steps(tmp_path / "a" / "checkpoints")
    assert step >= 3 and max(losses(tmp_path / "a")) == step
    assert out.endswith(
        f"stopped after step {step} of 200000 and saved; go on: howdah train {tmp_path / 'a'}\n"
    )
    words.append(f"train.steps={step + 3}")
    again, never_stopped = (make_job(name, *words) for name in "ab")
    train_on(workers, again, never_stopped)
    assert_same_bits(tensors(tmp_path / "a", step + 3), tensors(tmp_path / "b", step + 3))


def test_when_a_rank_is_killed_all_end_and_the_run_goes_on(recipe, environment, tmp_path, howdah):
    often = ["train.steps=200000", "train.save_every=1"]  # so that a save is under way, always
    words = [*HOWDAH, "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2", *often]
    with started(words, environment, tmp_path) as process:
        wait_for(process, "step: 12 ", tmp_path)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        code, _, error = ended(process, tmp_path)
    assert code == 1
    assert error.startswith("howdah: rank ")  # the killed one, or the one that missed it
    (sentence,) = error.splitlines()
    assert sentence.endswith("; the others were ended; go on with the same command")
    last = steps(tmp_path / "a" / "checkpoints")[-1]
    assert last >= 8
    code, out, _ = howdah("train", tmp_path / "a", "layout=single", f"train.steps={last + 3}")
    assert code == 0 and f"going on from step {last}, saved on dp2 x1" in out
    assert opened(tmp_path / "a", last + 3).samples == 6 * (last + 3)
    assert set(metrics(tmp_path / "a", "held_out_all")) == {last + 3}


TRAIN_RANK, TRAIN_STEP = cli_train.train_rank, loop.train_step


def kill_once(seat, job):
    """For ranks: in the first start rank 1 is killed on the way to its 13th step."""

    def kill(context, batch, *, step, **rest):
        if step == 12 and seat.rank == 1:
            (job.folder / "was killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return TRAIN_STEP(context, batch, step=step, **rest)

    if not (job.folder / "was killed").exists():
        loop.train_step = kill
    return TRAIN_RANK(seat, job)


def test_a_run_starts_again_after_a_failure(  # noqa: PLR0917
    recipe, howdah, monkeypatch, tmp_path, workers, make_job
):
    monkeypatch.setattr(cli_train, "train_rank", kill_once)
    words = ["train", "--restarts", 1, recipe, f"folder={tmp_path / 'a'}", "layout=dp2"]
    code, _, error = howdah(*words, "train.save_every=5")
    assert code == 0, error
    (sentence,) = error.splitlines()
    assert sentence.endswith("; starting it again, 1 of 1 times")
    train_on(workers, make_job("b", "layout=dp2", "train.save_every=5"))
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))


@pytest.mark.slow
def test_when_torchrun_is_killed_its_ranks_save_and_leave(recipe, environment, tmp_path):
    """They once trained on, and held the folder, for ever."""
    words = ["-m", "howdah", "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp*"]
    with started([*TORCHRUN, 2, "--standalone", *words, *ENDLESS], environment, tmp_path) as agent:
        wait_for(agent, "step:  3 ", tmp_path)
        ranks = children_of(agent)
        agent.kill()
        wait_until(lambda: not any((is_ := stat(pid)) and is_[0] != "Z" for pid in ranks))
    (step,) = steps(tmp_path / "a" / "checkpoints")
    assert f"stopped after step {step} of 200000 and saved" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("command", "limit"), [("train", "-n 12"), ("train", "-f 20"), ("verify", "-f 100")]
)
def test_what_the_system_does_not_allow_is_a_sentence(
    recipe, environment, tmp_path, command, limit
):
    words = map(str, [*HOWDAH, command, recipe, f"folder={tmp_path / 'a'}", "layout=dp2"])
    limited = ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", *words]
    code, _, error = run(limited, environment, tmp_path)
    assert code in (1, 2), error
    assert error.splitlines()[-1].startswith("howdah: ") and "Traceback" not in error


@pytest.mark.slow
def test_torchrun_starts_ranks_again(recipe, environment, tmp_path):
    """They once met under the keys of the dead, for the store still held what those had said."""
    words = ["-m", "howdah", "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp*"]
    torchrun = [*TORCHRUN, 2, "--standalone", "--max-restarts", 1, *words, *ENDLESS]
    with started([*torchrun, "train.save_every=5"], environment, tmp_path) as process:
        wait_for(process, "step: 12 ", tmp_path)
        os.kill(children_of(process)[0], signal.SIGKILL)
        wait_for(process, "going on from step ", tmp_path)
        process.send_signal(signal.SIGTERM)
        ended(process, tmp_path)


def test_no_port_is_open_while_a_run_trains(recipe, environment, tmp_path):
    """Whoever reached the port of a store could run code as the user."""
    words = [*HOWDAH, "train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2", *ENDLESS]
    with started(words, environment, tmp_path) as process:
        wait_for(process, "step:  3 ", tmp_path)
        inodes, names = sockets_of(session(process.pid))
        process.send_signal(signal.SIGTERM)
        assert ended(process, tmp_path)[0] == 143
    assert inodes and names == set()


def sockets_of(pids):
    """The sockets of processes by inode; and of these, addresses that others could speak to."""
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                held.add(os.readlink(link))
    inodes = {name.removeprefix("socket:[").rstrip("]") for name in held if "socket:" in name}
    names = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        names |= {row[1] for row in rows if row[9] in inodes}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return inodes, names | {row[7] for row in rows if row[6] in inodes and len(row) > 7}


def test_a_last_save_that_fails_is_the_end_of_the_story(recipe, environment, tmp_path):
    """It once ended with exit code 0, and exported an older step; dp2 waited ten minutes."""
    folder = tmp_path / "a"
    train = [*HOWDAH, "train", recipe, f"folder={folder}", "layout=dp2", "train.export=true"]
    assert run([*train, "train.steps=10"], environment, tmp_path)[0] == 0
    shutil.rmtree(folder / "export")
    (folder / "checkpoints" / "step-00000020.tmp").write_text("a file where the folder should be")
    code, _, error = run([*train, "train.steps=20"], environment, tmp_path)
    assert code == 1
    assert error.startswith("howdah: step 20 is not saved: ")
    assert "; step 10 is the newest that is; " in error and error.count("\n") == 1
    assert not (folder / "export").exists()


def test_a_model_that_this_machine_cannot_hold_is_refused(recipe, refused, tmp_path):
    big = ["model.layers=80", "model.width=8192", "model.heads=64", "model.ffn_size=28672"]
    sentence = refused("train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2", *big)
    assert " a rank, and this machine has free for 2 ranks " in sentence
    assert sentence.endswith(" or try all the same with --force")
    many = "layout=dp512", "batch.global_batch=512"
    assert "512 ranks on " in refused("train", recipe, f"folder={tmp_path / 'a'}", *many)
    assert not (tmp_path / "a").exists()


def fail(*_):
    """For ranks: a defect."""
    raise ValueError("a defect")


def refuse(*_):
    """For ranks: a mistake that shows late."""
    raise UserError("the third wheel: is missing")


def test_how_a_rank_fails_is_told_once(make_job, monkeypatch, capsys):
    monkeypatch.setattr(cli_train, "train_rank", fail)
    assert cli_train._train_here(make_job("a", "layout=dp2"), 0) == 1
    error = capsys.readouterr().err
    assert error.count("failed:\nTraceback") == 1
    assert error.count("ValueError: a defect\n") == 1


def test_a_mistake_that_ranks_find_is_one_sentence(recipe, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_train, "train_rank", refuse)
    sentence = refused("train", recipe, f"folder={tmp_path / 'a'}", "layout=dp2")
    assert sentence == "the third wheel: is missing"
