from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lens_mix.corpus.entries import read_shards
from lens_mix.inputs import count_items

TEXTS = [f"text {number}" for number in range(5)]


def entries(prompts, column="text", fields=()):
    shards = list(read_shards(prompts, 2, column, fields))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert all(len(shard.entries) == 2 for shard in shards[:-1])
    found = [entry for shard in shards for entry in shard.entries]
    assert [entry.number for entry in found] == list(range(len(found)))
    return found


def fingerprints(prompts, **options):
    return [entry.fingerprint() for entry in entries(prompts, **options)]


def test_all_sources_of_the_same_texts_have_the_same_fingerprints(tmp_path):
    expected = fingerprints(TEXTS)
    assert len(set(expected)) == 5
    rows = [{"text": text, "other": 1} for text in TEXTS]
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS) + "\n  \n")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = datasets.Dataset.from_list(rows)
    sources = [tmp_path / "a.txt", str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", tmp_path / "a.parquet"]
    sources += [tuple(TEXTS), dataset]
    for source in sources:
        assert fingerprints(source) == expected
        assert count_items(source, "text") == 5
    for source in (iter(TEXTS), dataset.to_iterable_dataset()):
        assert count_items(source, "text") is None
        assert fingerprints(source) == expected


def test_tokens_pairs_and_fields():
    tokens = [[3, 4], (3, 4), torch.tensor([3, 4]), np.array([3, 4])]
    assert {entry.fingerprint() for entry in entries(tokens)} == {entries([[3, 4]])[0].fingerprint()}
    assert entries([["source", "target"]])[0].prompt == ("source", "target")
    rows = [{"sentence": "a", "cue": "x", "n": np.int64(2)}, {"sentence": "b", "cue": None, "n": 3}]
    found = entries(rows, column="sentence", fields=["cue", "n"])
    assert [entry.fields for entry in found] == [{"cue": "x", "n": 2}, {"cue": None, "n": 3}]
    assert found[0].fingerprint() != entries(rows, column="sentence", fields=["cue"])[0].fingerprint()


def test_what_cannot_be_read_is_an_entry_with_the_reason(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n\nlast")
    good, bad, last = entries(tmp_path / "a.txt")
    assert (good.error, last.prompt, bad.prompt) == (None, "last", None)
    assert "line 2: expected UTF-8" in bad.error
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n{"other": 1}\n7\n')
    reasons = [entry.error for entry in entries(tmp_path / "a.jsonl")]
    assert reasons[0] is None
    assert "line 2: expected JSON" in reasons[1]
    assert reasons[2] == "expected the columns ['text'], got ['other']"
    assert reasons[3] == "expected a text, a pair of texts, tokens, or messages, got 7"
    assert "[]" in entries([[]])[0].error
    assert "a prompt alone" in entries(["text"], fields=["cue"])[0].error


def test_a_missing_column_of_a_file_is_an_error(tmp_path):
    pq.write_table(pa.table({"sentence": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column: expected one of \['sentence'\]"):
        entries(tmp_path / "a.parquet")


class Hostile:
    """An object whose every use raises an error."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __getattr__(self, name):
        raise RuntimeError("no attribute")


DEEP: list = []
for _ in range(500):
    DEEP = [DEEP]
NO_PROMPTS = [
    *(None, float("nan"), pd.NA, pd.NaT, 3, True, {1}, object(), Hostile(), [Hostile()], Path("a.txt")),
    *(
        datetime.date(2020, 1, 1),
        pd.DataFrame({"text": ["a"]}),
        pd.Series(["a"]),
        b"\xff",
        "\ud800",
        [],
        ["a"],
    ),
    *(["a"], [2**70, 1], [10**5000], [np.uint64(2**63 + 1)], np.array([2**63 + 1], np.uint64)),
    *([-1], [1.0], [True], np.array(["2020"], "M8[ns]")),
    *(
        torch.zeros(2, dtype=torch.long, device="meta"),
        torch.eye(2).to_sparse(),
        np.array(["2020"], "M8[ns]"),
    ),
    *(DEEP, {"other": "a"}, {"text": {"a": 1}}, {"text": pa.scalar(None, pa.string())}),
]


@pytest.mark.parametrize("number", range(len(NO_PROMPTS)))
def test_one_bad_item_never_ends_a_corpus(number):
    good, bad, last = entries(["good", NO_PROMPTS[number], "last"])
    assert (good.prompt, last.prompt) == ("good", "last")
    assert bad.prompt is None
    assert bad.error
    assert len(bad.error) < 300
    bad.fingerprint()


def test_prompts_of_every_kind():
    same = (
        [3, 4],
        torch.tensor([[3, 4]]),
        np.array([3, 4], np.uint8),
        [np.int64(3), torch.tensor(4)],
        pa.scalar([3, 4]),
    )
    assert [entry.prompt for entry in entries(same)] == [[3, 4]] * 5
    messages = [{"role": "user", "content": b"a"}]
    assert entries([messages])[0].prompt == [{"role": "user", "content": "a"}]
    assert entries([[b"a", np.str_("b")], ("a", "b")])[0].prompt == ("a", "b")
    assert {entry.prompt for entry in entries([b"a", np.array("a"), pa.scalar(b"a")])} == {"a"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.datetime(2020, 1, 2, 3), "2020-01-02T03:00:00"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (pd.Timestamp("2020-01-02"), "2020-01-02T00:00:00"),
        (np.datetime64("2020-01-02T00:00:00.000000001"), "2020-01-02T00:00:00.000000001"),
        (np.array(["2020", "NaT"], "M8[D]"), ["2020-01-01", None]),
        (b"a", "a"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (torch.tensor([1, 2]), [1, 2]),
        (decimal.Decimal("1.10"), "1.10"),
        (pd.NaT, None),
        (pd.NA, None),
        (
            {"when": datetime.date(2020, 1, 2), "of": (np.int8(1), b"x")},
            {"when": "2020-01-02", "of": [1, "x"]},
        ),
        (pa.scalar({"a": b"x"}), {"a": "x"}),
    ],
    ids=str,
)
def test_fields_are_written_as_json_represents_them(value, expected):
    (entry,) = entries([{"text": "a", "f": value}], fields=["f"])
    assert (entry.prompt, entry.fields, entry.error) == ("a", {"f": expected}, None)
    json.loads(json.dumps(dict(entry.fields)))


def test_a_field_without_a_form_in_json_is_a_reason_of_its_row():
    values = [b"\xff", "\ud800", {1}, object(), Hostile(), DEEP, 10**5000, {1: 2}, np.complex64(1)]
    values += [
        np.timedelta64(3, "ns"),
        datetime.timedelta(1),
        torch.zeros(2, device="meta"),
        {"a": [b"\xff"]},
    ]
    rows = [{"text": "a", "f": value} for value in values]
    *bad, good = entries([*rows, {"text": "b", "f": 1}], fields=["f"])
    assert [(entry.prompt, entry.fields, bool(entry.error)) for entry in bad] == [(None, {}, True)] * len(
        values
    )
    assert (good.prompt, good.fields) == ("b", {"f": 1})


def test_no_prompts_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("\n \n")
    for nothing in ([], iter(()), tmp_path / "a.txt", pd.DataFrame({"text": []})):
        with pytest.raises(ValueError, match="prompts: expected at least one prompt, got none"):
            entries(nothing)
