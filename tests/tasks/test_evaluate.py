"""Scores on a task: those of a plain loop over transformers' model, one text at a time; and what is
wrong with a task file.
"""

import json
import sys
from math import exp, log

import pytest
import torch
from their_folders import TEXT, gpt2

from howdah.base.errors import UserError
from howdah.cli import main as cli
from howdah.comm.transport import SingleRank
from howdah.generate.likelihood import Asked, likelihoods
from howdah.tasks.evaluate import evaluate_task, windows
from howdah.tasks.opened import open_model
from howdah.tasks.task_file import Task, questions, read_task
from howdah.train.loop import train

transformers = pytest.importorskip("transformers")

TEXTS = [TEXT[3], " ".join(TEXT[5:12]), "a dog ran home."]
QUESTIONS = [
    {"question": "the 3 cats sat", "choices": ["on mat 3", "home", "on"], "answer": 0},
    {"question": "said", "choices": ["file 2", "a dog ran home and sat on a mat"], "answer": 1},
    {"question": "a dog ", "choices": ["ran home.", "cats"], "answer": "ran home."},
    {"question": "", "choices": ["the", "and a dog"], "answer": 1},
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    theirs = gpt2(folder, transformers)
    opened = open_model(folder, say=print)
    return theirs, opened, opened.model()


def lines(folder, *records):
    (folder / "lines.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return folder


def scored(both, folder, task):
    _, opened, model = both
    return evaluate_task(opened, model, task, questions(task, folder))


@torch.no_grad()
def log_probs(model, tokens):
    """The log-probability of each of `tokens` but the first, and whether it was the likeliest."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    wanted = torch.tensor(tokens[1:])
    scores = logits[torch.arange(len(wanted)), wanted]
    return scores.tolist(), (logits.argmax(-1) == wanted).tolist()


def test_windows_score_each_token_once_and_the_last_is_full():
    found = [*windows([1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 4)]
    assert [one.wanted for one in found] == [(1, 2, 3, 4), (5, 6, 7, 8), (9,)]
    assert [one.context for one in found] == [(0,), (4,), (5, 6, 7, 8)]
    assert [*windows([1, 2], 0, 4)] == [Asked((0,), (1, 2))]


def test_perplexity_is_that_of_a_plain_loop(both, tmp_path):
    theirs, opened, _ = both
    total = tokens = 0
    for text in TEXTS:
        ids = opened.plain(text)
        for at, token in enumerate(ids):  # each token alone, with what its window shows of the rest
            stop = min((at // 32 + 1) * 32, len(ids))
            before = [0, *ids][max(stop - 32, 0) : at + 1]
            total -= log_probs(theirs, [*before, token])[0][-1]
        tokens += len(ids)
    words, size = sum(len(t.split()) for t in TEXTS), sum(len(t.encode()) for t in TEXTS)
    found = scored(
        both, lines(tmp_path, *({"text": t} for t in TEXTS)), Task("perplexity", "lines.jsonl")
    )
    assert found.samples == 3
    expected = {
        "loss": total / tokens,
        "perplexity": exp(total / tokens),
        "word_perplexity": exp(total / words),
        "bits_per_byte": total / size / log(2),
    }
    assert found.values == pytest.approx(expected, rel=1e-4)


def test_last_words_are_those_of_a_plain_loop(both, tmp_path):
    theirs, opened, _ = both
    hits, total = [], 0.0
    for text in TEXTS[::2]:
        before = text.rpartition(" ")[0]
        front, ids = [0, *opened.plain(before)], [0, *opened.plain(text)]
        scores, best = log_probs(theirs, ids)
        total += sum(scores[len(front) - 1 :])
        hits.append(all(best[len(front) - 1 :]))
    folder = lines(tmp_path, *({"text": t} for t in TEXTS[::2]))
    found = scored(both, folder, Task("last-word", "lines.jsonl"))
    assert found.values["acc"] == sum(hits) / 2
    assert found.values["perplexity"] == pytest.approx(exp(-total / 2), rel=1e-4)


@pytest.mark.parametrize("begin", [True, False])
def test_choices_are_those_of_a_plain_loop(both, tmp_path, begin):
    theirs, opened, _ = both
    hits = {"acc": [], "acc_norm": []}
    for one in QUESTIONS:
        right = (
            one["answer"] if isinstance(one["answer"], int) else one["choices"].index(one["answer"])
        )
        sums = []
        for choice in one["choices"]:
            front = opened.plain(one["question"].rstrip())
            joint = one["question"] + " " + choice
            start = [0] if begin or not front else []
            scores, _ = log_probs(theirs, [*start, *opened.plain(joint)])
            sums.append(sum(scores[len(start) + len(front) - 1 :]))
        normed = [x / len(c) for x, c in zip(sums, one["choices"], strict=True)]
        hits["acc"].append(sums.index(max(sums)) == right)
        hits["acc_norm"].append(normed.index(max(normed)) == right)
    task = Task("multiple-choice", "lines.jsonl", begin=begin)
    found = scored(both, lines(tmp_path, *QUESTIONS), task)
    assert found.values == {name: sum(each) / 4 for name, each in hits.items()}
    share = found.values["acc"]
    assert found.errors["acc"] == pytest.approx((share * (1 - share) / 3) ** 0.5)


def test_a_batch_changes_no_score(both):
    _, _, model = both
    asked = [Asked((0, *range(1, n)), (7, 9, 11)) for n in range(1, 25)]
    together = likelihoods(model, asked)
    for one, found in zip(asked, together, strict=True):
        (alone,) = likelihoods(model, [one])
        assert found.log_prob == pytest.approx(alone.log_prob, rel=1e-4)
        assert found.greedy == alone.greedy


def test_what_is_too_long_stops_or_is_cut(both, tmp_path):
    folder = lines(tmp_path, {"text": TEXTS[1]})
    with pytest.raises(UserError, match=r"line 1: question and choice have \d+ tokens, and the"):
        scored(both, folder, Task("last-word", "lines.jsonl"))
    found = scored(both, folder, Task("last-word", "lines.jsonl", too_long="cut"))
    assert found.samples == 1
    with pytest.raises(UserError, match="a text has 33 tokens, and the model's context is 32"):
        likelihoods(both[2], [Asked((0,) * 33, (1,))])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('kind = "perplexity"', "file is missing"),
        ('kind = "recall"\nfile = "a"', "kind is 'recall'; it must be"),
        ('kind = "perplexity"\nfile = "a"\nfeild = "b"', "unknown key 'feild'; did you mean"),
        ('kind = "perplexity"\nfile = "none.jsonl"', "file is 'none.jsonl', which does not exist"),
        ('kind = "perplexity"\nfile = ".."', "file is '..', which is a folder; name JSON lines"),
        ("kind =", "cannot read"),
    ],
)
def test_a_task_file_that_is_wrong_is_told(tmp_path, text, sentence):
    (tmp_path / "task.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_task(tmp_path / "task.toml")


@pytest.mark.parametrize(
    ("kind", "line", "sentence"),
    [
        ("perplexity", "{}", "line 1: no field 'text'"),
        ("perplexity", '{"text": 3}', "line 1: the field 'text' must be a text"),
        ("perplexity", '{"text": " "}', "line 1: the field 'text' is empty"),
        ("perplexity", "[1]", "line 1: not an object"),
        ("perplexity", "{", "line 1: not JSON"),
        ("perplexity", "", "holds no question"),
        ("last-word", '{"text": "one"}', "line 1: 'one' has no word before its last"),
        ("multiple-choice", '{"question": "a", "choices": ["b"]}', "must be a list of 2 texts"),
        (
            "multiple-choice",
            '{"question": "a", "choices": ["b", "c"], "answer": 2}',
            "the field 'answer' is 2; it must be a choice, or its number from 0 to 1",
        ),
    ],
)
def test_a_line_that_is_wrong_is_told(tmp_path, kind, line, sentence):
    (tmp_path / "lines.jsonl").write_text(line)
    with pytest.raises(UserError, match=sentence):
        questions(Task(kind, "lines.jsonl"), tmp_path)


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["howdah", *words])
    return cli.run()


def test_the_command_scores_a_run(make_job, tmp_path, monkeypatch, capsys):
    train(make_job("a", "train.steps=1"), SingleRank())
    lines(tmp_path, {"text": "3 follows 2, says file 1"}, {"text": "8 follows"})
    (tmp_path / "task.json").write_text('{"kind": "last-word", "file": "lines.jsonl"}')
    asked = [str(tmp_path / "a"), "--task", str(tmp_path / "task.json")]
    capsys.readouterr()
    assert command(monkeypatch, "eval", *asked) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "last-word: 2 lines of lines.jsonl"
    assert told[1].startswith("acc ") and told[2].startswith("perplexity ")
    assert command(monkeypatch, "eval", *asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 2 and {"acc", "acc_stderr", "perplexity"} < set(found)
    assert command(monkeypatch, "eval", str(tmp_path / "none"), *asked[1:]) == 2
    assert command(monkeypatch, "eval", asked[0], "--task", str(tmp_path / "no.toml")) == 2
