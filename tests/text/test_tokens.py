"""The token cache: built once, by one process, whole or not at all, and opened without reading."""

import fcntl
import json
import signal
import sys
import threading
from subprocess import PIPE, Popen

import numpy as np
import pytest
from full_disk import fill, small_disk
from made_corpus import corpus, stream

from howdah.base.errors import UserError
from howdah.text import tokenizer as tokenizers
from howdah.text import tokens as cache
from howdah.text.sources import Data, Source, Text
from howdah.text.tokens import prepare, require_samples

TEXTS = [f"document {i}: naïve café 😀 <|end|>\n" for i in range(40)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Source(str(path))


def ready(source, tmp_path, *, vocab=300, say=lambda sentence: None, **settings):
    data = Data((source,), **{"validation_share": 0.2, **settings})
    return prepare(data, vocab=vocab, cache=tmp_path / "cache", say=say)


def texts_of(made, tokens):
    stops = [*tokens.starts[1:], len(tokens.ids) - 1]
    return [
        made.tokenizer.decode(tokens.ids[start + 1 : stop].tolist(), skip_special_tokens=False)
        for start, stop in zip(tokens.starts, stops, strict=True)
    ]


def test_all_documents_come_back_each_on_one_side(tmp_path, source):
    made = ready(source, tmp_path)
    train, held_out = texts_of(made, made.sources[0]), texts_of(made, made.held_out)
    assert sorted(train + held_out) == sorted(TEXTS)
    assert train and held_out
    assert made.documents == 40 and made.skipped == 0
    assert made.held_out_bytes == sum(len(text.encode()) for text in held_out)
    assert made.held_out_xz > 0 and made.held_out_gzip > 0


def test_streams_start_and_end_with_ends_and_have_no_others(tmp_path, source):
    made = ready(source, tmp_path)
    for tokens in (made.sources[0], made.held_out):
        assert tokens.ids.dtype == np.uint16
        where = np.flatnonzero(tokens.ids == made.end)
        assert where.tolist() == [*tokens.starts, len(tokens.ids) - 1]
        assert tokens.starts[0] == 0


def test_the_second_time_nothing_is_read(tmp_path, source, monkeypatch):
    first = ready(source, tmp_path)
    monkeypatch.setattr(cache, "build", None)
    said = []
    again = ready(Source(source.path, weight=3.0), tmp_path, say=said.append, sequence_length=7)
    assert said == []
    assert again.folder == first.folder
    assert again.weights == (3.0,)
    np.testing.assert_array_equal(again.sources[0].ids, first.sources[0].ids)


def test_what_tokens_depend_on_gives_another_folder(tmp_path, source):
    folders = {ready(source, tmp_path).folder}
    folders.add(ready(source, tmp_path, vocab=299).folder)
    folders.add(ready(source, tmp_path, validation_share=0.3).folder)
    folders.add(ready(source, tmp_path, undecodable="stop").folder)
    held = Text(str(tmp_path / "held.txt"))
    for text in ("one", "two"):
        (tmp_path / "held.txt").write_text(text)
        folders.add(ready(source, tmp_path, validation=(held,)).folder)
    with open(source.path, "a") as file:
        file.write('{"text": "one more"}\n')
    folders.add(ready(source, tmp_path).folder)
    assert len(folders) == 7


def test_the_same_text_gives_the_same_files(tmp_path, source):
    one = ready(source, tmp_path / "one").folder
    two = ready(source, tmp_path / "two").folder
    assert one.name == two.name
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()


# -- one builds, the others wait -----------------------------------------------

PREPARE = """
import os, signal, sys
from pathlib import Path
from howdah.text.sources import Data, Source
from howdah.text.tokens import prepare

def progress(share):
    if {kill}:
        os.kill(os.getpid(), signal.SIGKILL)

data = Data((Source({path!r}),), validation_share=0.2)
made = prepare(data, vocab=300, cache=Path({cache!r}), say=print, progress=progress)
print("tokens", len(made.sources[0].ids))
"""


def other(tmp_path, source, kill=False):
    code = PREPARE.format(kill=kill, path=source.path, cache=str(tmp_path / "cache"))
    return Popen([sys.executable, "-c", code], stdout=PIPE, text=True)


def test_of_two_processes_one_builds(tmp_path, source):
    processes = [other(tmp_path, source) for _ in range(2)]
    said = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("encoding" in lines for lines in said) == [False, True]
    assert said[0][-1] == said[1][-1] and said[0][-1].startswith("tokens ")


def test_who_finds_the_lock_taken_says_so_and_waits(tmp_path, source):
    key = ready(source, tmp_path / "elsewhere").folder.name
    (tmp_path / "cache").mkdir()
    said, waiting = [], threading.Event()

    def say(sentence):
        said.append(sentence)
        waiting.set()

    with (tmp_path / "cache" / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=ready, args=(source, tmp_path), kwargs={"say": say})
        thread.start()
        waiting.wait()
        assert said == ["waiting for another process that is tokenising the same text"]
        assert not (tmp_path / "cache" / key).exists()
    thread.join()
    assert (tmp_path / "cache" / key).is_dir()


def test_a_builder_that_is_killed_leaves_nothing_that_counts(tmp_path, source):
    killed = other(tmp_path, source, kill=True)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    left = [path.suffix for path in (tmp_path / "cache").iterdir()]
    assert sorted(left) == [".lock", ".unfinished"]
    said = []
    made = ready(source, tmp_path, say=said.append)
    assert said[0].startswith("removing ")
    assert sorted(texts_of(made, made.sources[0]) + texts_of(made, made.held_out)) == sorted(TEXTS)
    assert not made.folder.with_suffix(".unfinished").exists()


def test_a_builder_that_is_interrupted_clears_up(tmp_path, source):
    def interrupt(share):
        raise KeyboardInterrupt

    data = Data((source,), validation_share=0.2)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, vocab=300, cache=tmp_path / "cache", say=str, progress=interrupt)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# -- tokenizers that are brought along -----------------------------------------


def test_a_brought_tokenizer_is_used_and_kept(tmp_path, source):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizers.train(TEXTS, 270).to_str())
    made = ready(source, tmp_path, tokenizer=str(path))
    assert made.fingerprint == tokenizers.fingerprint(path)
    assert made.tokenizer_path.read_bytes() == path.read_bytes()
    path.unlink()
    assert sorted(texts_of(made, made.sources[0]) + texts_of(made, made.held_out)) == sorted(TEXTS)


def test_documents_end_with_the_token_that_is_named(tmp_path, source):
    own = tokenizers.train(TEXTS, 270)
    own.add_special_tokens(["[EOD]"])
    path = tmp_path / "tokenizer.json"
    path.write_text(own.to_str())
    usual, other = (
        ready(source, tmp_path, tokenizer=str(path), end_token=end) for end in (None, "[EOD]")
    )
    assert (usual.end, other.end) == (own.token_to_id("<|end|>"), own.token_to_id("[EOD]"))
    assert other.sources[0].ids[0] == other.end and usual.folder != other.folder
    with pytest.raises(UserError, match=r"data\.end_token is '\[EOP\]', which .* does not have"):
        ready(source, tmp_path, tokenizer=str(path), end_token="[EOP]")


@pytest.mark.parametrize("cached", [False, True])
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, source, cached):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizers.train(TEXTS, 270).to_str())
    if cached:
        ready(source, tmp_path, tokenizer=str(path), vocab=270)
    with pytest.raises(UserError, match=r"has 270 entries but model\.vocab is 269"):
        ready(source, tmp_path, tokenizer=str(path), vocab=269)


def test_large_vocabularies_take_four_bytes_a_token(tmp_path, source):
    trained = json.loads(tokenizers.train(TEXTS, 260).to_str())
    trained["added_tokens"][0]["id"] = 70_000
    vocab = trained["model"]["vocab"]
    vocab["<|end|>"] = 70_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(trained))
    made = ready(source, tmp_path, tokenizer=str(path), vocab=80_000)
    assert made.end == made.held_out.ids[0] == 70_000
    assert made.held_out.ids.dtype == np.uint32


# -- what can be wrong ---------------------------------------------------------


def test_a_damaged_cache_is_said_to_be(tmp_path, source):
    folder = ready(source, tmp_path).folder
    ids = folder / "source0.ids"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"damaged \(source0\.ids should hold \d+ bytes\); remove"):
        ready(source, tmp_path)
    ids.unlink()
    with pytest.raises(UserError, match="damaged"):
        ready(source, tmp_path)
    ids.write_bytes(whole)
    ready(source, tmp_path)
    (folder / "corpus.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        ready(source, tmp_path)


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path, source):
    (tmp_path / "cache").write_text("a file stands in the way")
    with pytest.raises(UserError, match=r"the token cache .*cache cannot be used"):
        ready(source, tmp_path)


@pytest.mark.root
def test_a_cache_on_a_full_disk_is_a_sentence(tmp_path, source):
    disk = tmp_path / "cache"
    disk.mkdir()
    with small_disk(disk, 64 << 10):
        filler = fill(disk)
        with pytest.raises(
            UserError, match=r"the token cache .*cache cannot be used \(No space left"
        ):
            ready(source, tmp_path)
        assert {path.suffix for path in disk.iterdir()} <= {"", ".lock"}
        filler.unlink()
        ready(source, tmp_path)


def test_a_bad_line_leaves_nothing_behind(tmp_path, source):
    with open(source.path, "a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match="line 41: not JSON"):
        ready(source, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_too_little_text_is_refused_with_numbers():
    made = corpus(stream(9), stream(3, first=100))
    assert [tokens.samples(4) for tokens in made.sources] == [2, 1]
    require_samples(made, sequence=4, batch=3)
    with pytest.raises(UserError, match=r"there are 3 samples of 4 tokens .* one batch takes 4"):
        require_samples(made, sequence=4, batch=4)
    with pytest.raises(UserError, match=r"source 1 has 5 tokens .* one sample takes 6"):
        require_samples(made, sequence=5, batch=1)


def test_windows_count_the_last_part_and_samples_do_not():
    tokens = stream(9)  # 11 tokens: 10 to predict
    assert (tokens.samples(5), tokens.windows(5)) == (2, 2)
    assert (tokens.samples(4), tokens.windows(4)) == (2, 3)
    assert (tokens.samples(11), tokens.windows(11)) == (0, 1)
