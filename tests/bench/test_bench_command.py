"""The command `howdah bench collectives`: its output, its mistakes, and under torchrun."""

import os
import socket
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from test_bench_collectives import HOWDAH

from howdah.base.errors import UserError
from howdah.bench.collectives import accept
from howdah.cli import bench as cli_bench
from howdah.cli import commands as cli_commands
from howdah.cli import main as cli


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command in this process: (exit code, lines printed, what stands on stderr)."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", "bench", "collectives", *map(str, words)])
        code, said = cli.run(), capsys.readouterr()
        return code, said.out.splitlines(), said.err

    return run


def test_the_command_starts_ranks_and_draws(bench, tmp_path):
    picture = tmp_path / "a.svg"
    words = ["--op", "all_gather", "--sizes", "8,1K", "--repeats", 1, "--plot", picture, "--arena"]
    code, lines, error = bench(*words)
    assert (code, error) == (0, "")
    assert lines[0].startswith("2 ranks, engine, float32; 1 block; ")
    told = [each.split() for each in lines[2:-2]]
    assert [each[:3] for each in told] == [
        ["all_gather", size, place] for size in ("8", "1024") for place in ("own", "arena")
    ]
    assert lines[-2:] == ["every element was what it must be", f"written {picture}"]
    ElementTree.parse(picture)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--op", "none"], "--op: there is no collective 'none'"),
        (["--arena", "--transport", "torch"], "--arena: torch allocates no memory"),
        (["--plot", "/no/where.svg"], "--plot: there is no folder /no"),
    ],
)
def test_mistakes_are_a_sentence(bench, words, sentence):
    code, lines, error = bench(*words)
    assert (code, lines) == (2, [])
    assert error.startswith("howdah: ") and sentence in error and error.count("\n") == 1


def test_what_needs_more_memory_than_is_free_is_refused(bench, monkeypatch):
    monkeypatch.setattr(cli_bench, "memory", lambda: {"MemAvailable": 10**9})
    code, _, error = bench("--sizes", "1G")
    assert code == 2
    assert "need up to" in error and "GB, and 1.0 are free: take smaller sizes" in error


def test_a_mistake_is_found_before_torch_is_loaded():
    program = (
        "import sys; from howdah.cli import main as cli\n"
        "sys.argv = ['howdah', 'bench', 'collectives', '--dtype', 'bool']\n"
        "try: cli.main()\n"
        "finally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (2, "False")


def launched(ranks, *words):
    """The command under a launcher's variables: what each rank printed, and its exit code."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is there already, as torchrun's is
    given |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*HOWDAH, *words],
            env=os.environ | given | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    return [(*process.communicate()[:1], process.returncode) for process in processes]


@pytest.mark.slow
def test_under_torchrun_it_joins_the_ranks_and_the_first_prints():
    words = ["--sizes", "8", "--repeats", "1", "--transport", "torch", "--op", "scatter"]
    (told, code), (silent, other) = launched(2, *words)
    assert (code, other, silent) == (0, 0, "")
    assert "2 ranks, torch, float32; 1 block; bound: one message through a TCP socket" in told
    assert told.splitlines()[2].split()[:3] == ["scatter", "8", "own"]


def test_under_torchrun_the_ranks_are_the_launchers(bench, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "2 to 64 ranks" in bench_error(monkeypatch, "--sizes", "8")
    assert "torchrun has started 1" in bench_error(monkeypatch, "--ranks", "2")


def bench_error(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["howdah", "bench", "collectives", *words])
    with pytest.raises(UserError) as found:
        cli_commands.app(standalone_mode=False)
    return str(found.value)


def test_a_stranger_is_hung_up_on():
    """Whoever leaves, or says another word, is not measured with."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        socket.create_connection(address).close()
        with socket.create_connection(address) as other, socket.create_connection(address) as peer:
            other.sendall(b"x" * 32)
            peer.sendall(b"w" * 32 + b"more")
            with accept(listener, b"w" * 32) as wire:
                assert wire.recv(4) == b"more"
            assert other.recv(1) == b""
