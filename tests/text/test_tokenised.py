"""Files of tokens: the documents of nanoGPT, llm.c and Megatron-LM, and what is wrong with one.

The files are written here as their programs write them: nanoGPT's prepare.py, llm.c's
data_common.py, and Megatron-LM's IndexedDatasetBuilder.
"""

import struct
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.text import tokenizer as tokenizers
from howdah.text.batches import Rows, micros, order_of
from howdah.text.contents import contents
from howdah.text.records import Fields
from howdah.text.sources import Data, Source, Text, check_sources
from howdah.text.tokenised import ALONE, Known, parts, split
from howdah.text.tokens import prepare

END, KNOWN = 0, Known(0, 300)
DOCUMENTS = [[7, 8, 9], [10], [11, 12, 13, 14], [15, 16], [17, 299]]


def nano(path, documents=DOCUMENTS):
    """Each document and its end token, as 16-bit numbers."""
    flat = [token for document in documents for token in (*document, END)]
    np.array(flat, np.uint16).tofile(path)
    return path


def llm_c(path, documents=DOCUMENTS):
    """A header of 256 numbers of 32 bits; the end token stands in front of each document."""
    flat = [token for document in documents for token in (END, *document)]
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(flat)
    path.write_bytes(header.tobytes() + np.array(flat, np.uint16).tobytes())
    return path


def megatron(path, documents=DOCUMENTS, dtype=np.uint16, code=8):
    """Two sequences to the first document, else one each; documents end with the end token."""
    sequences = [documents[0][:1], [*documents[0][1:], END], *([*d, END] for d in documents[1:])]
    np.concatenate([np.array(one, dtype) for one in sequences]).tofile(path)
    lengths = np.array([len(one) for one in sequences], np.int32)
    places = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * np.dtype(dtype).itemsize
    bounds = np.array([0, *range(2, len(sequences) + 1)], np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    rest = lengths.tobytes() + places.tobytes() + bounds.tobytes()
    path.with_suffix(".idx").write_bytes(head + rest)
    return path


WRITERS = {
    "nanoGPT": nano,
    "llm.c": llm_c,
    "Megatron": megatron,
    "Megatron int32": lambda path: megatron(path, dtype=np.int32, code=4),
}


def read(path, known=KNOWN):
    found = parts(path, take=Fields("text"), bad=print)
    return [one.ids.tolist() for part in found for one in split(part, known)]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_documents_are_those_that_were_written(tmp_path, write):
    assert [one for one in read(write(tmp_path / "train.bin")) if one] == DOCUMENTS


def test_tokens_without_an_end_are_cut(tmp_path):
    np.arange(2 * ALONE + 5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    found = read(tmp_path / "a.bin", Known(65535, 65536))
    assert [len(one) for one in found] == [ALONE, ALONE, 5]
    assert [*chain(*found)] == list(range(2 * ALONE + 5))


@pytest.fixture
def tokenizer(tmp_path):
    text = (f"{n} cats and {n % 9} dogs" for n in range(300))
    tokenizers.train(text, 300).save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def prepared(tokenizer, cache, *sources, **how):
    data = Data(sources=sources, tokenizer=tokenizer, **how)
    return prepare(data, vocab=300, cache=cache, say=print, check=True)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_run_on_tokens_reads_those_of_the_file(tmp_path, tokenizer, write):
    write(tmp_path / "train.bin")
    held = nano(tmp_path / "val.bin", [[40, 41]])
    made = prepared(
        tokenizer,
        tmp_path / "cache",
        Source(str(tmp_path / "train.bin")),
        validation=(Text(str(held)),),
    )
    assert made.sources[0].ids.tolist() == [0, *chain(*([*d, 0] for d in DOCUMENTS))]
    assert made.held_out.ids.tolist() == [0, 40, 41, 0]
    told = made.tokenizer.decode([40, 41])
    assert made.held_out_bytes == len(told.encode())
    order = order_of(made, sequence=4, seed=1)
    (micro,) = micros(made, order, Rows(4), first=0, size=4)
    assert sorted(micro.labels[micro.labels != -100].tolist()) == sorted(
        made.sources[0].ids[1:17].tolist()
    )


def test_tokens_and_text_are_mixed_by_their_weights(tmp_path, tokenizer):
    many = [[n, n + 1, n + 2] for n in range(1, 290)]
    nano(tmp_path / "train.bin", many)
    (tmp_path / "text").mkdir()
    for n in range(9):
        (tmp_path / "text" / f"{n}.txt").write_text(f"{n} cats and dogs " * 40)
    made = prepared(
        tokenizer,
        tmp_path / "cache",
        Source(str(tmp_path / "train.bin"), weight=3),
        Source(str(tmp_path / "text")),
    )
    order = order_of(made, sequence=8, seed=1)
    assert order.shares == (750, 250)


def test_another_index_is_another_corpus(tmp_path):
    source = Source(str(megatron(tmp_path / "a.bin")))
    before = contents(source)
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[-8] ^= 1
    (tmp_path / "a.idx").write_bytes(bytes(data))
    assert contents(source) != before


def test_tokens_need_the_tokenizer_that_made_them():
    (problem,) = check_sources(Data(sources=(Source("train.bin"),)))
    assert problem == (
        "data.sources[0].path is 'train.bin', tokens already; name the tokenizer that made them in "
        "data.tokenizer"
    )
    assert not [*check_sources(Data(sources=(Source("train.bin"),), tokenizer="t.json"))]


def broken(path, change):
    megatron(path)
    data = bytearray(path.with_suffix(".idx").read_bytes())
    path.with_suffix(".idx").write_bytes(bytes(change(data)))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: nano(path, [[7, 300]]), r"token number 1 is 300, and data.tokenizer has 300"),
        (lambda path: megatron(path, [[7], [300]]), r"document 1: token number 0 is 300"),
        (lambda path: path.write_bytes(b"abc"), r"it has 3 bytes, and tokens take 2 each"),
        (lambda path: path.write_bytes(b"MMIDIDX\0\0 and more"), r"it is an index; name the .bin"),
        (lambda path: llm_c(path).write_bytes(path.read_bytes()[:-4]), "its header says 17 tokens"),
        (lambda path: broken(path, lambda data: data[:40]), "a.idx is cut off"),
        (lambda path: broken(path, lambda data: data[:9]), "a.idx is no index of Megatron-LM"),
        (lambda path: broken(path, lambda data: replaced(data, 17, 6)), "version 1 and type 6"),
        (lambda path: broken(path, lambda data: replaced(data, 34, 9)), "a.idx says another size"),
        (lambda path: broken(path, lambda data: replaced(data, -8, 9)), "documents out of order"),
    ],
)
def test_a_file_that_is_wrong_is_told(tmp_path, write, sentence):
    write(tmp_path / "a.bin")
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / "a.bin")


def replaced(data, at, value):
    data[at] = value
    return data


def test_a_source_of_tokens_has_a_cache_of_its_own(tmp_path, tokenizer):
    source = Source(str(nano(tmp_path / "train.bin")))
    one = prepared(tokenizer, tmp_path / "cache", source)
    nano(tmp_path / "train.bin", [*DOCUMENTS, [3]])
    two = prepared(tokenizer, tmp_path / "cache", replace(source, weight=2.0))
    assert one.folder != two.folder and two.documents == one.documents + 1
