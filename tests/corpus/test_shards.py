"""Test that every file of a corpus is whole and of its run, in `run`, `load` and `maps`."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lens_mix import corpus
from lens_mix._care import identity
from lens_mix.corpus import files, job, work
from tests.corpus.conftest import build, contents, draw_texts
from tests.damage import damage_bytes, damage_json

REDUCE = {"layers": corpus.Mean(by=("layer",)), "kinds": corpus.Mean(by=("layer", "key_kind"))}
PROMPTS = draw_texts(6, longest=5)


def run(out, prompts=PROMPTS, methods="attention", **options):
    return corpus.run(build, prompts, methods, REDUCE, out, **{"shard_size": 2, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a finished folder of three shards, which no test changes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(out)
    return out


@pytest.fixture
def out(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


def read_all(folder):
    """Return everything that a folder contains, as values that can be compared."""
    maps = [(*place, mixing.scores.tolist(), mixing.tokens) for *place, mixing in corpus.maps(folder)]
    tables = [corpus.load(folder, name).to_dict("list") for name in REDUCE]
    rows = corpus.load(folder).drop(columns=["scores", "tokens", "shape", "mask", "mask_shape"])
    return maps, tables, rows.astype(str).to_dict("list")


def maps_file(folder, shard):
    return files.Folder(folder).maps_file(shard)


def part_file(folder, shard, name="kinds"):
    return files.Folder(folder).reduced_file(name, shard)


def swap(one, two):
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def other_run(out, **options):
    """Return the folder of another run beside `out`."""
    folder = out.parent / "other"
    run(folder, **options)
    return folder


# Each function damages a folder, and returns the file that an error must name.
def lose_maps(out):
    maps_file(out, 1).unlink()
    return maps_file(out, 1)


def lose_the_last_maps(out):
    maps_file(out, 2).unlink()
    return maps_file(out, 2)


def lose_part(out):
    part_file(out, 1).unlink()
    return part_file(out, 1)


def empty_part(out):
    part_file(out, 0).write_bytes(b"")
    return part_file(out, 0)


def empty_maps(out):
    maps_file(out, 0).write_bytes(b"")
    return maps_file(out, 0)


def half_maps(out):
    content = maps_file(out, 0).read_bytes()
    maps_file(out, 0).write_bytes(content[: len(content) // 2])
    return maps_file(out, 0)


def swap_maps(out):
    swap(maps_file(out, 0), maps_file(out, 2))
    return maps_file(out, 0)


def swap_parts(out):
    swap(part_file(out, 0), part_file(out, 2))
    return part_file(out, 0)


def swap_reductions(out):
    swap(part_file(out, 1, "kinds"), part_file(out, 1, "layers"))
    return part_file(out, 1, "layers")


def copy_maps(out):
    shutil.copy(maps_file(out, 0), maps_file(out, 1))
    return maps_file(out, 1)


def part_without_rows(out):
    pq.write_table(pq.read_table(part_file(out, 0)).slice(0, 0), part_file(out, 0))
    return part_file(out, 0)


def maps_written_by_another_program(out):
    table = pq.read_table(maps_file(out, 0))
    pq.write_table(table.slice(0, 1), maps_file(out, 0))
    return maps_file(out, 0)


def other_rows_with_the_same_record(out):
    """Write other scores under the metadata of the file."""
    path = maps_file(out, 0)
    file = pq.ParquetFile(path)
    table = file.read()
    metadata = file.metadata.metadata
    zeros = pa.array(
        [[0.0] * len(row) for row in table["scores"].to_pylist()], table.schema.field("scores").type
    )
    table = table.set_column(table.schema.get_field_index("scores"), "scores", zeros)
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: value for key, value in metadata.items() if b"ARROW" not in key})
    return path


def parts_of_other_prompts(out):
    shutil.copytree(
        other_run(out, prompts=draw_texts(6, seed=3)) / "reduced", out / "reduced", dirs_exist_ok=True
    )
    return part_file(out, 0, "layers")


DAMAGES = (
    *(lose_maps, lose_the_last_maps, lose_part, empty_part, empty_maps, half_maps, swap_maps, swap_parts),
    *(swap_reductions, copy_maps, part_without_rows, maps_written_by_another_program),
    *(other_rows_with_the_same_record, parts_of_other_prompts),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_shard_that_is_not_whole_is_an_error_that_names_its_file_and_is_computed_again(whole, out, damage):
    path = damage(out)
    for read in (
        lambda: corpus.load(out),
        lambda: corpus.load(out, "kinds"),
        lambda: list(corpus.maps(out)),
    ):
        with pytest.raises(
            ValueError, match=rf"^folder: expected all files of shard \d.*{path.name}.*run again"
        ):
            read()
    with pytest.raises(ValueError, match=str(path)):
        corpus.load(out)
    done = run(out)
    assert (done.prompts, done.failed, done.is_finished) == (6, 0, True)
    assert contents(out) == contents(whole)


def test_an_error_is_raised_before_rows_of_the_shard_are(out):
    half_maps(out)
    assert [prompt for prompt, *_ in corpus.maps(out, prompts=[3, 5])] == [3, 5], "shard 0 is not read"
    with pytest.raises(ValueError, match="shard 0"):
        next(corpus.maps(out))


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": draw_texts(6, longest=5, seed=9), "methods": "value_norm"},
        {"methods": ["attention", "value_norm"]},
        {"queries": [-1]},
        {"dtype": "float16"},
        {"shard_size": 3},
    ],
)
def test_a_shard_of_another_run_is_an_error_and_is_not_replaced(out, options):
    foreign = maps_file(other_run(out, **options), 1)
    content = foreign.read_bytes()
    maps_file(out, 1).write_bytes(content)
    message = (
        rf"expected files of the run in .*manifest\.json, got {maps_file(out, 1)}, which another run wrote"
    )
    for read in (
        lambda: corpus.load(out),
        lambda: corpus.load(out, lazy=True),
        lambda: corpus.load(out, "layers"),
        lambda: list(corpus.maps(out)),
    ):
        with pytest.raises(ValueError, match=f"^folder: {message}"):
            read()
    with pytest.raises(ValueError, match=f"^out: {message}"):
        run(out)
    with pytest.raises(ValueError, match=f"^out: {message}"):
        run(out, rank=(0, 2))
    assert maps_file(out, 1).read_bytes() == content


def test_other_prompts_with_the_same_options_are_an_error_of_run(out):
    foreign = other_run(out, prompts=draw_texts(6, longest=5, seed=9))
    for path in (maps_file(out, 1), *(part_file(out, 1, name) for name in REDUCE)):
        shutil.copy(foreign / path.relative_to(out), path)
    with pytest.raises(ValueError, match=r"prompts: expected those of the run .* shard 1: prompt 2"):
        run(out)


def test_other_files_beside_the_shards_do_not_matter(whole, out):
    for name in ("99x.parquet", "5.parquet", "0000000 (1).parquet", "0000001.parquet.tmp", "notes.txt", "7"):
        (out / "maps" / name).write_bytes(b"other")
    (out / "reduced" / "kinds" / "9.parquet").write_bytes(b"other")
    assert run(out).is_finished
    assert read_all(out) == read_all(whole)


def test_a_file_beyond_the_last_shard_is_named(out):
    beyond = maps_file(out, 9)
    for content in (b"", maps_file(out, 0).read_bytes()):
        beyond.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"^out: expected 3 shards in .*, but {beyond} .*; move it away"
        ):
            run(out)
    beyond.unlink()
    assert run(out).is_finished


def test_seeded_damage_of_every_file(whole, out):
    """A damaged file is an error that names it, or everything is read as before; `run` restores all bytes."""
    before, bytes_before = read_all(whole), contents(whole)
    draw, refused, tried = random.Random(0), 0, 0
    names = sorted(name for name in bytes_before if name.endswith(".parquet"))
    for name in draw.sample(names, 4):
        for what, content in damage_bytes(bytes_before[name], seed=len(name), count=24):
            (out / name).write_bytes(content)
            tried += 1
            try:
                found = read_all(out)
            except ValueError as problem:
                assert str(problem).startswith("folder: expected"), what
                assert name in str(problem), what
                refused += 1
            else:
                assert found == before, what
            with pytest.raises(ValueError, match="folder: expected all files"):
                corpus.load(out)
        (out / name).write_bytes(content)
        assert run(out).is_finished
        assert contents(out) == bytes_before
    assert refused == tried > 90


def test_seeded_damage_of_the_manifest(whole, out):
    before, text = read_all(whole), (whole / "manifest.json").read_text()
    manifest = json.loads(text)
    damaged = [*damage_bytes(text.encode(), count=80)]
    damaged += [(name, json.dumps(value).encode()) for name, value in damage_json(manifest, count=80)]
    for name in manifest:
        damaged.append((f"no {name}", json.dumps({k: v for k, v in manifest.items() if k != name}).encode()))
    for what, content in damaged:
        (out / "manifest.json").write_bytes(content)
        try:
            found = read_all(out)
        except ValueError as problem:
            assert str(problem).startswith("folder: expected"), what
            assert "manifest" in str(problem), what
        else:
            assert found == before, what
    for what, content in damaged[::8]:
        (out / "manifest.json").write_bytes(content)
        try:
            assert run(out).is_finished, what
        except ValueError as problem:
            assert str(problem).startswith("out: expected"), what
        (out / "manifest.json").write_text(text)
        assert contents(out) == contents(whole), what


def test_a_manifest_of_another_format(out):
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": "lens_mix.corpus/2"}))
    with pytest.raises(ValueError, match=r"folder: expected .* got 'lens_mix\.corpus/2' in .*manifest\.json"):
        corpus.load(out)
    with pytest.raises(ValueError, match=r"out: expected .* got 'lens_mix\.corpus/2' in .*manifest\.json"):
        run(out)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "", '{"shards": "3"}', '{"shards": 99999999999}', '{"shards": -1}']
)
def test_a_damaged_file_of_the_end(whole, out, content):
    (out / "finished.json").write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, UserWarning), match=r"folder: expected|not all shards are finished"):
            corpus.load(out)
    assert run(out).is_finished
    assert contents(out) == contents(whole)


def test_a_lazy_dataset_finds_damaged_scores(out):
    path = maps_file(out, 0)
    content = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    scores = columns["scores.list.element"]
    content[scores.data_page_offset + scores.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        corpus.load(out, lazy=True).to_table()
    lose_part(out)
    with pytest.raises(ValueError, match=part_file(out, 1).name):
        corpus.load(out, "kinds", lazy=True)


def test_a_retry_that_stops_leaves_no_mixed_shard(whole, tmp_path, monkeypatch):
    """The maps of a shard have the digests of its reductions, so new ones beside old maps are noticed."""
    out, mapped, replace = tmp_path / "out", work.map_prompts, os.replace

    def fail_on(session, batch, **options):
        if any(prompt.text == PROMPTS[3] for prompt in batch):
            raise RuntimeError("not enough memory")
        return mapped(session, batch, **options)

    def stop_at_maps(source, target):
        if str(target) == str(maps_file(out, 1)):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(work, "map_prompts", fail_on)
    assert run(out).failed == 1
    monkeypatch.setattr(work, "map_prompts", mapped)
    monkeypatch.setattr(os, "replace", stop_at_maps)
    with pytest.raises(KeyboardInterrupt):
        run(out, retry=True)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ValueError, match=r"layers.0000001\.parquet was not written with it"):
        corpus.load(out, "kinds")
    assert run(out).failed == 0
    assert contents(out) == contents(whole)


def test_a_folder_with_the_name_of_a_shard(out):
    maps_file(out, 1).unlink()
    maps_file(out, 1).mkdir()
    with pytest.raises(ValueError, match="folder: expected all files of shard 1"):
        corpus.load(out)
    with pytest.raises(OSError, match="out: expected to write shard 1"):
        run(out)


def test_the_folder_is_removed_while_running(tmp_path):
    def prompts():
        for number, text in enumerate(PROMPTS):
            if number == 4:
                shutil.rmtree(tmp_path / "out")
            yield text

    with pytest.raises(OSError, match=r"^\[Errno 2\] out: expected to write shard 2"):
        run(tmp_path / "out", prompts())

    def later():
        yield from PROMPTS
        shutil.rmtree(tmp_path / "out" / "maps")

    with pytest.raises(ValueError, match=r"^out: expected all files of shard 0, but .* is missing"):
        run(tmp_path / "out", later())


def test_a_finished_folder_can_be_read_only(out, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "replacing", refuse)
    assert run(out).is_finished
    lose_part(out)
    with pytest.raises(OSError, match=r"out: expected to write shard 1 in .*Permission denied"):
        run(out)
    with pytest.raises(OSError, match=r"out: expected a folder that can be read and written, got .*new"):
        run(out.parent / "new")


# ------------------------------------------------------------------ releases


def change_versions(out, **versions):
    """Write another manifest, and shards that belong to it, as other releases would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "_VERSIONS", {**identity._VERSIONS, **versions})
        return run(out, rank=(0, 2))


def test_a_release_of_pyarrow_does_not_matter(whole, tmp_path, monkeypatch):
    version = job.version
    monkeypatch.setattr(job, "version", lambda name: "1.0" if name in ("pyarrow", "numpy") else version(name))
    assert not run(tmp_path / "out", rank=(0, 2)).is_finished
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(tmp_path / "out").is_finished
        assert read_all(tmp_path / "out") == read_all(whole)
    recorded = json.loads((tmp_path / "out" / "manifest.json").read_text())["recorded"]
    assert recorded["pyarrow"] == "1.0"


@pytest.mark.parametrize("library", ["torch", "transformers", "transformer_lens", "lens_mix"])
def test_a_release_that_changes_numbers_must_be_allowed(whole, tmp_path, library):
    out = tmp_path / "out"
    change_versions(out, **{library: "0.0.1"})
    with pytest.raises(ValueError, match=rf'versions\.{library}: "0\.0\.1" there, .*allow_versions=True'):
        run(out)
    with pytest.raises(
        ValueError, match=r"differs in .*options\.layers.*give another folder, or the same arg"
    ):
        run(out, layers=[0], allow_versions=True)
    with pytest.warns(UserWarning, match=rf"begun with other releases.*versions\.{library}"):
        assert run(out, allow_versions=True).is_finished
    table = corpus.load(out)
    assert {shard: found[library] for shard, found in table.attrs["versions"].items()} == {
        1: identity._VERSIONS[library]
    }
    assert table["scores"].tolist()[0].tolist() == corpus.load(whole)["scores"].tolist()[0].tolist()
    assert "versions" not in corpus.load(whole).attrs
    assert torch.is_tensor(next(corpus.maps(out))[2].scores)
