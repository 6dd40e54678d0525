"""`howdah init` writes a recipe that `howdah check` finds sound: by options, and on a terminal."""

import os
import pty
import subprocess
import sys
import tomllib

import pytest

from howdah.cli import auto, check, init
from howdah.host import precision as host_precision

DATA = "synthetic:1MB"
ALL = ("--model", "laptop", "--data", DATA, "--machine", "here", "--length", "20 steps")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"steps": 500, "evaluate_every": 50}),
        (("--length", "1e6 tokens"), {"tokens": 10**6, "evaluate_every": 48}),
        pytest.param(
            ("--length", "2 epochs"), {"epochs": 2, "evaluate_every": 100}, marks=pytest.mark.slow
        ),
        (("--length", "7", "--for", "try"), {"steps": 7, "log_every": 1}),
    ],
)
def test_answers_by_options_make_a_sound_recipe(howdah, here, words, expected):
    code, out, error = howdah("init", "mine.toml", "--data", DATA, *words)
    assert code == 0, error
    assert "\nsound: mine on " in out and out.endswith(": howdah train mine.toml\n")
    found = tomllib.loads((here / "mine.toml").read_text())
    assert expected.items() <= found["train"].items() and found["layout"] != "auto"
    code, out, _ = howdah("check", "mine.toml")
    assert code == 0 and out.startswith("mine.toml: sound: mine on ")
    assert [path.name for path in here.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(("there", "precision"), [([], "float32"), (["amx_bf16"], "bf16")])
def test_a_recipe_for_this_machine_is_in_a_precision_that_it_has(
    howdah, here, monkeypatch, there, precision
):
    """A recipe of half an hour took 34 on a processor without bf16, and nothing said so."""
    monkeypatch.setattr(check, "has_card", lambda: False)
    for module in (init, auto, host_precision):
        monkeypatch.setattr(module, "bf16_instructions", lambda: there)
    code, out, error = howdah("init", "mine.toml", "--data", DATA, "--length", "30 minutes")
    assert code == 0, error
    asked = "no terminal to ask on, so as usual: --model 'laptop' --machine 'here' --for 'scratch'"
    assert out.startswith(f"{asked}\n")
    found = tomllib.loads((here / "mine.toml").read_text())
    assert found["method"]["precision"] == precision
    slow = "note: this processor has no arithmetic in bf16; method.precision=float32 is many times"
    said = howdah("check", "mine.toml", "method.precision=bf16")[1]
    assert (slow in said) == (not there)
    assert slow not in howdah("check", "mine.toml", "method.precision=float32")[1]
    if not there:  # its time is another one, too
        words = ("--data", DATA, "--length", "30 minutes", "--machine", "laptop-cpu")
        assert howdah("init", "other.toml", *words)[0] == 0
        other = tomllib.loads((here / "other.toml").read_text())
        assert other["method"]["precision"] == "bf16"


@pytest.mark.slow
def test_a_length_in_minutes_is_as_many_steps_as_are_predicted(howdah, here):
    for name, length in (("a.toml", "10 minutes"), ("b.toml", "20 min")):
        assert howdah("init", name, "--data", DATA, "--length", length)[0] == 0
    one, two = (tomllib.loads((here / f"{n}.toml").read_text())["train"]["steps"] for n in "ab")
    assert one > 10 and abs(two - 2 * one) <= 1


def test_a_recipe_for_another_machine(howdah, here, monkeypatch):
    monkeypatch.setattr(check, "has_card", lambda: False)
    words = ("--data", DATA, "--machine", "h100x8", "--model", "llama3-1b", "--length", "1B tokens")
    code, out, error = howdah("init", "big.toml", *words)
    assert code == 0, error
    found = tomllib.loads((here / "big.toml").read_text())
    assert "8 ranks" in out and "fastest of" in (here / "big.toml").read_text()
    assert found["method"]["lr"]["peak"] == 2e-4 and found["data"]["sequence_length"] == 2048
    assert found["cluster"] == "h100x8"
    code, out, _ = howdah("check", "big.toml")
    assert code == 0 and "no arithmetic in bf16" not in out
    code, _, error = howdah("check", "big.toml", "layout=dp8", "cluster=l4x8")
    assert code == 2 and " a device, and l4x8 has " in error and "fits" in error


@pytest.fixture
def weights(howdah, recipe, here):
    """A folder of Hugging Face, with a chat template."""
    assert howdah("train", recipe, "train.steps=1", "train.export=true", "folder=run")[0] == 0
    said = "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    of_others = "{{ m.content }}"
    turn = "{% if m.role == 'assistant' %}" + said + "{% else %}" + of_others + "{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    (here / "run" / "export" / "chat_template.jinja").write_text(template)
    return "run/export"


@pytest.mark.slow
def test_recipes_that_go_on_from_weights(howdah, here, weights):
    rows = {"texts": ('{"text": "%d follows", "label": "%s"}', "ab"), "chat": (CHAT, "cd")}
    for name, (row, labels) in rows.items():
        lines = [row % (n, labels[n % 2]) for n in range(400)]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
    for purpose, data in (("tune", DATA), ("classify", "texts.jsonl"), ("chat", "chat.jsonl")):
        words = ("--model", weights, "--data", data, "--for", purpose, "--length", "2 steps")
        code, _, error = howdah("init", f"{purpose}.toml", *words)
        assert code == 0, error
        found = tomllib.loads((here / f"{purpose}.toml").read_text())
        assert found["init_from"] == weights and found["method"]["lr"]["peak"] == 1e-5
        assert howdah("train", f"{purpose}.toml")[0] == 0


CHAT = (
    '{"messages": [{"role": "user", "content": "what is it %d"}, '
    '{"role": "assistant", "content": "it is %s"}]}'
)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "laptp"), "--model 'laptp' is neither a preset nor a folder here; did you"),
        (("--model", "."), "--model '.' is a folder without config.json"),
        (("--data", "nowhere"), "--data: nowhere does not exist"),
        (("--machine", "h1000"), "cluster 'h1000' is unknown"),
        (("--length", "soon"), "--length is 'soon'; write it like '500 steps'"),
        (("--length", "0 epochs"), "--length is '0 epochs'"),
        (("--length", "1e400 minutes"), "--length is '1e400 minutes'"),
        (("--length", "1000000 minutes"), "--length is "),
        (("--length", "20M steps"), "--length is 20,000,000 steps, and a run has at most 10,000,0"),
        (("--length", "2000000 epochs"), "--length is 2,000,000 epochs, and a run has at most 1,0"),
        (("--for", "fun"), "--for is 'fun'; it must be scratch, tune, chat, classify, try"),
        (("--for", "tune"), "--for tune goes on from weights, and the preset laptop has none"),
    ],
)
def test_a_wrong_answer_is_one_sentence_and_nothing_is_written(refused, here, words, said):
    assert refused("init", "mine.toml", *ALL, *words).startswith(said)
    assert [*here.iterdir()] == []


def test_too_little_text_is_one_sentence_and_nothing_is_written(refused, here):
    (here / "few.txt").write_text("a few words")
    told = refused("init", "mine.toml", *ALL, "--data", "few.txt")
    assert told.startswith("--data 'few.txt' holds 11 bytes, and one sample of this recipe has ")
    assert [*here.iterdir()] == [here / "few.txt"]


def test_a_file_is_never_written_over_unless_that_is_said(howdah, refused, here):
    (here / "mine.toml").write_text("mine")
    assert refused("init", "mine.toml", *ALL).startswith("mine.toml is there already")
    assert (here / "mine.toml").read_text() == "mine"
    assert howdah("init", "mine.toml", *ALL, "--force")[0] == 0
    assert (here / "mine.toml").read_text() != "mine"
    assert refused("init", "mine.txt").startswith("mine.txt is no name of a recipe")


@pytest.mark.processes
def test_questions_on_a_terminal(environment, tmp_path):
    """Wrong answers are asked again; an empty one is the usual answer, which is shown."""
    own, other = pty.openpty()
    command = [sys.executable, "-m", "howdah", "init", "mine.toml"]
    how = {"stdin": other, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    answers = ["laptp", "laptop", DATA, "", "soon", "30 steps", "tune", "try"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **how)
    os.close(other)
    with process:
        os.write(own, "".join(f"{one}\n" for one in answers).encode())
        out, _ = process.communicate(timeout=60)
    os.close(own)
    assert process.returncode == 0, out
    said = " ".join(out.split())  # a terminal's lines are wrapped
    assert "did you mean 'laptop'?" in said and "(laptop)" in said and "(500 steps)" in said
    assert "--length is 'soon'" in said and "--for tune goes on from weights" in said
    found = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert found["train"] == {"steps": 30, "log_every": 1}


@pytest.mark.processes
def test_the_end_of_the_input_is_one_sentence(environment, tmp_path):
    own, other = pty.openpty()
    command = [sys.executable, "-m", "howdah", "init", "mine.toml"]
    how = {"stdin": other, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **how) as process:
        os.close(other)
        os.write(own, b"laptop\n\x04")
        _, error = process.communicate(timeout=60)
    os.close(own)
    assert process.returncode == 2 and error == "howdah: --data was not answered; give it\n"
