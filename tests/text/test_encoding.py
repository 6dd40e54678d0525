"""Encoding: streams of ends and documents, chunk after chunk."""

import gzip
import lzma

import numpy as np
import pytest

from howdah.text import encoding, tokenizer
from howdah.text.encoding import Scales, Stream, encode


@pytest.fixture
def spelled():
    return tokenizer.train(["abcd"], 257)


def test_documents_stand_between_ends_whatever_the_chunks(tmp_path, spelled, monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 4)
    monkeypatch.setattr(encoding, "FEW_DOCUMENTS", 2)
    a, b, c, d = (spelled.token_to_id(letter) for letter in "abcd")
    streams = {
        name: Stream(tmp_path, name, dtype=np.dtype(np.uint16), end=9) for name in ("one", "two")
    }
    texts = [("one", "ab"), ("two", "c"), ("one", "abcd"), ("one", "d"), ("one", "a")]
    sizes = []
    counts = encode(iter(texts), streams, spelled, done=sizes.append)
    assert counts == {
        "one": {"dtype": "uint16", "ids": 13, "starts": 4},
        "two": {"dtype": "uint16", "ids": 3, "starts": 1},
    }
    ids = np.fromfile(tmp_path / "one.ids", dtype=np.uint16).tolist()
    assert ids == [9, a, b, 9, a, b, c, d, 9, d, 9, a, 9]
    assert np.fromfile(tmp_path / "one.starts", dtype=np.int64).tolist() == [0, 3, 8, 10]
    assert np.fromfile(tmp_path / "two.ids", dtype=np.uint16).tolist() == [9, c, 9]
    assert sizes == [3, 4, 2]


def test_files_are_closed_when_the_text_breaks_off(tmp_path, spelled):
    def texts():
        yield "one", "ab"
        raise ValueError("broken")

    stream = Stream(tmp_path, "one", dtype=np.dtype(np.uint32), end=0)
    with pytest.raises(ValueError, match="broken"):
        encode(texts(), {"one": stream}, spelled, done=lambda size: None)
    assert stream.ids.closed and stream.starts.closed


def test_scales_weigh_what_the_compressors_do():
    texts = ["hello world\n" * 50, "é" * 100]
    scales = Scales()
    for text in texts:
        scales.add(text)
    raw = "".join(texts).encode()
    assert scales.sizes() == {
        "held_out_bytes": len(raw),
        "held_out_gzip": len(gzip.compress(raw, 9)),
        "held_out_xz": len(lzma.compress(raw, preset=9)),
    }
