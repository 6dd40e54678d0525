"""Commands that start processes: launchers, signals, ranks that die, and what is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from full_disk import FULL
from small_runs import assert_same_bits, forget, losses, metrics, opened, tensors, train_on

from howdah.base.errors import UserError
from howdah.checkpoint.folders import steps
from howdah.cli import train as cli_train
from howdah.train import loop

HOWDAH = [sys.executable, "-m", "howdah"]


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
def test_torchrun_verifies_on_its_ranks(recipe, environment, tmp_path):
    """Rank 0 has the evidence of all, prints the verdict, and all have its exit code."""
    words = [*TORCHRUN, 2, "--standalone", "-m", "howdah", "verify", recipe, "--steps", 2]
    code, out, error = run([*words, "layout=dp* x2"], environment, tmp_path)
    assert code == 0, error
    assert out.startswith("dp2 x2 against one device: float64, 2 steps of ")
    assert out.count("noticed by the ") == 4 and "NOT NOTICED" not in out
    assert out.splitlines()[-1].startswith("equal: bytes sent and held, bits of all ranks")
    code, out, error = run([*words, "layout=dp* x2", "--dtype", "float16"], environment, tmp_path)
    assert code != 0 and "howdah: --dtype 'float16' is unknown; use float64" in error


ONE_ALONE = """
import os, sys
from howdah.cli.main import main
sys.argv[1:] = ["verify", "laptop", "--steps", "x" if os.environ["LOCAL_RANK"] == "1" else "2"]
main()
"""


@pytest.mark.slow
def test_a_mistake_of_one_rank_alone_is_told(environment, tmp_path):
    (tmp_path / "alone.py").write_text(ONE_ALONE)
    words = [*TORCHRUN, 2, "--standalone", tmp_path / "alone.py"]
    code, _, error = run(words, environment, tmp_path)
    assert code != 0 and "howdah: verify: invalid value for '--steps': " in error


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("train", "-n 12"),
        pytest.param("train", "-f 20", marks=pytest.mark.slow),
        pytest.param("verify", "-f 100", marks=pytest.mark.slow),
    ],
)
def test_what_the_system_does_not_allow_is_a_sentence(
    recipe, environment, tmp_path, command, limit
):
    words = map(str, [*HOWDAH, command, recipe, f"folder={tmp_path / 'a'}", "layout=dp2"])
    limited = ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", *words]
    code, _, error = run(limited, environment, tmp_path)
    assert code in (0, 1, 2) and "Traceback" not in error, error
    last = error.splitlines()[-1]
    assert last.startswith("howdah: ") if code else "messages go through gloo" in last, error


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- where a command is started ----------------------------------------------------


def test_a_folder_that_is_gone_is_a_sentence(environment, tmp_path):
    """A library of torch ended the process, in its own words."""
    gone = tmp_path / "gone"
    gone.mkdir()
    enter = f"cd {gone} && rmdir {gone} && exec {sys.executable} -P -m howdah doctor"
    environment |= {"PYTHONPATH": str(Path(cli_train.__file__).parents[2])}
    words = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["sh", "-c", enter], check=False, **words)
    assert done.returncode == 2, done.stderr
    said = "howdah: the folder in which it was started is gone; start it in another"
    assert done.stderr.splitlines()[-1] == said


def test_output_that_a_full_disk_has_lost_is_told(environment):
    """A recipe that was written to a file by `>` was empty, and the exit code was 0."""
    with FULL.open("wb") as full:
        done = subprocess.run(
            [*HOWDAH, "recipes", "laptop"], env=environment, stdout=full, stderr=-1, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"howdah: standard output could not be written: No space left on device\n"


def test_a_user_may_use_what_a_command_makes(environment, tmp_path):
    """Under umask 777 folders were left that nobody could enter, nor remove."""
    words = [*HOWDAH, "init", tmp_path / "mine.toml", "--model", "laptop", "--machine", "here"]
    done = subprocess.run(
        ["sh", "-c", 'umask 777; exec "$@"', "sh", *map(str, words)],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.toml").stat().st_mode & 0o777 == 0o600
