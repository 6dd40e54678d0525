"""`howdah sample`: what it prints, on one process and on several, and what it refuses."""

import subprocess
import sys

import pytest

from howdah.cli import main as cli
from howdah.comm.transport import SingleRank
from howdah.train.loop import train

PROMPTS = ("7 follows", "8 follows 7, says")
WRONG = [
    (["--beams", 2, "--temperature", 0.5], "--beams searches for the likeliest text and draws"),
    (["--beams", 400], "beams is 400; it must be at least 1, and at most half of the 300"),
    (["--length-penalty", 2], "--length-penalty and --early-stopping are of a search"),
    (["--beams", 2, "--early-stopping", "soon"], "--early-stopping is 'soon'; give true"),
    (["--repetition-penalty", 0], "repetition_penalty is 0.0; it must be above 0"),
    (["--length", -1], "length is -1"),
    (["--layout", "dp2"], "layout dp2 is for training; decoding takes tp and pp alone"),
    (["--layout", "tp3"], "tp3 does not divide 2 heads"),
    (["follows " * 40], "tokens, and the model's context is 32; shorten it"),
]


@pytest.fixture
def sample(make_job, tmp_path, monkeypatch, capsys):
    """Runs the command on a run of one step; its exit code, and what it printed."""
    train(make_job("a", "train.steps=1"), SingleRank())

    def run(*words):
        capsys.readouterr()
        command = ["howdah", "sample", str(tmp_path / "a"), *map(str, words)]
        monkeypatch.setattr(sys, "argv", command)
        code, told = cli.run(), capsys.readouterr()
        return code, told.out + told.err

    return run


def test_several_prompts_are_printed_in_their_order_each_as_alone(sample):
    for how in (["--temperature", 0], ["--seed", 4, "--repetition-penalty", 1.3], ["--beams", 3]):
        code, together = sample(*PROMPTS, "--length", 6, *how)
        alone = "".join(sample(prompt, "--length", 6, *how)[1] for prompt in PROMPTS)
        assert code == 0 and together == alone
        assert together.startswith(PROMPTS[0]) and f"\n{PROMPTS[1]}" in together


def test_what_cannot_be_sampled_is_said_before_a_process_starts(sample):
    for words, sentence in WRONG:
        code, told = sample(PROMPTS[0], *words)
        assert code == 2 and told.startswith("howdah: ") and sentence in told
        assert told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_processes_print_what_one_prints(sample, tmp_path, layout):
    words = [PROMPTS[0], "--length", "6", "--temperature", "0"]
    _, alone = sample(*words)
    command = [sys.executable, "-m", "howdah", "sample", str(tmp_path / "a"), *words]
    done = subprocess.run(
        [*command, "--layout", layout], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, alone), done.stderr
