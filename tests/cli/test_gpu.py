"""What the commands do about GPUs on a machine that has none, or pretends to."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from howdah.base.errors import UserError
from howdah.base.signals import listen
from howdah.cli import check as cli_check
from howdah.cli import environment
from howdah.cli import main as cli
from howdah.cli import train as cli_train
from howdah.cli import verify as cli_verify
from howdah.cli.environment import FOR_CARDS, settings_for_torch
from howdah.comm import rendezvous, spawn
from howdah.comm.transport import SingleRank
from howdah.host import devices
from howdah.host.devices import Cards
from howdah.plan.comm import Comm
from howdah.train import loop

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NONE = "torch sees no CUDA device here; use device=cpu"
OLD = "the driver (for CUDA 12.4) is too old for this torch; update the driver, or use device=cpu"


@pytest.fixture
def refused(cache, monkeypatch, capsys):
    """Runs a command that must fail as a user's mistake; returns its one sentence."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *map(str, words)])
        code = cli.run()
        out, error = capsys.readouterr()
        assert (code, out) == (2, ""), error
        assert error.startswith("howdah: ") and error.count("\n") == 1, error
        return error.removeprefix("howdah: ").strip()

    return run


def cards(monkeypatch, found):
    monkeypatch.setattr(devices, "find_cards", lambda visible=None: found)


COMMANDS = [
    ("check", "device=cuda"),
    ("train", "device=cuda"),
    ("verify", "device=cuda"),
    ("verify", "--device", "cuda"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("lack", [NONE, OLD])
def test_a_card_that_is_not_there_is_refused_before_anything_starts(
    refused, recipe, monkeypatch, words, lack
):
    def started(*_, **__):
        raise AssertionError("something was started")

    cards(monkeypatch, Cards(0, lack))
    monkeypatch.setattr(spawn.Workers, "__init__", started)
    monkeypatch.setattr(cli_train, "_train_here", started)
    folder = recipe.parent / "a"
    place = [] if words[0] == "verify" else [f"folder={folder}"]
    told = refused(words[0], recipe, "layout=dp2", *place, *words[1:])
    assert told == f"device is cuda, but {lack}"
    assert not folder.exists()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_ranks_that_cannot_share_are_refused_before_anything_starts(
    refused, recipe, monkeypatch, words
):
    """Cards that the driver gives to one process each."""
    cards(monkeypatch, Cards(1))
    monkeypatch.setattr(devices, "_one_process", lambda: "Exclusive_Process")
    told = refused(words[0], recipe, "layout=dp2", *words[1:])
    assert told == (
        "2 ranks of this machine would share 1 card, which the driver gives to one process each "
        "(Exclusive_Process): start 1, or set nvidia-smi -c DEFAULT"
    )


def test_an_unknown_device_is_refused(refused, recipe):
    assert (
        refused("verify", recipe, "--device", "tpu") == "--device 'tpu' is unknown; use cpu or cuda"
    )


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ([], "cpu"),
        (["device=cpu"], "cpu"),
        (["device=cuda"], "cuda"),
        (["--device", "cuda"], "cuda"),
        (["device=cuda", "--device", "cpu"], "cpu"),
    ],
)
def test_the_option_and_the_key_choose_where_the_layout_is_proved(
    recipe, cache, monkeypatch, words, device
):
    """`auto` is the CPU, also on a machine with cards."""
    started = []

    class Started(Exception):
        pass

    def start(size, *, device="cpu"):
        started.append((size, device))
        raise Started

    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))
    monkeypatch.setattr(sys, "argv", ["howdah", "verify", str(recipe), "layout=dp2", *words])
    cards(monkeypatch, Cards(8))
    monkeypatch.setattr(spawn, "Workers", start)
    with pytest.raises(Started):
        cli.run()
    assert started == [(2, device)]
    assert cli_verify.device_of("auto") == "cpu"


def test_check_asks_no_card_of_a_run_on_the_cpu(recipe, monkeypatch, capsys):
    def asked(*_, **__):
        raise AssertionError("cards were asked for")

    monkeypatch.setattr(devices, "find_cards", asked)
    for words in ([], ["device=cpu"]):
        cli_check.check(recipe, words)
    assert "sound: small on single x1" in capsys.readouterr().out


# -- a rank's card comes first ---------------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    """The order of what a rank does, which ends before it trains."""
    made = []

    def note(name, result):
        return lambda *_, **how: made.append((name, how.get("device"))) or result

    card = torch.device("cuda", 1)
    monkeypatch.setattr(devices, "own_device", note("device", card))
    monkeypatch.setattr(rendezvous, "choose", note("meet", SingleRank()))
    monkeypatch.setattr(rendezvous, "join", note("meet", SingleRank()))
    monkeypatch.setattr(cli_train, "_train", note("train", 0))
    return made


def job_of(**more):
    plan = SimpleNamespace(comm=Comm())
    return SimpleNamespace(device="cuda", layout=SimpleNamespace(world=2), plan=plan, **more)


def test_a_rank_has_its_card_before_it_meets_the_others(order, monkeypatch):
    """What they say of their cards opens one."""
    before = signal.getsignal(signal.SIGHUP)
    card = torch.device("cuda", 1)
    # A rank's process ignores signals when its run is over; this one goes on.
    monkeypatch.setattr(cli_train, "listen", lambda **_: listen())
    monkeypatch.setattr(cli_train, "lasting_output", lambda: None)
    cli_train.train_rank(SimpleNamespace(rank=1, size=2, store=None), job_of())
    assert signal.getsignal(signal.SIGHUP) is before
    monkeypatch.setenv("LOCAL_RANK", "1")
    cli_train._train_launched(job_of())
    assert order == [("device", None), ("meet", card), ("train", None)] * 2


def test_a_worker_has_its_card_before_it_meets_the_others(monkeypatch):
    made, card = [], torch.device("cuda", 3)

    class Pipe:
        """Asks for one function, as rank 3 of 4, and then for nothing more."""

        asked = iter([(lambda transport: made.append("run"), (), 3, 4, 1, None)])

    def next_of(pipe):
        for one in pipe.asked:
            return one
        raise EOFError

    monkeypatch.setattr(spawn, "receive", next_of)
    monkeypatch.setattr(spawn, "send", lambda *_: None)
    monkeypatch.setattr(spawn.dist, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(spawn, "own_device", lambda kind, rank: made.append((kind, rank)) or card)
    monkeypatch.setattr(
        spawn, "choose", lambda *_, device, **__: made.append(device) or SingleRank()
    )
    store = SimpleNamespace(secret=b"")
    assert spawn._serve(Pipe(), store, torch.get_num_threads(), "cuda") == 0
    assert made == [("cuda", 3), card, "run"]


def test_the_loop_has_its_card_before_anything_else(make_job, monkeypatch):
    class Taken(Exception):
        pass

    def taken(kind, rank):
        raise Taken(kind, rank)

    monkeypatch.setattr(loop, "own_device", taken)
    monkeypatch.setattr(loop, "begin", lambda *_: pytest.fail("it has begun without its device"))
    with pytest.raises(Taken) as why:
        loop.train(make_job("a"), SingleRank(), local_rank=5)
    assert why.value.args == ("cpu", 5)


# -- the environment -------------------------------------------------------------------


def test_what_torch_reads_is_set_where_there_is_a_card():
    assert settings_for_torch({}, card=True).items() >= FOR_CARDS.items()
    assert FOR_CARDS == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert not set(settings_for_torch({}, card=False)) & set(FOR_CARDS)


@pytest.mark.parametrize("name", [*FOR_CARDS, "KINETO_LOG_LEVEL"])
def test_what_the_user_has_set_stays(name):
    assert name in settings_for_torch({}, card=True)
    assert name not in settings_for_torch({name: "theirs"}, card=True)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_another_name_of_the_allocator_s_settings_counts(name):
    found = settings_for_torch({name: "garbage_collection_threshold:0.8"}, card=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found and "TORCH_FR_BUFFER_SIZE" in found


def test_a_command_sets_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOWDAH_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "has_card", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in FOR_CARDS:
        os.environ.pop(name, None)
    environment.ready_torch()
    assert {name: os.environ[name] for name in FOR_CARDS} == FOR_CARDS


def test_a_job_says_what_its_machine_lacks(recipe, monkeypatch, cache):
    from howdah.config.recipe import load_run, resolve_run

    monkeypatch.setenv("HOWDAH_CACHE", str(cache.parent))
    cards(monkeypatch, Cards(0, OLD))
    machine = environment.this_machine()
    assert (machine.cuda, machine.no_cuda) == (0, OLD)
    with pytest.raises(UserError, match=r"^device is cuda, but the driver \(for CUDA 12\.4\)"):
        resolve_run(load_run(recipe, ["device=cuda"]), machine)
    assert resolve_run(load_run(recipe), machine).device == "cpu"
