"""Read the folder of a corpus as a table, as a lazy dataset, or as maps."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from lens_mix.arguments import check_choice, check_flags, check_instance, describe_value
from lens_mix.corpus.files import FORMAT, Folder, digest_manifest, read_json
from lens_mix.corpus.reductions import finish_moments, merge_moments, read_labels
from lens_mix.corpus.rows import read_maps
from lens_mix.maps import Maps, MixingMap

if TYPE_CHECKING:
    import pandas
    import pyarrow.dataset


@overload
def load(
    folder: str | os.PathLike[str], table: str = "maps", *, lazy: Literal[True]
) -> pyarrow.dataset.Dataset: ...
@overload
def load(
    folder: str | os.PathLike[str], table: str = "maps", *, long: bool = False, lazy: Literal[False] = False
) -> pandas.DataFrame: ...
def load(
    folder: str | os.PathLike[str], table: str = "maps", *, long: bool = False, lazy: bool = False
) -> pandas.DataFrame | pyarrow.dataset.Dataset:
    """Return the results of `lens_mix.corpus.run` as one table.

        >>> table = lm.corpus.load("maps", long=True)
        >>> table[table["query_token"] == " in"].groupby(["method", "layer"])["score"].mean()

    Args:
        folder: The folder.
        table: "maps": one row for each prompt and method, in the order of the prompts, with the columns
            prompt, method, text (missing for tokens, pairs and messages), error, tokens, shape, scores
            and the fields of the prompts. Or the name of a reduction: one row for each group, with count,
            mean and spread (the standard deviation).
        long: Whether the table "maps" has one row for each entry of each map instead: prompt, method, text,
            the fields, and the columns of `MixingMap.to_dataframe`. Rows without a map are left out. It needs
            much more memory.
        lazy: Whether to return a `pyarrow.dataset.Dataset` of the files, which reads only what is asked
            for. The rows of a shard are then in the order in which they were computed, and the parts of a
            reduction are not merged.

    Returns:
        A pandas DataFrame. Its `attrs` have the manifest, and "rounding", the largest change of a score by
        the type of the files. If other releases of libraries wrote some shards, "versions" has these by the
        number of the shard.

    Raises:
        ValueError: If it is not such a folder, or has no such table; or if `long` is given with `lazy` or a
            reduction. Or if a file is missing, damaged or of
            another run; the message names it. With `lazy`, damaged scores are found when they are read.
    """
    place, manifest, shards = _open(folder)
    check_flags(long=long, lazy=lazy)
    if long and (lazy or table != "maps"):
        raise ValueError(
            f"long: expected False with lazy=True or a reduction, got True with lazy={lazy} and "
            f"table={table!r}"
        )
    check_choice("table", table, ("maps", *manifest["reduce"]))
    records = [_read_record(place, manifest, shard, every_byte=not lazy) for shard in shards]
    paths = [place.maps_file(each) if table == "maps" else place.reduced_file(table, each) for each in shards]
    if lazy:
        import pyarrow.dataset

        options = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        checked = pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options)
        return pyarrow.dataset.dataset([str(path) for path in paths], format=checked)
    if not paths:
        raise ValueError(f"folder: expected at least one finished shard, got none in {folder}")
    if table == "maps":
        found = _read_entries(paths) if long else _read_rows(paths)
    else:
        found = _read_reduction(paths)
    versions = {
        shard: record["versions"]
        for shard, record in zip(shards, records, strict=True)
        if "versions" in record
    }
    found.attrs = {
        "manifest": manifest,
        "rounding": max(record["rounding"] for record in records),
        **({"versions": versions} if versions else {}),
    }
    return found


def maps(
    folder: str | os.PathLike[str], prompts: Sequence[int] | None = None, method: str | None = None
) -> Iterator[tuple[int, str, MixingMap]]:
    """Yield prompt, method and map of each row that has one, in the order of the prompts.

    Scores that were stored as float16 are returned as float32.

        >>> for prompt, method, m in lm.corpus.maps("maps", method="attention"):
        ...     print(prompt, m.top(1))

    Args:
        folder: The folder of `lens_mix.corpus.run`.
        prompts: The numbers of the prompts. None: all.
        method: The label of the method. None: all.

    Raises:
        ValueError: If it is not such a folder, or has no such method. Or, when a shard is reached, if a file
            of it is missing, damaged or of another run; the message names it.
    """
    place, manifest, shards = _open(folder)
    if method is not None:
        check_choice("method", method, tuple(manifest["methods"]))
    # Wrong numbers are errors of the call, and not of the first map.
    wanted = None if prompts is None else sorted({int(prompt) for prompt in prompts})
    rows = _stream_maps(place, manifest, shards, wanted, method)
    return ((prompt, label, mixing) for prompt, label, mixing in rows if mixing is not None)


def by_prompt(
    folder: str | os.PathLike[str], prompts: Sequence[int] | None = None
) -> Iterator[tuple[int, Maps]]:
    """Yield each prompt that has maps with the `Maps` of all methods, in the order of the prompts.

        >>> for prompt, maps in lm.corpus.by_prompt("maps", prompts=[0]):
        ...     print(prompt, maps.compare())

    Args:
        folder: The folder of `lens_mix.corpus.run`.
        prompts: The numbers of the prompts. None: all.

    Raises:
        ValueError: As in `maps`.
    """
    grouped = itertools.groupby(maps(folder, prompts), key=lambda row: row[0])
    return ((prompt, Maps({label: mixing for _, label, mixing in rows})) for prompt, rows in grouped)


def _stream_maps(
    place: Folder,
    manifest: dict[str, Any],
    shards: Sequence[int],
    wanted: Sequence[int] | None,
    method: str | None,
) -> Iterator[tuple[int, str, MixingMap | None]]:
    """Yield the rows of the prompts and of the method, shard by shard; a row without a map has None."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    size = manifest["files"]["shard_size"]
    for shard in shards:
        own = None if wanted is None else [each for each in wanted if each // size == shard]
        if own == []:
            continue
        _read_record(place, manifest, shard)
        filters: list[Any] = [("prompt", "in", own)] if own is not None else []
        filters += [("method", "==", method)] if method is not None else []
        found = pq.read_table(place.maps_file(shard), filters=filters or None)
        # The order of the files is that of the batches.
        order = pc.sort_indices(found, sort_keys=[("prompt", "ascending")])
        yield from read_maps(found.take(order))


def _open(folder: str | os.PathLike[str]) -> tuple[Folder, dict[str, Any], list[int]]:
    """Return a folder, its manifest, and the numbers of its shards.

    Raises:
        ValueError: If it is not the folder of a corpus.
    """
    place = Folder(check_instance("folder", folder, str | os.PathLike, "the path of a folder"), "folder")
    if not place.manifest_file.exists():
        raise ValueError(f"folder: expected a folder of lm.corpus.run, got {folder}, without manifest.json")
    manifest = read_json(place.manifest_file, "folder")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"folder: expected a folder of the format {FORMAT!r}, got {manifest.get('format')!r} in "
            f"{place.manifest_file}; another release of lens_mix may have written it"
        )
    files: Any = manifest.get("files")
    is_complete = all(isinstance(manifest.get(name), dict) for name in ("methods", "reduce", "files"))
    if not is_complete or type(files.get("shard_size")) is not int or files["shard_size"] < 1:
        raise ValueError(
            f"folder: expected a manifest with methods, reduce and files, got {place.manifest_file}, which "
            "was changed after it was written"
        )
    shards = place.shards()
    finished: Any = 0
    if place.finished_file.exists():
        finished = read_json(place.finished_file, "folder").get("shards")
        if type(finished) is not int:
            raise ValueError(
                f"folder: expected the number of shards in {place.finished_file}, got "
                f"{describe_value(finished)}; run lm.corpus.run again"
            )
    there = set(shards)
    missing = next((shard for shard in range(finished) if shard not in there), None)
    if missing is not None:
        # It raises the error of a shard that is not complete.
        _read_record(place, manifest, missing)
    if len(shards) != finished:
        warnings.warn(
            f"{folder}: not all shards are finished; run lm.corpus.run again to compute the others",
            stacklevel=3,
        )
    return place, manifest, shards


def _read_record(
    place: Folder, manifest: dict[str, Any], shard: int, every_byte: bool = True
) -> dict[str, Any]:
    return place.read_shard(shard, digest_manifest(manifest), manifest["reduce"], every_byte)


def _read_rows(paths: Sequence[Any]) -> pandas.DataFrame:
    """Return the rows of all shards in the order of the prompts, with a column per field."""
    frame = _read_table(paths).to_pandas().sort_values("prompt", kind="stable", ignore_index=True)
    return _add_fields(frame)


def _read_entries(paths: Sequence[Any]) -> pandas.DataFrame:
    """Return the entries of the maps of all shards in the order of the prompts, with a column per field."""
    import pandas as pd

    found = _read_table(paths).sort_by([("prompt", "ascending")])
    named = _add_fields(found.select(["prompt", "method", "text", "fields"]).to_pandas())
    entries = []
    for row, (_, _, mixing) in enumerate(read_maps(found)):
        if mixing is None:
            continue
        own = mixing.to_dataframe()
        # `concat` compares the attributes of all tables, which takes long and keeps none.
        own.attrs = {}
        # A field of a prompt may have the name of a column of the map.
        other = named.iloc[[row]].rename(columns=lambda name, own=own: _free_name(name, own))
        entries.append(
            pd.concat([other.loc[other.index.repeat(len(own))].reset_index(drop=True), own], axis=1)
        )
    return pd.concat(entries, ignore_index=True) if entries else named.iloc[:0]


def _read_table(paths: Sequence[Any]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pa.concat_tables([pq.read_table(path) for path in paths])


def _add_fields(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the table with a column per field of the prompts instead of the column `fields`."""
    import pandas as pd

    texts = frame.pop("fields")
    if texts.notna().any():
        fields = pd.DataFrame([json.loads(text) if isinstance(text, str) else {} for text in texts])
        frame = pd.concat([frame, fields.rename(columns=lambda name: _free_name(name, frame))], axis=1)
    return frame


def _free_name(name: str, frame: pandas.DataFrame) -> str:
    """Return the name of a field's column, which no column of the table has."""
    return f"field_{name}" if name in frame.columns else name


def _read_reduction(paths: Sequence[Any]) -> pandas.DataFrame:
    """Return the groups of all shards, merged in the order of the shards."""
    import pyarrow.parquet as pq

    merged: pandas.DataFrame | None = None
    for path in paths:
        part = pq.read_table(path).to_pandas()
        if len(part):
            by = [name for name in part.columns if name not in ("count", "mean", "m2")]
            merged = part if merged is None else merge_moments([merged, part], by)
    if merged is None:
        return pq.read_table(paths[0]).to_pandas().drop(columns="m2")
    return read_labels(finish_moments(merged))
