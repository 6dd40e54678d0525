"""Files: the library reads what we write, damage is seen, memory stays at one tensor."""

import json
import os
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from howdah.base.errors import UserError
from howdah.checkpoint.safefile import (
    DTYPES,
    Spec,
    as_bytes,
    checksum,
    read_header,
    read_into,
    write,
)


def sample():
    whole = torch.arange(-7, 8)
    tensors = {f"of.{name}": whole.to(dtype) for name, dtype in reversed(DTYPES.items())}
    tensors["odd"] = torch.randn(3, 5).bfloat16()
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["turned"] = torch.randn(4, 3, dtype=torch.float64).T  # not contiguous
    return tensors


def put(path, tensors, **more):
    specs = [Spec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    return write(path, specs, tensors=iter(tensors.values()), **more)


def test_the_library_reads_every_dtype_and_shape(tmp_path):
    tensors = sample()
    put(tmp_path / "a.safetensors", tensors, metadata={"format": "pt", "näme": "ü"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "näme": "ü"}
        assert torch.equal(file.get_slice("odd")[1:2], tensors["odd"][1:2])


def test_we_read_what_the_library_writes(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in sample().items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"k": "v"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.metadata == {"k": "v"}
    with (tmp_path / "a.safetensors").open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            out = torch.empty(tensor.numel(), dtype=tensor.dtype)
            read_into(file, header.entries[name], first=0, out=out)
            assert torch.equal(out.reshape(tensor.shape), tensor), name


def test_the_header_is_aligned_and_so_is_every_element(tmp_path):
    for extra in range(9):
        path = tmp_path / "a.safetensors"
        put(path, sample(), metadata={"pad": "x" * extra})
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert length % 8 == 0
        for entry in read_header(path).entries.values():
            assert entry.start % entry.dtype.itemsize == 0


def test_checksums_and_size_are_those_of_the_bytes(tmp_path):
    tensors = sample() | {"long": torch.randn(400_000)}  # more than one block
    path = tmp_path / "a.safetensors"
    written = put(path, tensors)
    header = read_header(path)
    assert written.bytes == path.stat().st_size
    assert written.header_crc32 == header.crc32
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            crc = zlib.crc32(as_bytes(tensor.contiguous()))
            assert written.crc32[name] == crc == checksum(file, header.entries[name])


def test_tensors_are_taken_one_at_a_time(tmp_path):
    alive = []

    def stream():
        for number in range(5):
            tensor = torch.full((8,), float(number))
            alive.append(tensor)
            assert len(alive) == 1
            yield tensor
            alive.clear()

    specs = [Spec(f"t{number}", (8,), torch.float32) for number in range(5)]
    write(tmp_path / "a.safetensors", specs, tensors=stream())
    assert load_file(tmp_path / "a.safetensors")["t3"].tolist() == [3.0] * 8


def test_a_part_of_an_entry_is_read_alone(tmp_path):
    put(tmp_path / "a.safetensors", {"x": torch.arange(100), "y": torch.zeros(5)})
    entry = read_header(tmp_path / "a.safetensors").entries["x"]
    out = torch.empty(7, dtype=torch.int64)
    with (tmp_path / "a.safetensors").open("rb", buffering=0) as file:
        read_into(file, entry, first=40, out=out)
        assert out.tolist() == list(range(40, 47))
        assert file.tell() == entry.start + 47 * 8


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(3)],
        [torch.zeros(3), torch.zeros(4), torch.zeros(1)],
        [torch.zeros(3), torch.zeros(5)],
        [torch.zeros(3), torch.zeros(4, dtype=torch.float64)],
    ],
    ids=["too few", "too many", "other shape", "other dtype"],
)
def test_what_was_not_announced_leaves_no_file_and_the_old_one(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    specs = [Spec("a", (3,), torch.float32), Spec("b", (4,), torch.float32)]
    with pytest.raises(ValueError):
        write(path, specs, tensors=tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.read_bytes() == b"old"


def test_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two entries"):
        write(tmp_path / "a", [Spec("a", (), torch.float32)] * 2, tensors=[torch.tensor(1.0)] * 2)


def test_a_truncated_file_is_refused_at_every_length(tmp_path):
    path = tmp_path / "a.safetensors"
    put(path, {"x": torch.arange(3), "y": torch.zeros(3)})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="restore it from a copy"):
            read_header(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(UserError, match="instead of"):
        read_header(path)


def test_a_header_nested_too_deep_is_a_sentence(tmp_path):
    text, path = b"[" * 100_000, tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match=r"nested too deep.*restore it from a copy"):
        read_header(path)


def test_a_pipe_has_no_header(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="is a pipe, a socket or a device, and not a file; restore"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"x": 3},
        {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}},
        {"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
        {"x": {"dtype": "F32", "shape": [10**40], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1]}},
        {"__metadata__": 3, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_a_header_that_makes_no_sense_is_a_sentence(tmp_path, table):
    text = json.dumps(table).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(UserError, match="restore it from a copy"):
        read_header(path)
