"""Encoding: streams of ends and documents, chunk after chunk."""

import gzip
import lzma
from zlib import crc32

import numpy as np
import pytest
from full_disk import FULL

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
    for name, (tokens, documents) in {"one": (13, 4), "two": (3, 1)}.items():
        assert counts[name] == {
            "dtype": "uint16",
            "ids": tokens,
            "ids_crc32": crc32((tmp_path / f"{name}.ids").read_bytes()),
            "starts": documents,
            "starts_crc32": crc32((tmp_path / f"{name}.starts").read_bytes()),
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


def test_a_full_disk_is_said_and_the_files_are_closed(tmp_path, spelled):
    for kind in ("ids", "starts"):
        (tmp_path / f"one.{kind}").symlink_to(FULL)
    stream = Stream(tmp_path, "one", dtype=np.dtype(np.uint32), end=0)
    with pytest.raises(OSError, match="No space left on device"):
        encode([("one", "ab")], {"one": stream}, spelled, done=lambda size: None)
    assert stream.ids.closed and stream.starts.closed


def test_scales_weigh_what_the_compressors_do(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 64)  # a document is weighed in parts
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
