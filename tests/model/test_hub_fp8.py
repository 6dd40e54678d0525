"""Folders whose matrices are in 8 bits, with a number for each block, as DeepSeek-V3's are."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from random_model import LATENT, random_weights
from safetensors.torch import save_file

from howdah.base.errors import UserError
from howdah.checkpoint.export import export
from howdah.model import hub
from howdah.model.hub import read_hub
from howdah.model.hub_fp8 import block_of, widened
from howdah.model.hub_names import names
from howdah.plan.boxes import Box, Piece
from howdah.shapes.huggingface_written import config
from howdah.shapes.shape import Experts
from howdah.train.resume import read_folder

BLOCK = (8, 6)  # which divides few of the sizes
EXPERTS = Experts(4, 2, 11, shared=11, scores="sigmoid", bias=True, group_best=2, first_dense=1)
SHAPE = replace(LATENT, experts=EXPERTS, layers=2)
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias")


def quantised(matrix, block):
    """DeepSeek's quantiser, block by block: (what is stored, the number of each block)."""
    rows, columns = (-(-size // part) for size, part in zip(matrix.shape, block, strict=True))
    stored = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    numbers = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            numbers[i, j] = matrix[at].abs().max() / 448
            stored[at] = (matrix[at] / numbers[i, j]).to(torch.float8_e4m3fn)
    return stored, numbers


def their_tensors():
    """Hugging Face's tensors of a small model, before they are quantised."""
    ours = random_weights(SHAPE, dtype=torch.float32)
    found = {}
    for theirs in names(SHAPE):
        (name,) = theirs.ours
        whole = ours[name] if theirs.expert is None else ours[name][theirs.expert]
        found[theirs.name] = whole.clone().contiguous()
    return ours, found


def write(folder, *, block=BLOCK, drop=(), change=()):
    """A folder in 8 bits. Returns the plain weights, and what was left of them in 8 bits."""
    ours, tensors = their_tensors()
    stored, rounded = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or any(word in name for word in PLAIN):
            stored[name] = rounded[name] = tensor
            continue
        stored[name], numbers = quantised(tensor, block)
        stored[f"{name}_scale_inv"] = numbers
        rows, columns = (
            n.repeat_interleave(k)
            for n, k in zip(map(torch.arange, numbers.shape), block, strict=True)
        )
        every = numbers[rows[: tensor.shape[0]]][:, columns[: tensor.shape[1]]]
        rounded[name] = stored[name].float() * every
    for name in drop:
        del stored[name]
    stored |= dict(change)
    save_file(stored, folder / "model.safetensors")
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    found = config(SHAPE, end=0, dtype="bfloat16") | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(found))
    return ours, rounded


def test_blocks_are_widened_while_they_are_read(tmp_path):
    """Each weight has the value that is stored, and is near the one that was quantised."""
    ours, rounded = write(tmp_path)
    shape, tensor = read_hub(tmp_path)
    assert shape == SHAPE
    changed = 0
    for theirs in names(SHAPE):
        (name,) = theirs.ours
        found = tensor(name)
        found = found if theirs.expert is None else found[theirs.expert]
        assert found.dtype == torch.float32
        assert torch.equal(found, rounded[theirs.name]), name
        plain = ours[name] if theirs.expert is None else ours[name][theirs.expert]
        assert (found - plain).abs().max() <= plain.abs().max() / 16
        changed += not torch.equal(found, plain)
    assert changed > 10


def test_exponents_are_powers_of_two():
    numbers = torch.tensor([[0.5, 4.0]]).to(torch.float8_e8m0fnu)
    stored = torch.tensor([[1.0, 2.0, 3.0]] * 2).to(torch.float8_e4m3fn)
    assert widened(stored, numbers, (2, 2)).tolist() == [[0.5, 1.0, 12.0]] * 2


SCALE = "model.layers.0.self_attn.o_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("drop", "change", "sentence"),
    [
        ((SCALE,), {}, "is not there"),
        ((), {SCALE: torch.ones(1, 1)}, r"is F32 \[1, 1\]"),
        ((), {SCALE: torch.ones(1, 1, dtype=torch.int32)}, "is I32"),
    ],
)
def test_numbers_of_blocks_that_do_not_fit_are_named(tmp_path, drop, change, sentence):
    write(tmp_path, drop=drop, change=change)
    with pytest.raises(UserError, match=sentence):
        read_hub(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        "fp8",
    ],
)
def test_other_ways_to_quantise_are_refused(given):
    assert block_of({"quantization_config": None}) is None
    with pytest.raises(UserError, match="howdah reads fp8 with two sizes of a block"):
        block_of({"quantization_config": given})


def test_an_export_in_8_bits_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="cannot export in float8_e4m3fn"):
        export(
            shape=SHAPE,
            tensor=lambda name: torch.empty(0),
            tokenizer=tmp_path / "none",
            end=0,
            to=tmp_path / "hub",
            dtype=torch.float8_e4m3fn,
        )
    assert not [*tmp_path.iterdir()]


def test_a_rank_reads_and_widens_its_own_experts_alone(tmp_path):
    """One after the other: all of a block's, in float32, may be more than a host has."""
    write(tmp_path)
    _, tensor = read_hub(tmp_path)
    (name,) = {one.ours[0] for one in names(SHAPE) if one.expert == 0 and ".up." in one.ours[0]}
    every = tensor(name)
    with patch.object(hub, "widened", side_effect=widened) as counted:
        assert torch.equal(tensor(name, slice(1, 3)), every[1:3])
    assert counted.call_count == 2 < len(every)
    fill, (count, *inner) = read_folder(tmp_path, SHAPE), every.shape
    box = Box((count - 1, 1, 0), (1, inner[0] - 1, inner[1]))
    piece = Piece(name, tuple(every.shape), box, 0, 5)
    with patch.object(hub, "widened", side_effect=widened) as counted:
        fill(piece, out := torch.zeros(5))
    assert torch.equal(out, every[-1, 1:].flatten()[:5]) and counted.call_count == 1
