"""`howdah sample` of an encoder-decoder: of a run, of its export, and beside transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

import howdah
from howdah.cli import main as cli
from howdah.comm.transport import SingleRank
from howdah.tasks.opened import open_model
from howdah.train.loop import train

T5 = (
    *('model.family="encoder-decoder"', "model.encoder_layers=2", 'model.positions="relative"'),
    *('model.norm="rmsnorm"', "model.norm_eps=1e-6", 'model.feedforward="geglu"'),
    *("model.vocab=380", "train.steps=1", "train.export=true"),
)
SOURCES = ("7 follows <extra_id_0> says", "")


@pytest.mark.slow
def test_a_source_is_answered_and_an_export_answers_alike(make_job, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    train(make_job("a", *T5), SingleRank())
    folder = tmp_path / "a"

    def sample(where: Path, *words: str) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["howdah", "sample", str(where), *words])
        code = cli.run()
        return code, "".join(capsys.readouterr())

    words = transformers.AutoTokenizer.from_pretrained(folder / "export")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "export")
    expected = []
    for source in SOURCES:
        read = words(source, return_tensors="pt")
        assert read["input_ids"][0].tolist() == open_model(folder, say=print).prompt(source)
        written = theirs.generate(**read, max_new_tokens=6, do_sample=False)[0, 1:]
        expected.append(words.decode([token for token in written if token != 0]))
    for where in (folder, folder / "export"):
        code, told = sample(where, *SOURCES, "--length", "6", "--temperature", "0")
        assert (code, told.splitlines()) == (0, expected)
    assert (
        sample(folder, SOURCES[0], "--length", "6", "--temperature", "0")[1] == f"{expected[0]}\n"
    )
    last = ("--length", "6", "--temperature", "0", "--layout", "pp2")
    found = subprocess.run(  # a terminal's view: ranks write to the same output
        [sys.executable, "-m", "howdah", "sample", str(folder), *SOURCES, *last],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == expected
    answer = howdah.pipeline("summarization", folder)(SOURCES[0], max_new_tokens=6)
    assert set(answer) == {"summary_text"}
