"""Test the one reader of prompts (lens_mix/inputs.py): text in every form, files, open files and tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lens_mix.inputs import Unreadable, count_items, read_items, read_several
from lens_mix.plain_text import as_text, read_text

pytestmark = pytest.mark.once
TEXTS = ["The office", "Osl\u00f8 is"]
LINES = "\n".join(TEXTS)
ROWS = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
JSON_LINES = "\n".join(map(json.dumps, ROWS))
CSV = f"label,text\n0,{TEXTS[0]}\n1,{TEXTS[1]}\n"


def parquet(values):
    file = io.BytesIO()
    pq.write_table(pa.table({"text": values}), file)
    return file.getvalue()


def read(prompts, **options):
    """Return the texts of prompts, and the reasons of items that cannot be read."""
    items = list(read_items(prompts, **options))
    values = [item["text"] if isinstance(item, dict) else item for item in items]
    return [value.reason if isinstance(value, Unreadable) else as_text("prompt", value) for value in values]


FILES = {
    "lf.txt": LINES.encode(),
    "crlf.TXT": LINES.replace("\n", "\r\n\r\n").encode(),
    "cr.text": LINES.replace("\n", "\r").encode() + b"\r",
    "without_ending": LINES.encode(),
    "mark.txt": LINES.encode("utf-8-sig"),
    "utf16.txt": LINES.encode("utf-16"),
    "utf16_big.csv": b"\xfe\xff" + CSV.encode("utf-16-be"),
    "utf32.txt": LINES.encode("utf-32"),
    "rows.JSONL": JSON_LINES.encode("utf-8-sig"),
    "texts.ndjson": "\r\n".join(map(json.dumps, TEXTS)).encode(),
    "rows_without_ending": JSON_LINES.encode(),
    "array.json": json.dumps(ROWS, indent=1).encode("utf-8-sig"),
    "lines.json": JSON_LINES.encode(),
    "a.csv": CSV.encode(),
    "crlf.csv": CSV.replace("\n", "\r\n").encode("utf-8-sig"),
    "cr.csv": CSV.replace("\n", "\r").encode(),
    "a.tsv": CSV.replace(",", "\t").encode(),
    "a.txt.gz": gzip.compress(LINES.encode()),
    "a.jsonl.GZ": gzip.compress(JSON_LINES.encode()),
    "string.PARQUET": parquet(TEXTS),
    "binary.parquet": parquet([text.encode() for text in TEXTS]),
    "large.parquet": parquet(pa.array([text.encode() for text in TEXTS], pa.large_binary())),
    "categories.parquet": parquet(pa.array(TEXTS).dictionary_encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_texts_are_read_from_a_file_a_pipe_and_an_open_file(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert read(path) == read(str(path)) == TEXTS
    assert count_items(path, "text") == 2
    with open(path, "rb") as file:
        # The content of an open file is what its program decompresses.
        assert read(gzip.GzipFile(fileobj=file) if name.lower().endswith("gz") else file) == TEXTS
    if "." not in name:
        reader, writer = os.pipe()
        os.write(writer, FILES[name])
        os.close(writer)
        assert count_items(f"/dev/fd/{reader}", "text") is None, "counting would empty the pipe"
        assert read(f"/dev/fd/{reader}") == TEXTS
        os.close(reader)


def test_fixed_bytes_of_parquet_are_text(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(pa.array([b"ab", b"cd"], pa.binary(2))))
    assert read(path) == ["ab", "cd"]


def test_files_that_are_open_as_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(LINES.encode("utf-8-sig"))
    with open(path, encoding="utf-8") as file:
        assert read(file) == TEXTS
        file.seek(0)
        assert read_several(file, "run") == TEXTS
    path = tmp_path / "rows.jsonl"
    path.write_text(JSON_LINES)
    with open(path) as file:
        assert read(file) == TEXTS, "the ending says that a line is a row"
    assert read(io.StringIO("a\r\nb\u2028c\rd")) == ["a", "b\u2028c", "d"]


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS).astype({"text": "category"}),
        pd.DataFrame(ROWS)["text"],
        pa.Table.from_pylist(ROWS),
        pa.RecordBatch.from_pylist(ROWS),
        pa.Table.from_pylist(ROWS)["text"],
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).with_format("torch"),
        np.array(TEXTS),
        np.array([text.encode() for text in TEXTS]),
        [text.encode("utf-16") for text in TEXTS],
    ],
    ids=lambda table: type(table).__name__,
)
def test_tables_and_columns(table):
    assert read(table) == TEXTS
    assert count_items(table, "text") == 2


class Columns:
    """A data frame of a library that is not installed here, as polars."""

    columns = ("text", "label")

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, name):
        return [row[name] for row in self._rows]


def test_a_table_needs_the_column():
    assert read(Columns(ROWS), fields=["label"]) == TEXTS
    for table in (
        pd.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        datasets.Dataset.from_list(ROWS),
        Columns(ROWS),
    ):
        with pytest.raises(ValueError, match=r"column: expected one of \['text', 'label'\], got 'prompt'"):
            read(table, column="prompt")
        with pytest.raises(ValueError, match=r"fields: expected one of \['text', 'label'\], got 'cue'"):
            read(table, fields=["cue"])
    with pytest.raises(ValueError, match=r"got 'text' \(twice\)"):
        read(pd.DataFrame([["a", "b"]], columns=["text", "text"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"a", r"expected a file that ends in .txt, .*, or nothing .*, got '.*a.docx'"),
        ("a.txt.zst", b"a", "expected a file that ends in"),
        ("a.json", b'{"text": {"0": "a"}}', "expected an array in a .json file"),
        ("a.json", b"[1,", "expected an array in a .json file"),
        ("a.csv", b'text,n\n"a"b,1\n', 'line 2.*is written as "a ""b"" c"'),
        ("a.csv", b'text,n\n"a,1\nb,2\n', "line 3: unexpected end of data"),
        ("a.csv", b"id;text\n1;a\n", r"column: expected one of \['id;text'\], got 'text'"),
        ("a.parquet", parquet(TEXTS)[:-9], "expected a whole file, got .*a.parquet"),
        ("a.txt.gz", gzip.compress(bytes(range(256)) * 9)[:-9], "expected a whole file, got .*a.txt.gz"),
        ("a.txt", LINES.encode("utf-16")[:-1], "expected a whole file, got .*a.txt"),
    ],
)
def test_a_file_that_is_not_what_its_ending_says_is_an_error(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path / name)
    assert name in str(raised.value)


def test_one_bad_line_is_one_reason(tmp_path):
    for name, content, expected in (
        ("a.txt", b"a\nb \xff\n\nc", ["a", "line 2: expected UTF-8, got the byte 0xff at character 2", "c"]),
        ("a.csv", b"text,n\na,1\nb\nc,1\n", ["a", "line 3: expected 2 cells, got 1", "c"]),
        (
            "b.csv",
            b"text,n\na,\xff\nb,1\n",
            ["line 2: expected UTF-8, got the byte 0xff at character 2", "b"],
        ),
        ("c.csv", b"text,n\n,1\nb,1\n", [None, "b"]),
        ("b.txt", "a".encode("utf-16-le") + b"\nb", ["line 1: expected text, got a null character", "b"]),
    ):
        (tmp_path / name).write_bytes(content)
        found = read(tmp_path / name)
        assert [one and one.partition(" (")[0] for one in found] == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n")), min_size=1))
def test_lines_and_cells_are_the_texts_that_were_written(texts):
    lines = [text for text in texts if text.strip()]
    assert read(io.StringIO("\n".join(["start", *lines]))) == ["start", *lines]
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["text", "n"], *([text, 1] for text in texts)])
    file.name = "a.csv"
    file.seek(0)
    assert read(file) == [text or None for text in texts]


def test_a_long_cell_is_read_and_the_limit_of_csv_is_as_before(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text\n{'a' * 2 * limit}\n")
    assert [len(text) for text in read(tmp_path / "a.csv")] == [2 * limit]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("text", [TEXTS[1], ""])
def test_text_of_any_library_is_a_string(text):
    data = text.encode()
    same = [text, data, bytearray(data), np.str_(text), np.bytes_(data), np.array(text), np.array(data)]
    same += [
        pa.scalar(text),
        pa.scalar(data),
        text.encode("utf-8-sig"),
        text.encode("utf-16"),
        text.encode("utf-32"),
    ]
    for value in same:
        found = as_text("prompt", value)
        assert found == text
        assert type(found) is str


def test_what_is_not_text_is_unchanged_or_an_error():
    for value in (None, 3, [3], object(), {"a": 1}, np.array([3]), pd.NA):
        assert as_text("prompt", value) is value
    for value in (b"\xff", b"\xff\xfea", np.bytes_(b"\x80")):
        with pytest.raises(ValueError, match="prompt: expected text in UTF-"):
            as_text("prompt", value)
    with pytest.raises(ValueError, match=r"prompt: .* got U\+D800, a half of .* at character 1"):
        as_text("prompt", "a\ud800")


def test_several_prompts_are_not_one_prompt_or_a_table():
    for wrong in ("a", b"a", bytearray(b"a"), {"text": "a"}, 3, np.array("a"), None):
        with pytest.raises(TypeError, match=r"prompts: expected several .*; use run for one prompt"):
            read_several(wrong, "run")
    for frame in (pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS), Columns(ROWS)):
        with pytest.raises(TypeError, match="give one of its columns"):
            read_several(frame, "run")
    with pytest.raises(ValueError, match="prompts: line 1: expected UTF-8"):
        read_several(io.BytesIO(b"\xff"), "run")
    for wrong in (
        {"a", "b"},
        {"text": ["a"]},
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        3,
    ):
        with pytest.raises(
            TypeError, match="prompts: expected the path of a file, or several prompts in an order"
        ):
            read(wrong)


def test_the_text_of_a_whole_file(tmp_path):
    for content in (b"a\r\nb", b"a\rb", b"\xef\xbb\xbfa\nb", "a\r\nb".encode("utf-16")):
        (tmp_path / "a.md").write_bytes(content)
        assert read_text("--document", tmp_path / "a.md") == "a\nb"
    (tmp_path / "a.md").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"--document \(.*a.md\): expected text in UTF-8"):
        read_text("--document", tmp_path / "a.md")
