"""`howdah train` from outside, where the machine lacks something that its ranks would like."""

import os
import signal
from contextlib import ExitStack

import pytest
from real_train import (
    ENDLESS,
    GUARD,
    TORCHRUN,
    TRAIN,
    children,
    ended,
    shell,
    started,
    wait_for,
)

from howdah.checkpoint.folders import steps
from howdah.comm.agreement import PORTS


@pytest.mark.slow
def test_without_the_engine_a_run_says_so_and_trains(recipe, cache, tmp_path):
    """A compiler that compiles nothing: gloo carries the messages."""
    words = [*TRAIN, recipe, f"folder={tmp_path / 'a'}", "layout=dp2"]
    code, out, error = ended(words, shell(cache, CC="false"))
    assert code == 0, error
    (sentence,) = error.splitlines()
    assert " cannot build the engine; it says: nothing; until then " in sentence
    assert sentence.endswith(PORTS)
    (sent,) = (line for line in out.splitlines() if line.startswith("sent "))
    assert sent.endswith(": equal")
    assert steps(tmp_path / "a" / "checkpoints") == [10, 20]


def test_too_small_an_address_space_is_a_sentence(recipe, cache, tmp_path):
    """torch's libraries end the process in it, or hang."""
    limited = ["bash", "-c", 'ulimit -v 600000; exec "$@"', "-"]
    words = [*limited, *TRAIN, recipe, f"folder={tmp_path / 'a'}", "layout=dp2"]
    assert ended(words, shell(cache)) == (
        2,
        "",
        "howdah: the address space is limited to 585 MiB (ulimit -v), and torch alone takes 1024; "
        "raise the limit\n",
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_two_agents_that_meet_at_a_fixed_address_start_their_ranks_again(
    recipe, cache, tmp_path, victim
):
    """The documented line of two machines, with --max-restarts: torchrun's static rendezvous joins
    the same agents once more, and the ranks meet under new keys.
    """
    port = 10_000 + os.getpid() % 10_000  # no system gives such a one to whoever asks for any
    agent = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 1]
    agent += ["--master-addr", "127.0.0.1", "--master-port", port]
    words = [
        "-m",
        *TRAIN[2:],
        recipe,
        f"folder={tmp_path / 'a'}",
        "layout=dp*",
        *ENDLESS,
        "train.save_every=5",
    ]
    with ExitStack() as stack:
        agents = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            command = [*agent, "--node-rank", number, *words]
            place = shell(cache), tmp_path / str(number)
            agents.append(stack.enter_context(started(command, *place)))
        wait_for("\nstep: 12 ", *agents[0])
        ranks = [pid for process, _ in agents for pid in children(process.pid)]
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        wait_for("\nstep: ", *agents[0], after="\ngoing on from step ")
        for process, _ in agents:
            process.send_signal(signal.SIGTERM)
        for process, _ in agents:
            process.wait(GUARD)
