"""The checksum of frames and files is zlib's, whoever computes it."""

import zlib
from random import Random

import pytest

from howdah.comm import crc, engine_abi
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.crc import SHORT, crc32
from howdah.comm.settings import Settings, read_settings

MEMORY = memoryview(Random(1).randbytes(4 * SHORT))


@pytest.fixture
def folded(monkeypatch):
    """All lengths that the library takes go through it."""
    engine_library(read_settings())
    crc._folder.cache_clear()
    monkeypatch.setattr(crc, "SHORT", 64)
    if crc._folder() is None:
        pytest.skip("this processor cannot fold")
    yield crc._folder()
    crc._folder.cache_clear()


def test_it_equals_zlib_for_every_length_alignment_and_start(folded):
    draw = Random(2)
    lengths = [*range(1025), *(draw.randrange(3 * SHORT) for _ in range(200))]
    for length in lengths:
        at, before = draw.randrange(SHORT), draw.choice([0, 0xFFFFFFFF, draw.getrandbits(32)])
        part = MEMORY[at : at + length]
        assert crc32(part, before) == zlib.crc32(part, before), (at, length, before)


def test_it_equals_zlib_at_every_offset_of_a_line(folded):
    for at in range(64):
        for length in range(64, 64 + 130):
            part = MEMORY[at : at + length]
            assert crc32(part, length) == zlib.crc32(part, length), (at, length)


def test_parts_behind_each_other_are_the_whole(folded):
    whole, draw = zlib.crc32(MEMORY), Random(3)
    for _ in range(50):
        cuts = sorted(draw.randrange(len(MEMORY)) for _ in range(3))
        found = 0
        for start, stop in zip([0, *cuts], [*cuts, len(MEMORY)], strict=True):
            found = crc32(MEMORY[start:stop], found)
        assert found == whole


def test_bytes_that_cannot_be_written_are_read(folded):
    assert crc32(bytes(MEMORY)) == zlib.crc32(MEMORY)


def test_without_a_library_zlib_computes(monkeypatch, tmp_path):
    """Nothing is compiled for a checksum."""
    settings = Settings(("cc",), tmp_path)
    with pytest.raises(NoCompiler):
        engine_library(settings, build=False)
    monkeypatch.setattr(engine_abi, "read_settings", lambda: settings)
    crc._folder.cache_clear()
    assert crc._folder() is None and crc32(MEMORY) == zlib.crc32(MEMORY)
    assert not any(tmp_path.iterdir())
    crc._folder.cache_clear()
