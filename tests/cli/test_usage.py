"""A command line that cannot be read is one sentence; and a shell can complete one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from howdah.base.signals import Stopped
from howdah.base.their_words import KEYS, LAYOUT, SAID
from howdah.cli import main as cli

PROGRAM = Path(sys.executable).parent / "howdah"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: (exit code, output, error)."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["howdah", *words])
        return (cli.run(), *capsys.readouterr())

    return command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train laptop --steps 5", "train has no option --steps; write train.steps=5"),
        ("train --steps=5 laptop", "train has no option --steps; write train.steps=5"),
        ("check laptop --lr 3e-4", "check has no option --lr; write method.lr.peak=3e-4"),
        ("train laptop --max-steps 5", "train has no option --max-steps; write train.steps=5"),
        ("train laptop --tp 2", "train has no option --tp; write layout=tp2"),
        ("train laptop --fsdp", "train has no option --fsdp; write layout='dpN zero3'"),
        ("verify laptop --layout tp2", "verify has no option --layout; write layout=tp2"),
        ("train --compile laptop", "train has no option --compile; write compile=true"),
        ("train laptop --export=false", "train has no option --export; write train.export=false"),
        (
            "train laptop --schedule wsd",
            "train has no option --schedule; write schedule=wsd or method.lr.schedule=wsd",
        ),
        ("train laptop --prompt", "train has no option --prompt; write train.prompt=VALUE"),
        ("train laptop --forse", "train has no option --forse; did you mean '--force'?"),
        (
            "train laptop --walrus",
            "train has no option --walrus; `howdah keys` lists what KEY=VALUE can change",
        ),
        ("plan llama3-8b --layers 4", "plan has no option --layers; write model.layers=4"),
        (
            "plan llama3-8b --steps 4",
            "plan has no option --steps; train.steps is no part of a plan",
        ),
        ("draw mesh laptop --tp 2", "draw mesh has no option --tp; write layout=tp2"),
        ("sample a b --lenght 3", "sample has no option --lenght; did you mean '--length'?"),
        ("sample a b --tokens 3", "sample has no option --tokens; write --length"),
        ("doctor --walrus", "doctor has no option --walrus; known are: --hosts, --measure"),
        ("recipes --walrus", "recipes has no option --walrus; known are: --help"),
        ("train laptop --restarts -1", "--restarts is -1; it must be at least 0"),
        ("trian laptop", "howdah has no command 'trian'; did you mean 'train'?"),
        ("draw mash", "draw has no command 'mash'; did you mean 'mesh'?"),
        ("train", "train: missing argument 'recipe'; see howdah train -h"),
        ("plan laptop --cluster", "howdah: option '--cluster' requires an argument; see howdah -h"),
    ],
)
def test_a_line_that_cannot_be_read_is_one_sentence(run, words, sentence):
    """It was a box of several lines, which named --help alone."""
    assert run(*words.split()) == (2, "", f"howdah: {sentence}\n")


def test_a_value_of_another_kind_is_one_sentence(run):
    code, out, error = run("verify", "laptop", "--steps", "x")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("howdah: verify: invalid value for '--steps': ")
    assert error.endswith("; see howdah verify -h\n")


def test_what_only_lacks_a_command_is_helped(run):
    for words, told in ([], "Plan, verify, train"), (["draw"], "Draw a schedule, memory"):
        code, out, error = run(*words)
        assert (code, error) == (2, "") and told in out
    assert run("--help")[0] == run("--version")[0] == 0


def test_a_rank_that_is_ended_while_it_waits_for_another_to_tell_says_nothing(run, monkeypatch):
    def end(seconds):
        raise Stopped(signal.SIGTERM)

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "sleep", end)
    assert run("train", "laptop", "--steps", "5") == (2, "", "")


# -- words of other trainers -----------------------------------------------------------


@pytest.mark.parametrize("word", [*LAYOUT, "FULL_SHARD", "no_sync()", "DistributedDataParallel"])
def test_keys_answers_every_word_of_a_layout(run, word):
    code, out, _ = run("keys", word)
    ours = LAYOUT[word.lower().removesuffix("()")]
    assert code == 0
    assert out.startswith(f"{word}: in the layout it is written {ours!r}\nlayout  (text; by defau")


def test_keys_says_what_is_not_there_yet(run):
    code, _, error = run("keys", "QLoRA")
    assert code == 2 and error.startswith("howdah: 'QLoRA' is not there yet: no product reads wei")
    code, out, _ = run("keys", "LoRA")
    assert code == 0 and out.startswith("method.adapter.rank  (whole number, from 1 to 16384; by ")


def test_keys_shows_the_table_of_that_name_too(run):
    _, out, _ = run("keys", "lr")
    assert out.startswith("method.lr.peak  (") and "method.lr.warmup_steps  (" in out


@pytest.mark.parametrize("word", KEYS)
def test_keys_answers_every_word_of_a_recipe(run, word):
    code, out, _ = run("keys", word)
    row = next(line for line in out.splitlines() if "  (" in line).split()[0]
    assert code == 0 and KEYS[word].startswith(row)
    if row != KEYS[word]:
        assert out.startswith(f"{word}: here it is {KEYS[word]!r}\n")


@pytest.mark.parametrize("word", SAID)
def test_keys_answers_a_word_that_no_key_stands_for(run, word):
    code, out, _ = run("keys", word)
    assert code == 0 and out.startswith(f"{word}: {SAID[word]}\n")


def test_keys_shows_the_keys_that_an_answer_names(run):
    """An answer with the words "writes a folder" was followed by the key `folder`."""
    assert run("keys", "push_to_hub")[1].count("\n") == 1
    _, out, _ = run("keys", "warmup_ratio")
    assert out.splitlines()[1].startswith("method.lr.warmup_steps  (whole number")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("check laptop warmup_ratio=0.1", "unknown key 'warmup_ratio'; a warm-up is counted in s"),
        ("check laptop method.optimizer.beta1=0.9", "unknown key 'method.optimizer.beta1'; both a"),
        ("check laptop lora=8", "unknown key 'lora'; here it is 'method.adapter.rank'"),
        ("check laptop qlora=8", "unknown key 'qlora'; it is not there yet: no product reads wei"),
        ("check laptop dpo=1", "unknown key 'dpo'; it is not there yet: it needs pairs of answers"),
        ("check laptop hsdp=2", "unknown key 'hsdp'; in a layout it is 'dpN zero3 shardG'"),
        ("check laptop layout=deepspeed", "layout 'deepspeed': unknown word 'deepspeed'; here it"),
        ("check laptop layout=megatron", "layout 'megatron': unknown word 'megatron'; here it is"),
        ("check laptop layout=ZeRO-3", "layout 'ZeRO-3': unknown word 'ZeRO-3'; write 'zero3'"),
        ("train laptop --warmup-ratio 0.1", "train has no option --warmup-ratio; a warm-up is cou"),
        ("train laptop --adam_beta1=0.9", "train has no option --adam_beta1; both are one list: "),
        ("train laptop --tensor-model-parallel-size 2", "train has no option --tensor-model-paral"),
        ("check laptop optim=muon", "unknown key 'optim'; here it is 'method.optimizer.name'"),
        ("check laptop data.streaming=true", "unknown key 'data.streaming'; it is not there yet"),
        (
            "check laptop data.prompt_template=x",
            "unknown key 'data.prompt_template'; rows with a p",
        ),
        ("export runs/a --gguf", "export has no option --gguf; GGUF is not written; howdah export"),
        (
            "export runs/a --push-to-hub",
            "export has no option --push-to-hub; howdah export RUN wri",
        ),
        ("export runs/a --load-step 5", "export has no option --load-step; the newest checkpoint"),
        (
            "keys muon",
            "'muon' is not there yet: method.optimizer.name is adamw, adam, sgd or rmspr",
        ),
        ("keys bnb", "'bnb' is not there yet: an optimizer's states are float32; zero1 shares the"),
        ("keys streaming", "'streaming' is not there yet: text is tokenised once, into files of"),
    ],
)
def test_what_other_trainers_are_told_is_one_sentence(run, words, sentence):
    code, out, error = run(*words.split())
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"howdah: {sentence}")


# -- completion ------------------------------------------------------------------------


def completed(*words):
    """What the program answers a shell that completes the last of `words`."""
    asked = {"_HOWDAH_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["howdah", *words])}
    environment = {**os.environ, **asked, "COMP_CWORD": str(len(words))}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_program_completes_commands_and_options():
    assert completed("tr") == ["train", "trace"]
    assert set(completed("train", "laptop", "--re")) == {"--restarts", "--resume"}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_bash_completes_with_the_script_that_is_installed():
    """The script of `--show-completion`, as the shell's start file would read it."""
    script = f"""
        source <(_HOWDAH_COMPLETE=source_bash {PROGRAM})
        complete -p howdah
        COMP_WORDS=(howdah exp) COMP_CWORD=1
        _howdah_completion {PROGRAM}
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    registered, found = done.stdout.splitlines()
    assert registered == "complete -o default -F _howdah_completion howdah"
    assert found == "export"
