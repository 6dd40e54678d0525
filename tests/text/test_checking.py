"""A token cache that does not hold what was written into it: found, said, and built anew."""

import json
import os
import shutil
import threading

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.text import checking
from howdah.text.checking import damage, read_index, sealed, sum_of
from howdah.text.sources import Data, Source
from howdah.text.tokens import prepare


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(60)))
    return Source(str(path))


def ready(source, cache, said=None, **settings):
    say = (lambda sentence: None) if said is None else said.append
    data = Data((source,), validation_share=0.2)
    return prepare(data, vocab=300, cache=cache, say=say, check=True, **settings)


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    return ready(source, tmp_path_factory.mktemp("cache")).folder


@pytest.fixture
def folder(built, tmp_path):
    """A copy of a sound cache."""
    return shutil.copytree(built, tmp_path / "cache" / built.name)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, at=-1, bit=1):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def ones(path):
    path.write_bytes(b"\xff" * path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def grow(path):
    path.write_bytes(path.read_bytes() + bytes(8))


def remove(path):
    path.unlink()


FILES = [
    *("source0.ids", "source0.starts", "held_out.ids", "held_out.starts"),
    *("tokenizer.json", "corpus.json"),
]


@pytest.mark.parametrize("content", [b"", b"7", b"null", b'"a"', b"[]", b"{}", b"[" * 100_000])
def test_an_index_that_is_none_is_a_sentence_and_built_anew(source, folder, built, content):
    (folder / "corpus.json").write_bytes(content)
    with pytest.raises(UserError, match=r"the token cache .* is damaged \(.*\); remove it"):
        prepare(Data((source,), validation_share=0.2), vocab=300, cache=folder.parent, say=str)
    ready(source, folder.parent)
    assert contents(folder) == contents(built)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [flip, zero, ones, cut, grow, remove])
def test_a_damaged_cache_is_built_anew(source, folder, built, file, harm):
    harm(folder / file)
    said = []
    made = ready(source, folder.parent, said)
    first = f"the token cache {folder} is damaged ("
    assert said[0].startswith(first) and said[0].endswith("); building it again")
    if harm is not ones and file != "corpus.json":
        assert said[0].startswith(f"{first}{file} ")
    assert contents(folder) == contents(built) and made.folder == folder
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock"]


def test_every_bit_counts(folder, monkeypatch):
    monkeypatch.setattr(checking, "BLOCK", 16)  # so that most of them are not in the first block
    assert damage(folder) is None
    for file in FILES:
        size = (folder / file).stat().st_size
        for at in range(0, size, max(size // 40, 1)):
            flip(folder / file, at, 1 << at % 8)
            assert damage(folder) is not None, (file, at)
            flip(folder / file, at, 1 << at % 8)
    assert damage(folder) is None


def test_whoever_does_not_ask_reads_no_tokens(source, folder):
    """As the ranks of a run do, when the process that started them has asked."""
    zero(folder / "source0.ids")
    data = Data((source,), validation_share=0.2)
    prepare(data, vocab=300, cache=folder.parent, say=str)
    flip(folder / "corpus.json", 40)
    with pytest.raises(UserError, match=r"the token cache .* is damaged \(.*\); remove it"):
        prepare(data, vocab=300, cache=folder.parent, say=str)


def test_of_two_who_find_damage_one_builds(source, folder, built):
    zero(folder / "source0.starts")
    said, start = [], threading.Barrier(2)

    def ask():
        start.wait()
        ready(source, folder.parent, said)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.count("encoding") == 1
    assert contents(folder) == contents(built)


def test_a_sound_cache_is_left_alone(source, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    said = []
    ready(source, folder.parent, said)
    assert said == [] and {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# -- written wrong, with a right checksum ----------------------------------------


def rewrite(folder, name, kind, change):
    """Changes the numbers of a stream, and its checksums with it."""
    index = read_index(folder)
    path, count = folder / f"{name}.{kind}", index["tokens"][name]
    numbers = np.fromfile(path, count["dtype"] if kind == "ids" else np.int64)
    change(numbers)
    path.write_bytes(numbers.tobytes())
    count[f"{kind}_crc32"] = sum_of(path)
    (folder / "corpus.json").write_text(sealed({**index}))


def put(at, value):
    def change(numbers):
        numbers[at] = value

    return change


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("ids", put(1, 60_000), "source0.ids has token 60000, and the tokenizer has "),
        ("ids", put(0, 5), "source0.ids has documents that do not stand between end tokens"),
        ("ids", put(-1, 5), "source0.ids has documents that do not stand between end tokens"),
        ("starts", put(0, 1), "source0.starts has documents out of order"),
        ("starts", put(2, 0), "source0.starts has documents out of order"),
        ("starts", put(1, 2), "source0.ids has documents that do not stand between end tokens"),
        ("starts", put(-1, 10**15), "source0.ids has documents that do not stand between end "),
    ],
)
def test_numbers_that_mean_nothing_are_found(folder, monkeypatch, kind, change, sentence):
    rewrite(folder, "source0", kind, lambda numbers: None)
    assert damage(folder) is None
    rewrite(folder, "source0", kind, change)
    for block in (16, checking.BLOCK):
        monkeypatch.setattr(checking, "BLOCK", block)
        assert damage(folder).startswith(sentence)


def test_a_document_behind_the_last_end_is_found(folder):
    last = (folder / "source0.ids").stat().st_size // 2 - 1
    rewrite(folder, "source0", "starts", put(-1, last))
    assert "do not stand between end tokens" in damage(folder)


NO_COUNT = [None, True, -1, 1.5, "x", 1 << 63, [], {}]
WRONG = {
    "facts/held_out_bytes": [*NO_COUNT, 0],
    "facts/held_out_gzip": NO_COUNT,
    "facts/entries": [*NO_COUNT, 0],
    "facts/end": NO_COUNT,
    "facts/documents": NO_COUNT,
    "facts/fingerprint": [None, 1, []],
    "facts/another": [1],
    "facts": [None, 1, [], {}],
    "tokens": [None, 1, []],
    "tokens/source0": [None, 1, [], {}],
    "tokens/source0/dtype": [None, 1, [], "object", "float64", "int16", "V99999"],
    "tokens/source0/ids": NO_COUNT,
    "tokens/source0/starts_crc32": NO_COUNT,
    "tokens/..": [{}],
    "files": [None, 1, []],
    "files/tokenizer.json": NO_COUNT,
    "files/../../x": [1],
    "files/a\0b": [1],
}


@pytest.mark.parametrize("path", WRONG)
def test_an_index_is_not_believed(source, folder, built, path):
    """Behind a right checksum, too: a run divided by a held-out text of no bytes, at its end."""
    for value in WRONG[path]:
        index = read_index(built)
        *owners, last = path.split("/") if "../" not in path else ("files", "../../x")
        owner = index
        for name in owners:
            owner = owner[name]
        owner[last] = value
        (folder / "corpus.json").write_text(sealed(index))
        with pytest.raises(UserError, match=r"the token cache .* is damaged \(.*\); remove it"):
            prepare(Data((source,), validation_share=0.2), vocab=300, cache=folder.parent, say=str)
    ready(source, folder.parent)
    assert contents(folder) == contents(built)


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(source, folder, built, file):
    (folder / file).unlink()
    os.mkfifo(folder / file)
    ready(source, folder.parent)
    assert contents(folder) == contents(built)
