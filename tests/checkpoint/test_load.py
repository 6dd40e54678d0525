"""Any layout reads what any other wrote; what is damaged is seen, named and passed over."""

import json
import os
import shutil
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_state import SHAPES, about, assert_holds, elements, pieces, save, savers, silent, state

from howdah.base.errors import UserError
from howdah.checkpoint import load
from howdah.checkpoint.folders import mark_best, step_folder, steps
from howdah.checkpoint.load import best, newest, open_checkpoint
from howdah.plan import flat_buffers as flat
from howdah.plan.boxes import Piece, whole, whole_piece
from howdah.shapes.weights import Weight

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(
    shapes=st.lists(shapes, min_size=1, max_size=4),
    saved=st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 4)),
    wanted=st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=30, deadline=None)
def test_any_cut_is_read_from_any_other(shapes, saved, wanted):
    """Slices of one dim, each shared out over ranks: tensor times data parallelism."""
    tensors = state({f"w{number}": shape for number, shape in enumerate(shapes)})
    dim, slices, world = saved
    with TemporaryDirectory() as folder:
        save(Path(folder), 7, tensors, world=world, dim=dim, slices=slices)
        checkpoint = newest(Path(folder), silent)
        assert_holds(checkpoint, tensors)
        dim, slices, shares = wanted
        for (kind, name), tensor in tensors.items():
            cut = pieces(name, tuple(tensor.shape), dim=dim, slices=slices, shares=shares)
            for _, piece in cut:
                out = torch.full((piece.elements,), torch.nan)
                checkpoint.read(kind, piece, out)
                assert torch.equal(out, elements(tensor, piece)), (kind, piece)


@given(
    shapes=st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=5),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
)
@settings(max_examples=15, deadline=None)
def test_flat_buffers_change_worlds(shapes, before, after):
    """Shares of a unit's flat buffer, cut at any element, for another number of ranks."""
    weights = [
        Weight(f"w{n}", ("dim",) * len(shape), shape, "unit", decay=decay, mean=0.0, spread=0.0)
        for n, (shape, decay) in enumerate(shapes)
    ]
    (buffer,) = flat.buffers(weights)
    memory = torch.zeros(buffer.length)
    for _, first, last in flat.pieces(buffer, 0, buffer.length):
        memory[first:last] = torch.arange(first, last) + 0.5

    def shared(world, rank):
        return flat.pieces(buffer, *flat.share(buffer.length, world, rank))

    with TemporaryDirectory() as folder:
        team = savers(Path(folder), before)
        for rank, saver in enumerate(team):
            entries = [("weight", piece, memory[a:b]) for piece, a, b in shared(before, rank)]
            saver.save(step=1, entries=entries, about=about())
        for saver in team:
            saver.wait()
        checkpoint = open_checkpoint(step_folder(Path(folder), 1))
        found = torch.zeros(buffer.length)
        for rank in range(after):
            for piece, first, last in shared(after, rank):
                checkpoint.read("weight", piece, found[first:last])
    assert torch.equal(found, memory)


def test_what_a_checkpoint_says(tmp_path):
    save(tmp_path, 100, state(), world=2)
    checkpoint = open_checkpoint(step_folder(tmp_path, 100))
    assert (checkpoint.step, checkpoint.run, checkpoint.layout) == (100, "r1", "dp2 x4")
    assert (checkpoint.samples, checkpoint.meta) == (64, {"loss": 2.5})
    assert checkpoint.kinds == ("weight", "exp_avg")
    assert checkpoint.names("weight") == tuple(SHAPES)
    assert checkpoint.names("nothing") == ()
    assert checkpoint.shape("weight", "layers.0.q.weight") == (5, 7)
    assert checkpoint.dtype("weight", "layers.0.q.weight") == torch.float32
    assert checkpoint.verify() == []


@pytest.mark.parametrize("saved", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_change_dtype_on_the_way(tmp_path, saved, wanted):
    tensors = state(dtype=saved)
    save(tmp_path, 1, tensors, world=2)
    checkpoint = newest(tmp_path, silent)
    assert_holds(checkpoint, tensors)
    out = torch.empty(35, dtype=wanted)
    checkpoint.read("weight", whole_piece("layers.0.q.weight", (5, 7)), out)
    assert torch.equal(out, tensors["weight", "layers.0.q.weight"].reshape(-1).to(wanted))


def test_a_parameter_is_filled_in_place(tmp_path):
    tensors = state()
    save(tmp_path, 1, tensors)
    weight = torch.nn.Parameter(torch.zeros(5, 7))
    piece = whole_piece("layers.0.q.weight", (5, 7))
    newest(tmp_path, silent).read("weight", piece, weight.view(-1))
    assert torch.equal(weight, tensors["weight", "layers.0.q.weight"])


def test_windows_smaller_than_the_runs(tmp_path, monkeypatch):
    tensors = state()
    save(tmp_path, 1, tensors, world=2, dim=1, slices=2)
    monkeypatch.setattr(load, "WINDOW", 3)
    assert_holds(newest(tmp_path, silent), tensors)


def test_a_piece_does_not_load_the_file(tmp_path, monkeypatch):
    name, shape = "w", (1000, 10)
    save(tmp_path, 1, state({name: shape}))
    monkeypatch.setattr(load, "WINDOW", 16)
    read, original = [], load.read_into

    def counted(file, entry, *, first, out):
        read.append(len(out))
        original(file, entry, first=first, out=out)

    monkeypatch.setattr(load, "read_into", counted)
    piece = Piece(name, shape, whole(shape), 5000, 5040)
    open_checkpoint(step_folder(tmp_path, 1)).read("weight", piece, torch.empty(40))
    assert sum(read) <= 48


def test_questions_that_have_no_answer(tmp_path):
    save(tmp_path, 1, state())
    checkpoint = newest(tmp_path, silent)
    with pytest.raises(UserError, match="holds no 'exp_avgs'; did you mean 'exp_avg'"):
        checkpoint.shape("exp_avgs", "norm.weight")
    with pytest.raises(
        UserError, match=r"no weight of 'norm\.weigth'; did you mean 'norm\.weight'"
    ):
        checkpoint.tensor("weight", "norm.weigth")
    with pytest.raises(UserError, match=r"norm.weight is \[6\] in .* and \[7\] in this model"):
        checkpoint.read("weight", whole_piece("norm.weight", (7,)), torch.empty(7))
    with pytest.raises(ValueError, match="do not fit"):
        checkpoint.read("weight", whole_piece("norm.weight", (6,)), torch.empty(7))


def test_an_element_that_nobody_saved_is_not_made_up(tmp_path):
    # Two overlapping pieces have as many elements as the tensor, yet two stand nowhere.
    cuts = [Piece("w", (8,), whole((8,)), *span) for span in ((0, 4), (2, 6))]
    (saver,) = savers(tmp_path, 1)
    saver.save(step=1, entries=[("weight", p, torch.ones(4)) for p in cuts], about=about())
    saver.wait()
    checkpoint = open_checkpoint(step_folder(tmp_path, 1))
    inner = torch.empty(6)
    checkpoint.read("weight", Piece("w", (8,), whole((8,)), 0, 6), inner)
    assert inner.tolist() == [1.0] * 6
    with pytest.raises(
        UserError, match=r"is not whole: nobody holds element \[6\] of w \[8\]; use another"
    ):
        checkpoint.tensor("weight", "w")


# -- damage --------------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def two(tmp_path):
    """Checkpoints of steps 1 and 2, the second to be damaged."""
    save(tmp_path, 1, state(seed=1), world=2)
    save(tmp_path, 2, state(seed=2), world=2)
    return tmp_path, step_folder(tmp_path, 2)


def assert_falls_back(folder, reason):
    said = []
    checkpoint = newest(folder, said.append)
    assert checkpoint.step == 1
    assert_holds(checkpoint, state(seed=1))
    assert len(said) == 1
    assert said[0].startswith(f"the checkpoint {step_folder(folder, 2)} is passed over: ")
    assert reason in said[0]


def test_every_flipped_byte_is_seen(two):
    folder, newer = two
    for path in newer.glob("*.safetensors"):
        for at in range(path.stat().st_size):
            flip(path, at)
            assert open_checkpoint(newer).verify() != [], (path.name, at)
            flip(path, at)
    assert open_checkpoint(newer).verify() == []
    assert newest(folder, silent).step == 2


def test_a_flipped_number_names_its_tensor(two):
    folder, newer = two
    path = newer / "rank-00001.safetensors"
    flip(path, path.stat().st_size - 1)
    assert_falls_back(folder, "in rank-00001.safetensors is damaged")


def test_a_flipped_header(two):
    folder, newer = two
    flip(newer / "rank-00000.safetensors", 20)
    assert_falls_back(folder, "the header of rank-00000.safetensors is damaged")


def test_a_header_that_makes_sense_but_is_another(two):
    # The same bytes as whole numbers: sizes and the checksums of the tensors are right.
    folder, newer = two
    path = newer / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    assert_falls_back(folder, "the header of rank-00000.safetensors is damaged")


def test_a_truncated_file(two):
    folder, newer = two
    path = newer / "rank-00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    assert_falls_back(folder, f"rank-00000.safetensors has {size - 5} bytes instead of {size}")


def test_a_missing_file(two):
    folder, newer = two
    (newer / "rank-00001.safetensors").unlink()
    assert_falls_back(folder, "rank-00001.safetensors is missing")


def test_a_missing_index(two):
    folder, newer = two
    (newer / "index.json").unlink()
    assert_falls_back(folder, "index.json is missing")
    assert steps(folder) == [1]


def test_a_damaged_index(two):
    folder, newer = two
    index = newer / "index.json"
    index.write_text(index.read_text().replace('"samples": 64', '"samples": 65'))
    assert_falls_back(folder, "index.json is damaged")


def test_a_copy_under_another_name_is_not_taken_for_a_later_step(two):
    folder, newer = two
    shutil.copytree(newer, step_folder(folder, 40))
    said = []
    assert newest(folder, said.append).step == 2
    assert said[0].endswith("holds step 2; rename it to step-00000002, or remove it")
    mark_best(folder, 40)
    with pytest.raises(UserError, match="step-00000040 holds step 2; rename it"):
        best(folder)


def test_a_copied_checkpoint_may_have_any_other_name(two):
    folder, newer = two
    shutil.copytree(newer, folder / "kept")
    assert open_checkpoint(folder / "kept").step == 2


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int32"), ("shape", [70]), ("shape", [5, 70])]
)
def test_an_index_that_says_more_than_the_files_hold(two, field, value):
    """Its checksum is right, and so are those of the files: what it says would be allocated."""
    folder, newer = two
    fields = json.loads((newer / "index.json").read_text())
    fields.pop("crc32")
    tensor = next(row for row in fields["tensors"] if row["name"] == "norm.weight")
    tensor[field] = value
    for row in fields["pieces"]:
        if (row["kind"], row["name"]) == (tensor["kind"], "norm.weight") and field == "shape":
            row |= {"size": value, "corner": [0] * len(value), "stop": prod(value), "start": 0}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    (newer / "index.json").write_text(json.dumps({**fields, "crc32": crc32(text.encode())}))
    said = []
    assert newest(folder, said.append).step == 1
    assert "is not what the index says" in said[0]
    with pytest.raises(UserError, match=r"does not hold .* as its index says"):
        open_checkpoint(newer).tensor(tensor["kind"], "norm.weight")


def test_an_index_that_is_no_file(two):
    folder, newer = two
    (newer / "index.json").unlink()
    os.mkfifo(newer / "index.json")
    assert_falls_back(folder, "it is a pipe, a socket or a device")


def test_files_of_two_checkpoints_mixed(two):
    folder, newer = two
    name = "rank-00001.safetensors"
    shutil.copy(step_folder(folder, 1) / name, newer / name)
    assert_falls_back(folder, "in rank-00001.safetensors is damaged")


def test_reading_damage_without_asking_first_is_a_sentence(two):
    _, newer = two
    path = newer / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="instead of"):
        open_checkpoint(newer).tensor("weight", "layers.0.q.weight")
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        open_checkpoint(newer).tensor("weight", "layers.0.q.weight")


def test_nothing_to_resume(tmp_path):
    assert newest(tmp_path, silent) is None
    assert newest(tmp_path / "not there", silent) is None
    assert steps(tmp_path / "not there") == []
    (tmp_path / "step-00000003").mkdir()
    said = []
    assert newest(tmp_path, said.append) is None
    assert len(said) == 1


def test_the_best(tmp_path):
    assert best(tmp_path) is None
    save(tmp_path, 1, state(seed=1), best=True)
    save(tmp_path, 2, state(seed=2))
    assert best(tmp_path).step == 1
    path = step_folder(tmp_path, 1) / "rank-00000.safetensors"
    flip(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match=r"the best checkpoint .* is damaged"):
        best(tmp_path)
    mark_best(tmp_path, 5)
    with pytest.raises(UserError, match="not a whole checkpoint"):
        best(tmp_path)
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(UserError, match=r"best\.json is damaged"):
        best(tmp_path)


def test_no_pickle(tmp_path):
    """A checkpoint is numbers and JSON: header, then the very bytes of the tensors."""
    tensors = state()
    save(tmp_path, 1, tensors)
    folder = step_folder(tmp_path, 1)
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", "rank-00000.safetensors"]
    json.loads((folder / "index.json").read_text())
    data = (folder / "rank-00000.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    json.loads(data[8:start])
    assert data[start:] == b"".join(t.numpy().tobytes() for t in tensors.values())
    assert len(data) == start + 4 * sum(2 * prod(shape) for shape in SHAPES.values())
