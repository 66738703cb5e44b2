"""Test that tables keep their text in files, and that no cell is a formula."""

import csv
import io
import json
import shutil
import subprocess

import pandas as pd
import pytest
import torch

import lens_mix as lm
from lens_mix._verification.support import Support
from lens_mix.tables import Table, are_written, format_cell, read_cell, read_csv
from tests.source_tree import LIBRARY

# These texts are what pandas reads as a missing value, a boolean or a number, line breaks and separators,
# formulas of spreadsheets, and the table's own notation.
NASTY = [
    *("NA", "N/A", "n/a", "nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A", "#NA", "1.#IND", "-1.#QNAN"),
    *("True", "False", "TRUE", "true", "inf", "-inf", "Infinity"),
    *("01", "1", "007", "1.0", ".5", "1.", "1e5", "1e", "-0", "+1", "1 ", " 1", "1_000", "0x10", "1,5"),
    *("", " ", "  ", " x", "x ", "\xa0", "\u3000", "\t", "\n", "\r", "\r\n", "a\rb", "a\nb", "\x00", "a\x00"),
    *(
        "\x1b",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud83d",
        "\udc00x",
        "e\u0301",
        "\u200d",
        "👩\u200d🚀[1/2]",
        "\u202ea",
    ),
    *("=", "+", "-", "@", "=1+1", " =1+1", "\t=1", "\n=1", "+cmd", "-1", "@SUM", "--", "- x", "＝1", "|cmd"),
    *('"', '""', '"""', '"NA"', '"Hello"', '"\\n"', 'a"b', '"a', 'a"', "'", "'=1", "''s", ",", ";", "a,b"),
    *("\\", "\\n", "\\u003d", "%s", "#", "# c", "{}", "[]", '{"a":1}', "1/2", "2020-01-01", "12:00", "1j"),
    *(
        "<s>",
        "<|endoftext|>",
        "[CLS]",
        "##ing",
        "Ġthe",
        "▁x",
        "é",
        "日本",
        "مرحبا",
        " Tower",
        "👩\u200d🚀[1/2]",
    ),
]


def map_of(tokens):
    scores = torch.rand(2, len(tokens), len(tokens), generator=torch.Generator().manual_seed(0)).tril()
    return lm.MixingMap(scores, tokens=tokens, causal=True)


def cells_of(text):
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


@pytest.mark.parametrize("engine", ["c", "python"])
def test_every_token_comes_back_from_csv(tmp_path, engine):
    original = map_of(NASTY)
    original.to_dataframe().to_csv(tmp_path / "map.csv", index=False)
    table = pd.read_csv(tmp_path / "map.csv", engine=engine)
    found = lm.MixingMap.from_dataframe(table)
    assert found.tokens == NASTY
    assert torch.allclose(found.scores, original.scores.double(), atol=1e-7)


@pytest.mark.parametrize("token", NASTY)
def test_a_column_of_one_kind_comes_back_from_csv(token):
    """Read a column of one kind of text, for which pandas guesses a type."""
    text = map_of([token, token]).to_dataframe().to_csv(index=False)
    assert lm.MixingMap.from_dataframe(pd.read_csv(io.StringIO(text))).tokens == [token, token]
    keys = lm.MixingMap(torch.ones(1, 2, 1), tokens=["a", "b"], key_tokens=[token])
    text = keys.to_dataframe().to_csv(index=False)
    assert lm.MixingMap.from_dataframe(pd.read_csv(io.StringIO(text))).key_tokens == [token]


def test_tokens_in_memory_are_as_they_are():
    table = map_of(NASTY).to_dataframe()
    assert list(table["key_token"][: len(NASTY)]) == NASTY
    assert lm.MixingMap.from_dataframe(table).tokens == NASTY
    # A table of another program was not written by `Table.to_csv`.
    plain = pd.DataFrame(table)
    plain.attrs = {}
    assert lm.MixingMap.from_dataframe(plain).tokens == NASTY


@pytest.mark.parametrize("token", NASTY)
def test_tokens_come_back_from_an_array(token):
    pytest.importorskip("xarray")
    array = map_of([token, "x"]).to_xarray()
    array.attrs = {}
    assert lm.MixingMap.from_xarray(array).tokens == [token, "x"]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_a_spreadsheet_sees_no_formula(separator):
    table = map_of(NASTY).to_dataframe()[["query_token", "key_token"]]
    for frame in (table, table.set_index("key_token"), table.set_index(["query_token", "key_token"])):
        text = frame.to_csv(sep=separator)
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        cells = [cell for row in rows for cell in row]
        assert not [cell for cell in cells if cell.lstrip()[:1] in {*"=+-@＝"} and not cell.isdigit()]
        assert not set("\t\r\n\x00") & {character for cell in cells for character in cell}


def test_what_is_made_from_a_table_is_written_alike():
    table = map_of(["=1", "NA"]).to_dataframe()
    for made in (table[table["layer"] == 1], table.assign(x=1), pd.concat([table, table]), table.head(1)):
        assert isinstance(made, Table)
        assert '"""=1"""' in made.to_csv()
    means = table.groupby("key_token")["score"].mean()
    for made in (means, means.to_frame(), means.reset_index(), table["key_token"]):
        assert '"""=1"""' in made.to_csv()


def test_read_csv_gives_the_table_back(tmp_path):
    table = map_of(NASTY).to_dataframe()
    table.to_csv(tmp_path / "map.csv", index=False)
    again = read_csv(tmp_path / "map.csv")
    assert list(again["query_token"]) == list(table["query_token"])
    assert lm.MixingMap.from_dataframe(again).tokens == NASTY


def test_cells_are_changed_where_they_have_to_be():
    for text in (" Tower", "é", "日本", "the", "a,b", "'s", "[CLS]", "👩\u200d🚀[1/2]", "1/2"):
        assert format_cell(text) == text
    assert format_cell("NA") == '"NA"'
    assert format_cell("a\r") == '"a\\r"'
    assert [read_cell(cell) for cell in ('"NA"', '"Hello"', '"a', '"1" x')] == [
        "NA",
        '"Hello"',
        '"a',
        '"1" x',
    ]
    assert are_written(map(format_cell, NASTY))
    assert not are_written(["NA"])
    assert len({format_cell(text) for text in NASTY}) == len(set(NASTY))


@pytest.mark.parametrize("token", [1.5, None, True, float("nan")])
def test_tokens_that_are_no_text_are_refused(token):
    table = map_of(["a", "b"]).to_dataframe()
    plain = pd.DataFrame(table).assign(key_token=pd.Series([token] * len(table), dtype=object))
    with pytest.raises(ValueError, match=r"expected text in key_token, got .*keep_default_na=False"):
        lm.MixingMap.from_dataframe(plain)


def test_another_programs_csv_is_read_as_the_message_says():
    rows = ["0,0,0,NA,NA,0.5", "0,0,1,NA,01,", "0,1,0,01,NA,0.5", "0,1,1,01,01,0.5"]
    text = "\n".join(["layer,query,key,query_token,key_token,score", *rows])
    with pytest.raises(ValueError, match="expected text in"):
        lm.MixingMap.from_dataframe(pd.read_csv(io.StringIO(text)))
    options = {"dtype": {"query_token": str, "key_token": str}, "keep_default_na": False}
    table = pd.read_csv(io.StringIO(text), **options, na_values={"score": [""]})
    assert lm.MixingMap.from_dataframe(table).tokens == ["NA", "01"]


@pytest.mark.parametrize(
    "options",
    [
        {"keep_default_na": False},
        {"dtype": str, "keep_default_na": False},
        {"dtype": "string"},
        {"dtype": "category"},
        {"dtype_backend": "numpy_nullable"},
        {"dtype_backend": "pyarrow"},
    ],
    ids=str,
)
def test_numbers_are_read_whatever_a_reader_made_of_them(tmp_path, options):
    if options.get("dtype_backend") == "pyarrow":
        pytest.importorskip("pyarrow")
    original = map_of(["NA", "01", "=1", "x"])
    original.to_dataframe().to_csv(tmp_path / "map.csv", index=False)
    found = lm.MixingMap.from_dataframe(pd.read_csv(tmp_path / "map.csv", **options))
    assert found.tokens == original.tokens
    assert found.causal
    assert torch.allclose(found.scores, original.scores.double(), atol=1e-7)


@pytest.mark.parametrize("column", ["layer", "query", "key", "score"])
def test_what_is_no_number_is_named(column):
    table = pd.DataFrame(map_of(["a", "b"]).to_dataframe()).astype({column: object})
    table.loc[1, column] = "many"
    with pytest.raises(ValueError, match=rf"table: expected numbers in {column}, got .*many"):
        lm.MixingMap.from_dataframe(table)


def test_tables_of_reasons_and_labels_hold_no_formula():
    support = Support("m", (("=cmd", None, "-reason"),))
    assert cells_of(support.to_dataframe().to_csv(index=False))[3:] == ['"=cmd"', "", '"-reason"']
    board = lm.compare({"=a": map_of(["a", "b", "c", "d"]), "@b": map_of(["a", "b", "c", "d"])})
    assert {'"=a"', '"@b"'} <= set(cells_of(board.to_csv()))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_page_writes_cells_alike():
    script = (LIBRARY / "view" / "page" / "export.js").read_text(encoding="utf-8")
    script = script[script.index("const MISREAD") : script.index("const quoted")]
    script += "process.stdout.write(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map(written)))"
    done = subprocess.run(
        ["node", "-e", script], input=json.dumps(NASTY), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [format_cell(text) for text in NASTY]
