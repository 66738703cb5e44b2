from __future__ import annotations

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lens_mix.corpus.entries import count_prompts, read_shards

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
        assert count_prompts(source) == 5
    for source in (iter(TEXTS), dataset.to_iterable_dataset()):
        assert count_prompts(source) is None
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
    assert reasons[3] == "expected a text, a pair of texts, or tokens, got 7"
    assert "[]" in entries([[]])[0].error
    assert "a prompt alone" in entries(["text"], fields=["cue"])[0].error


def test_a_missing_column_of_a_file_is_an_error(tmp_path):
    pq.write_table(pa.table({"sentence": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column: expected one of \['sentence'\]"):
        entries(tmp_path / "a.parquet")
