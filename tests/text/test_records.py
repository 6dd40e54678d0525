"""Records: each format gives the documents of its field whole, and says where a file is wrong."""

import csv
import gzip
import io
import json
import re
import sys
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet as format

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.text import records
from howdah.text.contents import contents
from howdah.text.records import Fields
from howdah.text.sources import Source, documents
from howdah.train.loop import train


def refuse(sentence):
    raise AssertionError(sentence)


# -- JSON lines ----------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json.gz"])
def test_json_lines_give_their_field(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    lines = "\n".join(json.dumps({"body": text, "n": 1}) for text in ("é", "a\u2028b", "\n"))
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wb") as file:
        file.write(f"{lines}\n\n".encode())
    assert list(records.lines(path, take=Fields("body"), bad=refuse)) == ["é", "a\u2028b", "\n"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{'text': 1}", "line 2: not JSON .* object with the field 'text'"),
        ('["text"]', "line 2: not an object"),
        ('{"txt": "a"}', "line 2: no field 'text'; did you mean 'txt'?"),
        ('{"text": 3}', "line 2: the field 'text' is of type int; it must be a string"),
        ('{"text": null}', "line 2: the field 'text' is empty"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    read = records.lines(path, take=Fields("text"), bad=refuse)
    assert next(read) == "fine"
    with pytest.raises(UserError, match=sentence) as refusal:
        next(read)
    assert str(path) in str(refusal.value)


def test_lines_that_are_not_utf8_are_told_and_passed_over(tmp_path):
    path, told = tmp_path / "a.jsonl", []
    path.write_bytes(b'{"text": "a\xff"}\n{"text": "\\ud800"}\n{"text": "fine"}\n')
    assert list(records.lines(path, take=Fields("text"), bad=told.append)) == ["fine"]
    assert [sentence.removeprefix(str(path)) for sentence in told] == [
        " line 1: the byte at offset 11 is not UTF-8",
        " line 2: the character at 0 is not UTF-8, or half of a surrogate pair",
    ]


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_damaged_gzip_is_a_sentence(tmp_path, keep):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "fine"}\n' * 100)
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz"):
        list(records.lines(path, take=Fields("text"), bad=refuse))
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz"):
        list(records.lines(path, take=Fields("text"), bad=refuse))


def test_a_line_without_an_end_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 30)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + " " * 13 + '{"text": "fine"}\n{"text": "' + "x" * 30)
    read = records.lines(path, take=Fields("text"), bad=refuse)
    assert [next(read), next(read)] == ["fine", "fine"]
    with pytest.raises(
        UserError, match=r"a\.jsonl line 3: longer than 0 MiB; a line is one document"
    ):
        next(read)


def test_fields_of_any_length_leave_the_sentence_short(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x" * 5000: 1, "a\nb": 2}) + "\n")
    with pytest.raises(UserError, match="no field 'y") as refused:
        list(records.lines(path, take=Fields("y" * 5000), bad=refuse))
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


# -- JSON arrays -----------------------------------------------------------------


def array(path, text="text", bad=refuse):
    return list(records.array(path, take=Fields(text), bad=bad))


@pytest.mark.parametrize("part", [1, 3, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_gives_its_records(tmp_path, monkeypatch, part, indent):
    monkeypatch.setattr(records, "PART", part)
    path, texts = tmp_path / "a.json", ["é", "a]\n[", '", {', ""]
    path.write_text(" \n" + json.dumps([{"n": 1.5, "body": t} for t in texts], indent=indent))
    assert array(path, "body") == texts


def test_a_json_array_may_be_packed_and_in_utf16(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress('[{"text": "é"}]'.encode("utf-16")))
    assert array(tmp_path / "a.json.gz") == ["é"]


@pytest.mark.parametrize("content", ["", " \n", "[]", "[ ]"])
def test_a_json_file_without_records_has_no_documents(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert array(tmp_path / "a.json") == []


def test_json_lines_are_read_whatever_their_name(tmp_path):
    (tmp_path / "a.json").write_text('\ufeff{"text": "one"}\n{"text": "two"}\n')
    assert array(tmp_path / "a.json") == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[{"text": "a"}, 7]', "record 2: not an object"),
        ('[{"txt": "a"}]', "record 1: no field 'text'; did you mean 'txt'?"),
        (
            '[{"text": "a"}',
            r"record 2: not JSON \(Expecting value\); an array of",
        ),
        ('[{"text": "a"}, {"text": ', "record 2: not JSON"),
        ("[" * 100_000, "record 1: JSON that is nested too deeply"),
        ('{"data": [\n]}', "line 1: not JSON"),
        ('"text"', "line 1: not an object"),
    ],
)
def test_a_bad_array_is_named_by_file_and_record(tmp_path, content, sentence):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"a\.json {sentence}"):
        array(path)


def test_a_record_without_an_end_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PART", 8)
    monkeypatch.setattr(records, "LONGEST_LINE", 30)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "' + "x" * 100 + '"}]')
    with pytest.raises(UserError, match="record 1: not JSON"):
        array(path)


def test_an_array_with_a_wrong_byte_loses_that_record_alone(tmp_path):
    path, told = tmp_path / "a.json", []
    path.write_bytes(b'[{"text": "caf\xe9"}, {"text": "fine"}]')
    assert array(path, bad=told.append) == ["fine"]
    assert told == [
        f"{path} record 1: the character at 3 is not UTF-8, or half of a surrogate pair"
    ]


# -- CSV -------------------------------------------------------------------------


def rows(path, field="text", bad=refuse):
    return list(records.table(path, take=Fields(field), bad=bad))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "semicolons.csv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_table_gives_its_column(tmp_path, name, encoding):
    path, texts = tmp_path / name, ["é", 'say "a,b;c"', "two\nlines\n", "x" * 200_000]
    delimiter = "\t" if name == "a.tsv" else ";" if name == "semicolons.csv" else ","
    with io.StringIO(newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["n", "body"], *enumerate(texts)])
        raw = file.getvalue().encode(encoding)
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert rows(path, "body") == texts


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("txt,n\na,1\n", ": no column 'text'; did you mean 'txt'?"),
        ("text,n\na,1\n\na, b,2\n", " line 4: the row has 3 cells and the first row 2; put quotes"),
        ('text,n\n"a,1\n', " line 2: unexpected end of data; inside quotes, write a quote twice"),
        ('text,n\n"a" b,1\n', " line 2: ',' expected after"),
    ],
)
def test_a_bad_table_is_named_by_file_and_line(tmp_path, content, sentence):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}{sentence}')}"):
        rows(path)


def test_a_table_without_rows_has_no_documents(tmp_path):
    for content in ("", "text\n", "text,n\n\n"):
        (tmp_path / "a.csv").write_text(content)
        assert rows(tmp_path / "a.csv") == []


def test_a_row_with_a_wrong_byte_is_told_and_passed_over(tmp_path):
    path, told = tmp_path / "a.csv", []
    path.write_bytes(b"text\ncaf\xe9\nfine\n")
    assert rows(path, bad=told.append) == ["fine"]
    assert told == [f"{path} line 2: the character at 3 is not UTF-8, or half of a surrogate pair"]


# -- Parquet -------------------------------------------------------------------


def table(path, **columns):
    format.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet_gives_its_column(tmp_path):
    path = table(tmp_path / "a.parquet", body=["one", "é", "three"], n=[1, 2, 3])
    assert list(records.parquet(path, take=Fields("body"), bad=refuse)) == ["one", "é", "three"]


def test_bad_parquet_is_named_by_file_and_row(tmp_path):
    path = table(tmp_path / "a.parquet", text=["one", "two", None], n=[1, 2, 3])
    for field, sentence in (
        ("text", "row 3: the field 'text' is empty"),
        ("txt", "no column 'txt'; did you mean 'text'?"),
        ("n", "row 1: the field 'n' is of type int"),
    ):
        with pytest.raises(UserError, match=sentence):
            list(records.parquet(path, take=Fields(field), bad=refuse))
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet as Parquet"):
        list(records.parquet(path, take=Fields("text"), bad=refuse))
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(UserError, match=r"repair or remove the file") as refused:
        list(records.parquet(path, take=Fields("text"), bad=refuse))
    assert "\n" not in str(refused.value)  # the library's words have a second line


def test_parquet_rows_that_are_not_utf8_are_told_and_passed_over(tmp_path):
    raw = pyarrow.array([b"a\xff", b"fine"]).view(pyarrow.string())
    path, told = table(tmp_path / "a.parquet", text=raw), []
    assert list(records.parquet(path, take=Fields("text"), bad=told.append)) == ["fine"]
    assert told == [f"{path} row 1: the byte at offset 1 is not UTF-8"]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "a.parquet"
    with pytest.raises(UserError, match=r"needs the package pyarrow; pip install pyarrow$"):
        list(records.parquet(path, take=Fields("text"), bad=refuse))


# -- the datasets library --------------------------------------------------------


def test_a_saved_dataset_gives_its_column(tmp_path):
    """The library itself, where it is installed (the extra `data`)."""
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    found = datasets.Dataset.from_dict({"body": ["one", "é"], "n": [1, 2]})
    found.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": found.select([0]), "train": found}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        source = Source(str(tmp_path / name), field="body")
        assert list(documents(source)) == ["one", "é"]
        assert contents(source) == contents(Source(str(tmp_path / name), field="body"))
    with pytest.raises(UserError, match="no column 'bodi'; did you mean 'body'"):
        list(documents(Source(str(tmp_path / "one"), field="bodi")))
    with pytest.raises(UserError, match="row 1: the field 'n' is of type int"):
        list(documents(Source(str(tmp_path / "one"), field="n")))
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot open the dataset in .*one: "):
        list(documents(Source(str(tmp_path / "one"), field="body")))


def test_a_local_dataset_is_loaded_by_its_name_and_trained_on(tmp_path, make_job):
    """The library itself: a folder as it downloads one, of two splits, of which train is read."""
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        rows = (f'{{"body": "{n} follows {n - 1}"}}' for n in range(first, first + 300))
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    source = Source(f"hf:{folder}", field="body")
    found = list(documents(source))
    assert found[:2] == ["0 follows -1", "1 follows 0"] and len(found) == 300
    assert contents(source) == contents(Source(f"hf:{folder}", field="body"))
    where = f'data.sources=[{{path = "hf:{folder}", field = "body"}}]'
    assert train(make_job("a", where, "train.steps=2"), SingleRank()).step == 2


def test_a_dataset_that_the_hub_refuses_is_a_sentence(monkeypatch):
    """A gated one first has to be asked for: the library's own first line does not say how."""

    def load_dataset(*_, **__):
        raise RuntimeError("Dataset 'a/b' is a gated dataset on the Hub.\nVisit the page")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError) as refused:
        list(documents(Source("hf:a/b")))
    assert str(refused.value) == (
        "cannot load the dataset 'hf:a/b': Dataset 'a/b' is a gated dataset on the Hub; check its "
        "name and the network, and for a gated one accept its terms on its page, then log in: hf "
        "auth login"
    )
