"""The index: a person reads it, a flipped character is seen, ranks that disagree are refused."""

import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_state import about

from howdah.base.errors import UserError
from howdah.checkpoint.index import (
    DTYPES,
    File,
    Index,
    Stored,
    decode,
    encode,
    entry_name,
    merge,
)
from howdah.checkpoint.safefile import SPELLED
from howdah.plan.boxes import Box, Piece, whole, whole_piece

SHAPE = (4, 6)
HALVES = [Piece("w", SHAPE, whole(SHAPE), 0, 12), Piece("w", SHAPE, whole(SHAPE), 12, 24)]


def part(rank, piece, *, kind="weight", dtype="float32", step=100, **changes):
    file = f"rank-{rank:05d}.safetensors"
    stored = Stored(kind, piece, dtype, file, entry_name(kind, piece), 1234)
    return Index(step, about(**changes), (stored,), (File(file, 256, 99),))


def test_decoding_reverses_encoding():
    index = merge([part(0, HALVES[0]), part(1, HALVES[1])])
    assert decode(encode(index).encode(), "here") == index


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), json_values, max_size=3))
@settings(max_examples=50)
def test_meta_comes_back(meta):
    index = part(0, whole_piece("w", SHAPE), meta=meta)
    assert decode(encode(index).encode(), "here").about.meta == meta


def test_meta_comes_back_as_json_spells_it():
    index = part(0, whole_piece("w", SHAPE), meta={"sizes": (1, 2), "by step": {10: 1.0, 9: 2.0}})
    meta = decode(encode(index).encode(), "here").about.meta
    assert meta == {"sizes": [1, 2], "by step": {"10": 1.0, "9": 2.0}}


def test_a_person_can_read_it():
    lines = encode(part(0, HALVES[0], meta={"shape": {"layers": 2}})).splitlines()
    assert lines[0] == "{"
    assert '  "step": 100,' in lines
    assert '  "layout": "dp2 x4",' in lines
    assert '      "layers": 2' in lines
    assert (
        '    {"kind": "weight", "name": "w", "corner": [0, 0], "size": [4, 6], "start": 0, '
        '"stop": 12, "file": "rank-00000.safetensors", "entry": "weight/w@0", "crc32": 1234}'
    ) in lines


def test_names_of_entries():
    box = Box((0, 3), (4, 3))
    assert entry_name("weight", Piece("w", SHAPE, whole(SHAPE), 5, 7)) == "weight/w@5"
    assert entry_name("exp_avg", Piece("w", SHAPE, box, 5, 7)) == "exp_avg/w[0,3]@5"


def test_any_other_character_is_seen_or_changes_nothing():
    # Whitespace between the values is all that may change without being seen.
    index = part(0, whole_piece("w", SHAPE), meta={"loss": 2.5})
    text = encode(index).encode()
    for at in range(len(text)):
        other = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        try:
            assert decode(other, "here") == index, at
        except UserError:
            continue


def test_damage_is_a_sentence_that_names_the_file():
    text = encode(part(0, whole_piece("w", SHAPE))).encode()
    for other in (b"", text[: len(text) // 2], text.replace(b"64", b"65"), b"[]", b"\xff"):
        with pytest.raises(UserError, match=r"here is damaged; use another"):
            decode(other, "here")


def test_a_newer_format_is_told_from_damage():
    text = encode(part(0, whole_piece("w", SHAPE))).replace('"format": 1', '"format": 2')
    with pytest.raises(UserError, match="format 2 and this howdah reads format 1"):
        decode(text.encode(), "here")


def test_a_file_outside_the_folder_is_refused():
    index = part(0, whole_piece("w", SHAPE))
    away = "../rank-00000.safetensors"
    moved = replace(
        index,
        files=(replace(index.files[0], name=away),),
        stored=(replace(index.stored[0], file=away),),
    )
    with pytest.raises(UserError, match="damaged"):
        decode(encode(moved).encode(), "here")


def resealed(change):
    """A sound index with one change, and the checksum that belongs to it."""
    fields = json.loads(encode(merge([part(0, HALVES[0]), part(1, HALVES[1])])))
    fields.pop("crc32")
    change(fields)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "crc32": zlib.crc32(text.encode())}).encode()


def put(path, value):
    """A change that sets the field at a dotted path."""

    def change(fields):
        *owners, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        for owner in owners:
            fields = fields[owner]
        fields[last] = value

    return change


def test_an_index_that_is_sealed_again_is_sound():
    assert decode(resealed(put("step", 7)), "here").step == 7


NO_NUMBER = [None, True, -1, 1.5, "1", 2**63, 10**30, [], {}]
NO_TEXT = [None, True, 1, [], {}, "a\nb", "x" * 2000]
NO_LIST = [None, 1, "a", {}, [1], [[]]]
NO_SIZES = [None, 1, "a", {}, [-1, 0], ["0", "0"], [True, 0], [0.0, 0], [0] * 9]
WRONG = {
    "step": [*NO_NUMBER, 10**10],
    "samples": [*NO_NUMBER, 2**63 - 1, 10**15 + 1],
    "run": NO_TEXT,
    "layout": NO_TEXT,
    "meta": [None, 1, "a", []],
    "tensors": NO_LIST,
    "tensors.0.kind": [*NO_TEXT, "exp_avg"],
    "tensors.0.name": [*NO_TEXT, "v"],
    "tensors.0.shape": [*NO_SIZES, [4], [4, 5]],
    "tensors.0.dtype": [*NO_TEXT, "float8", "torch.float32"],
    "pieces": NO_LIST,
    "pieces.0.kind": [*NO_TEXT, "exp_avg"],
    "pieces.0.name": [*NO_TEXT, "v"],
    "pieces.0.corner": [*NO_SIZES, [0], [0, 1], [0, 0, 0]],
    "pieces.0.size": [*NO_SIZES, [4], [4, 7], [2**62, 2**62]],
    "pieces.0.start": [*NO_NUMBER, 13, 25],
    "pieces.0.stop": [*NO_NUMBER, 25, 2**40],
    "pieces.0.file": [*NO_TEXT, "../rank-00000.safetensors", "other.safetensors"],
    "pieces.0.entry": NO_TEXT,
    "pieces.0.crc32": [*NO_NUMBER, 2**32],
    "files": NO_LIST,
    "files.0.name": [*NO_TEXT, "", "..", "a/b", "a\0b", "x" * 300],
    "files.0.bytes": NO_NUMBER,
    "files.0.header_crc32": [*NO_NUMBER, 2**32],
}


@pytest.mark.parametrize("path", WRONG)
def test_every_field_has_a_type_and_bounds(path):
    """Behind a right checksum, too: what is not ours may be sealed as well."""
    for value in WRONG[path]:
        with pytest.raises(UserError, match="here is damaged; use another"):
            decode(resealed(put(path, value)), "here")


@pytest.mark.parametrize("name", ["tensors", "pieces", "files"])
def test_nothing_stands_there_twice(name):
    with pytest.raises(UserError, match="here is damaged; use another"):
        decode(resealed(lambda fields: fields[name].append(fields[name][0])), "here")


@pytest.mark.parametrize("name", ["step", "run", "layout", "samples", "meta", "tensors", "files"])
def test_nothing_is_missing(name):
    with pytest.raises(UserError, match="here is damaged; use another"):
        decode(resealed(lambda fields: fields.pop(name)), "here")


def test_an_index_nested_too_deep_is_damaged():
    with pytest.raises(UserError, match="here is damaged; use another"):
        decode(b'{"format": 1, "meta": ' + b"[" * 100_000, "here")


def test_the_dtypes_of_an_index_are_those_of_the_files():
    assert set(DTYPES) == {str(dtype).removeprefix("torch.") for dtype in SPELLED}


def test_merging_keeps_all_pieces_and_the_meta_of_rank_0():
    index = merge([part(0, HALVES[0], meta={"a": 1}), part(1, HALVES[1], meta={"a": 2})])
    assert [item.piece for item in index.stored] == HALVES
    assert [file.name for file in index.files] == [f"rank-0000{r}.safetensors" for r in (0, 1)]
    assert index.about.meta == {"a": 1}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (part(1, HALVES[1], step=101), "rank 1 saved .* must save the same state"),
        (part(1, HALVES[1], samples=65), "must save the same state"),
        (part(1, HALVES[1], run="r2"), "must save the same state"),
        (part(1, HALVES[1], layout="dp3"), "must save the same state"),
        (part(1, HALVES[1], dtype="bfloat16"), "2 different tensors"),
        (part(1, Piece("w", (4, 7), whole((4, 7)), 12, 28)), "2 different tensors"),
        (part(1, HALVES[0]), "only 12 of 24 elements of weight of w"),
        (part(1, HALVES[1], kind="exp_avg"), "only 12 of 24"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(other, sentence):
    with pytest.raises(UserError, match=sentence):
        merge([part(0, HALVES[0]), other])


def test_json_is_what_it_claims():
    fields = json.loads(encode(part(0, whole_piece("w", SHAPE))))
    assert [*fields] == [
        "format", "run", "step", "layout", "samples", "meta", "tensors", "pieces", "files", "crc32"
    ]  # fmt: skip
    assert fields["tensors"] == [
        {"kind": "weight", "name": "w", "shape": [4, 6], "dtype": "float32"}
    ]
