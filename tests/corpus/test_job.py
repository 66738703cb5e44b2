"""Test `lens_mix.corpus.run`: shards, interruptions, ranks, failures and what identifies a run."""

from __future__ import annotations

import datetime
import errno
import json
import os

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import lens_mix as lm
from lens_mix import corpus
from lens_mix.corpus import files, job, work
from tests import tiny_models
from tests.corpus.conftest import build, contents, draw_texts

METHODS = ["attention", lm.methods.ValueNorms(per_head=True)]
REDUCE = {
    "kinds": corpus.Mean(by=("layer", "key_kind"), per="row"),
    "offsets": corpus.Mean(by=("layer", "offset"), methods=["attention"]),
}


def run(prompts, out, **options):
    return corpus.run(build, prompts, METHODS, REDUCE, out, **{"shard_size": 8, **options})


def test_the_maps_are_those_of_each_prompt_alone(tiny, tmp_path):
    prompts = draw_texts(20)
    done = run(prompts, tmp_path)
    assert done == corpus.Summary(str(tmp_path), prompts=20, reused=0, failed=0, is_finished=True)
    found = {(prompt, method): mixing for prompt, method, mixing in corpus.maps(tmp_path)}
    assert list(found) == [(n, name) for n in range(20) for name in ("attention", "value_norm")]
    for number, prompt in enumerate(prompts):
        for name, alone in lm.run(tiny, prompt, METHODS).items():
            stored = found[number, name]
            torch.testing.assert_close(stored.scores, alone.scores, atol=1e-5, rtol=0)
            for same in ("tokens", "method", "causal", "parameters", "layers", "notes", "default_query"):
                assert getattr(stored, same) == getattr(alone, same)
            assert stored.explained[-1].prediction == alone.explained[-1].prediction
            assert stored.provenance["prompt"] == prompt
            torch.testing.assert_close(lm.rollout(stored).scores, lm.rollout(alone).scores, atol=1e-5, rtol=0)


def test_a_run_that_stops_anywhere_continues_with_the_same_bytes(tmp_path, monkeypatch):
    prompts = draw_texts(5, longest=6)
    run(prompts, tmp_path / "whole", shard_size=3)
    expected = contents(tmp_path / "whole")
    replace = os.replace
    for stop in range(len(expected)):
        calls = iter(range(10**6))

        def fail_at(source, target, stop=stop, calls=calls):
            if next(calls) == stop:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_at)
        out = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            run(prompts, out, shard_size=3)
        monkeypatch.setattr(os, "replace", replace)
        before = {name: path.stat().st_mtime_ns for name, path in _maps(out)}
        assert run(prompts, out, shard_size=3).is_finished
        assert contents(out) == expected
        after = {name: path.stat().st_mtime_ns for name, path in _maps(out)}
        assert {name: after[name] for name in before} == before, "a finished shard was computed again"


def _maps(out):
    return [(path.name, path) for path in (out / "maps").glob("*.parquet")]


def test_the_summary_says_how_many_prompts_an_earlier_run_had_finished(tmp_path):
    run(draw_texts(20), tmp_path)
    (tmp_path / "maps" / "0000001.parquet").unlink()
    done = run(draw_texts(20), tmp_path)
    assert done == corpus.Summary(str(tmp_path), prompts=20, reused=12, failed=0, is_finished=True)


def test_the_maps_of_a_prompt_come_together(tiny, tmp_path):
    prompts = draw_texts(5)
    run(prompts, tmp_path)
    found = dict(corpus.by_prompt(tmp_path))
    assert list(found) == [0, 1, 2, 3, 4]
    for number, prompt in enumerate(prompts):
        assert isinstance(found[number], lm.Maps)
        expected = lm.run(tiny, prompt, METHODS)
        assert list(found[number]) == list(expected)
        for name, each in expected.items():
            torch.testing.assert_close(found[number][name].scores, each.scores, atol=1e-5, rtol=0)
    assert [number for number, _ in corpus.by_prompt(tmp_path, prompts=[3, 1])] == [1, 3]
    for read in (corpus.by_prompt, corpus.maps):
        # The call raises the error, and not the first map.
        with pytest.raises(ValueError, match="invalid literal"):
            read(tmp_path, prompts=["first"])


def test_the_long_table_has_the_entries_of_each_map_with_its_prompt(tmp_path):
    rows = [{"text": text, "cue": text.split()[0], "layer": 7} for text in draw_texts(5)]
    rows[2]["text"] = None
    run(rows, tmp_path, fields=["cue", "layer"])
    table = corpus.load(tmp_path, long=True)
    named = ["prompt", "method", "text", "cue", "field_layer"]
    for (number, method), own in table.groupby(["prompt", "method"]):
        (expected,) = [m for _, _, m in corpus.maps(tmp_path, [number], method)]
        assert set(own["text"]) == {rows[number]["text"]}
        assert set(own["cue"]) == {rows[number]["cue"]}
        assert set(own["field_layer"]) == {7}
        expected = pd.DataFrame(expected.to_dataframe())
        own = pd.DataFrame(own[expected.columns]).reset_index(drop=True)
        pd.testing.assert_frame_equal(own, expected, check_dtype=False)
    assert list(table.columns[:5]) == named
    assert set(table["prompt"]) == {0, 1, 3, 4}
    assert table.attrs["manifest"] == corpus.load(tmp_path).attrs["manifest"]
    for wrong in ({"lazy": True}, {"table": "kinds"}):
        with pytest.raises(ValueError, match="long: expected False with lazy=True or a reduction, got True"):
            corpus.load(tmp_path, long=True, **wrong)


def test_two_ranks_write_the_files_of_one(tmp_path):
    prompts = draw_texts(30)
    run(prompts, tmp_path / "one")
    first = run(prompts, tmp_path / "two", rank=(1, 2))
    assert (first.prompts, first.is_finished) == (8 + 6, False)
    second = run(iter(prompts), tmp_path / "two", rank=(0, 2))
    assert (second.prompts, second.is_finished) == (16, True)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_results_do_not_depend_on_the_batch_size(tmp_path):
    prompts = draw_texts(30)
    for size in (1, 7, 16):
        run(prompts, tmp_path / str(size), batch_size=size)
    run(prompts, tmp_path / "bound", max_memory=200_000)
    alone = list(corpus.maps(tmp_path / "1"))
    for other in ("7", "16", "bound"):
        for (number, method, one), (*same, two) in zip(alone, corpus.maps(tmp_path / other), strict=True):
            assert [number, method] == same
            torch.testing.assert_close(one.scores, two.scores, atol=1e-5, rtol=0)
        for name in REDUCE:
            tables = [corpus.load(tmp_path / folder, name) for folder in ("1", other)]
            assert tables[0]["count"].equals(tables[1]["count"])
            assert (tables[0]["mean"] - tables[1]["mean"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"shard_size": 4}, r"files\.shard_size: 8 there, 4 here"),
        ({"layers": [0]}, r"options\.layers: null there, \[0\] here"),
        ({"dtype": "float16"}, r'files\.dtype: "float32" there, "float16" here'),
        ({"methods": ["attention"]}, r"methods\.value_norm"),
        ({"reduce": None}, r"reduce\.kinds"),
        ({"model": 1}, r'weights: "\w{32}" there, "\w{32}" here'),
    ],
)
def test_another_run_in_the_same_folder_is_an_error_with_the_difference(tmp_path, change, difference):
    prompts = draw_texts(8)
    run(prompts, tmp_path)
    before = contents(tmp_path)
    options = {"shard_size": 8, **change}
    methods, reduce = options.pop("methods", METHODS), options.pop("reduce", REDUCE)
    load = build
    if "model" in options:
        load = _other_model
        options.pop("model")
    with pytest.raises(ValueError, match=f"^out: expected a folder of this run.*{difference}"):
        corpus.run(load, prompts, methods, reduce, tmp_path, **options)
    assert contents(tmp_path) == before


def _other_model():
    return tiny_models.gpt2_like(torch.float32, seed=5, tokenizer=tiny_models.toy_tokenizer())


def test_other_prompts_are_an_error(tmp_path):
    prompts = draw_texts(20)
    run(prompts, tmp_path)
    changed = [*prompts[:11], "w3 w4", *prompts[12:]]
    with pytest.raises(
        ValueError, match=r"prompts: .* shard 1: prompt 11 is another one \(8 there, 8 here\)"
    ):
        run(changed, tmp_path)
    with pytest.raises(ValueError, match=r"shard 2: their number differs \(4 there, 5 here\)"):
        run([*prompts, "w3 w4"], tmp_path)
    with pytest.raises(ValueError, match="got only 8; its shard 2 has later prompts"):
        run(prompts[:8], tmp_path)


def test_a_prompt_that_fails_has_rows_with_its_reason(tmp_path):
    prompts = draw_texts(20)
    prompts[3], prompts[12] = 5, " ".join(["w3"] * 40)
    done = run(prompts, tmp_path)
    assert (done.prompts, done.failed, done.is_finished) == (20, 2, True)
    table = corpus.load(tmp_path)
    assert len(table) == 40
    failed = table[table["error"].notna()]
    assert failed["prompt"].tolist() == [3, 3, 12, 12]
    assert "expected a text, a pair of texts, tokens, or messages, got 5" in failed["error"].iloc[0]
    assert "32" in failed["error"].iloc[2], "the length of the model's context"
    assert table["scores"].notna().sum() == 36
    assert len(list(corpus.maps(tmp_path))) == 36
    first_positions = corpus.load(tmp_path, "offsets").query("offset == 19")
    assert first_positions["count"].max() <= 18


def test_a_failure_in_a_batch_is_that_of_its_prompt(tmp_path, monkeypatch):
    prompts = draw_texts(8)
    mapped = work.map_prompts

    def fail_on(session, batch, **options):
        if any(prompt.text == prompts[5] for prompt in batch):
            raise RuntimeError("not enough memory")
        return mapped(session, batch, **options)

    monkeypatch.setattr(work, "map_prompts", fail_on)
    assert run(prompts, tmp_path).failed == 1
    table = corpus.load(tmp_path)
    assert table[table["error"].notna()]["error"].tolist() == ["RuntimeError: not enough memory"] * 2
    monkeypatch.setattr(work, "map_prompts", mapped)
    assert run(prompts, tmp_path).failed == 1, "a finished shard is not computed again"
    assert run(prompts, tmp_path, retry=True).failed == 0
    assert corpus.load(tmp_path)["error"].isna().all()


def test_a_reason_of_all_prompts_is_an_error(tmp_path):
    reduce = {"heads": corpus.Mean(by=("layer", "head"))}
    with pytest.raises(ValueError, match=r"shard 0: every prompt failed .* with heads for 'head'"):
        corpus.run(build, draw_texts(4), "attention", reduce, tmp_path)
    assert files.Folder(tmp_path).shards() == []


def test_a_full_disk_is_an_error_and_the_run_continues_later(tmp_path, monkeypatch):
    prompts, fsync = draw_texts(20), os.fsync
    run(prompts, tmp_path / "whole")
    count = iter(range(100))

    def full(descriptor):
        if next(count) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"out: expected to write shard 1 .*No space left on device.*run again"
    ) as found:
        run(prompts, tmp_path / "full")
    assert found.value.errno == errno.ENOSPC
    assert not list((tmp_path / "full").rglob(".lens_mix-*")), "no part of a file is left"
    monkeypatch.setattr(os, "fsync", fsync)
    run(prompts, tmp_path / "full")
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_broken_file_is_computed_again(tmp_path):
    prompts = draw_texts(20)
    run(prompts, tmp_path)
    expected = contents(tmp_path)
    path = files.Folder(tmp_path).maps_file(1)
    path.write_bytes(path.read_bytes()[:-100])
    run(prompts, tmp_path)
    assert contents(tmp_path) == expected


def test_float16_states_its_error(tmp_path):
    prompts = draw_texts(8)
    run(prompts, tmp_path / "exact")
    run(prompts, tmp_path / "half", dtype="float16")
    pairs = zip(corpus.maps(tmp_path / "exact"), corpus.maps(tmp_path / "half"), strict=True)
    largest = max((one[2].scores - two[2].scores).abs().max().item() for one, two in pairs)
    assert 0 < largest < 1e-2
    assert corpus.load(tmp_path / "half").attrs["rounding"] == pytest.approx(largest)
    assert corpus.load(tmp_path / "exact").attrs["rounding"] == 0
    for name in REDUCE:
        tables = [corpus.load(tmp_path / folder, name) for folder in ("exact", "half")]
        assert tables[0].equals(tables[1]), "reductions are of the exact scores"


def test_the_files_are_compressed_in_streams_of_bytes(tmp_path):
    run(draw_texts(8), tmp_path)
    group = pq.ParquetFile(files.Folder(tmp_path).maps_file(0)).metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    scores = columns["scores.list.element"]
    assert scores.compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" in scores.encodings


def test_without_maps_only_reductions_and_reasons_are_kept(tmp_path):
    prompts = [*draw_texts(9), 7]
    run(prompts, tmp_path / "maps")
    run(prompts, tmp_path / "none", keep_maps=False)
    table = corpus.load(tmp_path / "none")
    assert len(table) == 20
    assert table["scores"].isna().all()
    assert table["error"].notna().sum() == 2
    assert list(corpus.maps(tmp_path / "none")) == []
    for name in REDUCE:
        assert corpus.load(tmp_path / "none", name).equals(corpus.load(tmp_path / "maps", name))


def test_wrong_arguments_are_errors(tmp_path):
    for wrong, message in (
        ({"dtype": "int8"}, "dtype: expected 'float16', 'float32' or 'float64'"),
        ({"shard_size": 0}, "shard_size: expected a whole number, 1 or more"),
        ({"part": "all"}, "part: expected one part"),
        ({"rank": (2, 2)}, "rank: expected a whole number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(draw_texts(2), tmp_path / "new", **wrong)
    with pytest.raises(TypeError, match=r"batchsize: .* has no argument of this name"):
        run(draw_texts(2), tmp_path / "new", batchsize=4)
    with pytest.raises(TypeError, match=r"prompts: expected the path .* use lm\.run for one prompt"):
        run({"text": "w3"}, tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="prompts: expected a file that exists"):
        run("w3 w4", tmp_path / "new")
    with pytest.raises(ValueError, match="keep_maps: expected True without reduce="):
        corpus.run(build, draw_texts(2), "attention", out=tmp_path / "new", keep_maps=False)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="out: expected a folder, got the file"):
        run(draw_texts(2), file)


def test_files_of_killed_processes_are_removed_when_they_are_old(tmp_path):
    run(draw_texts(8), tmp_path)
    for name, age in (("new", 0), ("old", 2 * files._LEFT_SECONDS)):
        path = tmp_path / "maps" / f".lens_mix-{name}.parquet"
        path.write_bytes(b"part")
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    run(draw_texts(8), tmp_path)
    assert [path.name for path in (tmp_path / "maps").glob(".*")] == [".lens_mix-new.parquet"]


def test_the_bar_counts_own_prompts(capsys, tmp_path):
    run(draw_texts(20), tmp_path, rank=(0, 2), progress=True)
    shown = capsys.readouterr().err
    assert "12/12" in shown, "the first and the last of three shards"
    assert "prompts/s" in shown
    run(draw_texts(20), tmp_path, rank=(0, 2), progress=True)
    assert "12/12" in capsys.readouterr().err


def test_the_manifest_says_what_was_run(tmp_path):
    run(draw_texts(8), tmp_path, queries=[-1])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["lens_mix"] == lm.__version__
    assert set(manifest["methods"]) == {"attention", "value_norm"}
    assert "per_head" in json.dumps(manifest["methods"]["value_norm"])
    assert manifest["options"]["queries"] == [-1]
    finished = json.loads((tmp_path / "finished.json").read_text())
    assert finished == {"prompts": 8, "shards": 1, "failed": 0}
    assert job._make_job(build, [], "attention", None, tmp_path).manifest["files"]["shard_size"] == 256


def test_the_table_has_the_text_of_prompts(tmp_path):
    texts, tokens = draw_texts(2), [[3, 4], [5, 6]]
    run([texts[0], tokens[0], texts[1].encode(), 7], tmp_path / "new")
    table = corpus.load(tmp_path / "new")
    assert table["text"].fillna("").tolist() == [*2 * texts[:1], "", "", *2 * texts[1:], "", ""]
    assert corpus.load(tmp_path / "new", lazy=True).schema.field("text").type == "string"
    assert len(list(corpus.maps(tmp_path / "new"))) == 6


def test_one_bad_prompt_or_field_never_ends_a_run(tmp_path):
    prompts = draw_texts(3)
    bad = [[2**70, 1], [10**6], {1}, b"\xff", None, np.array([2**63 + 1], np.uint64), "\ud800"]
    rows = [{"text": prompt, "when": datetime.date(2020, 1, 1)} for prompt in [*prompts, *bad]]
    rows += [{"text": prompts[0], "when": {1}}, {"text": prompts[0]}]
    reduce = {"days": corpus.Mean(by=("when",))}
    done = corpus.run(build, rows, "attention", reduce, tmp_path, fields=["when"], shard_size=4)
    assert (done.prompts, done.failed, done.is_finished) == (12, 9, True)
    table = corpus.load(tmp_path)
    assert table["error"].notna().tolist() == [False] * 3 + [True] * 9
    assert table["when"].tolist()[:3] == ["2020-01-01"] * 3
    assert corpus.load(tmp_path, "days")["when"].tolist() == ["2020-01-01"]


def test_a_field_and_its_text_are_different_groups(tmp_path):
    values = [1, "1", True, "true", None, "null", 1.5, "a", '"a"', [1], "01"]
    rows = [{"text": "w3 w4 w5", "kind": value} for value in values]
    reduce = {"kinds": corpus.Mean(by=("kind",))}
    corpus.run(build, [*rows, *rows], "attention", reduce, tmp_path, fields=["kind"], shard_size=7)
    found = corpus.load(tmp_path, "kinds")
    assert found["count"].nunique() == 1
    expected = [1, "1", True, "true", None, "null", 1.5, "a", '"a"', "[1]", "01"]
    assert sorted(map(repr, found["kind"])) == sorted(map(repr, expected))


def test_no_prompts_and_no_folder_are_errors(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for prompts, out, message in (
        ([], tmp_path / "new", "prompts: expected at least one prompt, got none"),
        (["w3 w4"], "", "out: expected the path of a folder, got an empty one"),
        (["w3 w4"], tmp_path / "link", "out: expected a folder, got a link to nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus.run(lambda: pytest.fail("loaded"), prompts, "attention", out=out)
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "nothing").exists()
