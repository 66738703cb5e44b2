"""Map a corpus in shards that survive any interruption: `lens_mix.corpus.run`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lens_mix._care.identity import identity, identity_of_model
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.arguments import check_choice, check_flags, check_instance, check_items, check_whole_number
from lens_mix.corpus.entries import Shard, read_shards
from lens_mix.corpus.files import (
    FORMAT,
    RECORDED,
    BrokenShardError,
    Folder,
    digest_manifest,
    read_json,
    write_json,
)
from lens_mix.corpus.on_ray import check_cluster, do_on_ray
from lens_mix.corpus.ranks import Rank, read_rank
from lens_mix.corpus.reductions import Mean, check_reductions
from lens_mix.corpus.rows import DTYPES
from lens_mix.corpus.work import Work
from lens_mix.inputs import check_several, count_items
from lens_mix.runner import MethodLike, read_methods

# These are the options of `lens_mix.run_many` that a corpus has, and that change its numbers.
_OPTIONS = ("queries", "layers", "part", "engine")
_LONGEST_VALUE = 60
# The versions of these are in the manifest, but change no number by more than the last digits.
_RECORDED = ("pyarrow", "numpy", "tokenizers", "pandas")


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a process has done.

    Attributes:
        out: The folder.
        prompts: The number of prompts in the shards of this process.
        reused: The number of these that an earlier run had finished, and this one did not compute.
        failed: The number of these without maps. The reasons are in the table of `lens_mix.corpus.load`.
        is_finished: Whether the folder has all shards, also those of other processes.
    """

    out: str
    prompts: int
    reused: int
    failed: int
    is_finished: bool


def run(
    model_factory: Callable[[], TransformerLensModel] | TransformerLensModel,
    prompts: Any,
    methods: MethodLike | Sequence[MethodLike],
    reduce: Mapping[str, Mean] | None = None,
    out: str | os.PathLike[str] = "corpus",
    *,
    column: str = "text",
    fields: Sequence[str] = (),
    keep_maps: bool = True,
    dtype: str = "float32",
    shard_size: int = 256,
    batch_size: int = 16,
    rank: tuple[int, int] | None = None,
    actors: int | None = None,
    resources: Mapping[str, Any] | None = None,
    retry: bool = False,
    allow_versions: bool = False,
    progress: bool = False,
    residual_shares: bool = False,
    prepend_bos: bool | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> Summary:
    """Compute the maps of a corpus, and write them and their reductions to a folder.

        >>> prompts = ["Anna lives in Rome.", "Ben lives in Oslo."]
        >>> lm.corpus.run(model, prompts, ["attention", "value_zeroing"], out="folder")
        >>> lm.corpus.load("folder")

    The prompts are cut into shards of `shard_size`. Each shard is one Parquet file, which appears when it is
    complete. A run that was killed continues when it is started again with the same arguments: it computes
    the shards that are missing, and the files are the same as without the interruption.

    Args:
        model_factory: A function without arguments that loads the model, or the model itself.
        prompts: The path of a file, whose ending says what it is: `.txt` or no ending (a prompt on each line;
            blank lines do not count), `.jsonl` or `.ndjson` (a prompt or a row on each line), `.json` (an
            array of these), `.csv`, `.tsv` or `.parquet`; also with `.gz`. Or an open file, which is read in
            the same way; a data frame, a table of pyarrow or a Hugging Face dataset; or an iterable of
            prompts or rows. A prompt is a string or bytes in UTF-8, a pair of strings, tokens, or chat
            messages. An iterator must yield the same prompts in every run. A pipe is read once.
        methods: The methods, as in `lens_mix.run`.
        reduce: Means in groups, by name: `{"kinds": lm.corpus.Mean(by=("layer", "key_kind"))}`.
        out: The folder. It is created if it does not exist.
        column: The column with the prompt, for rows.
        fields: Columns to keep with each prompt, for rows: text, numbers, dates, lists or structs. They can
            be groups of a reduction.
        keep_maps: Whether the files have the maps. False: only the tokens of each prompt, or the reason why
            it failed.
        dtype: The type of scores in the files: "float32", "float64" or "float16". Reductions are computed
            from the scores before they are rounded.
        shard_size: The number of prompts of a shard. A process that is killed loses at most so many.
        batch_size: The most prompts per forward pass. Long prompts, or `max_memory`, make batches smaller.
        rank: The number of this process, from 0, and the number of all processes. Each computes every n-th
            shard. None: those of `RANK` and `WORLD_SIZE`, or of `SLURM_ARRAY_TASK_ID` and `_COUNT`.
        actors: The number of processes of a Ray cluster, each with a model. This process reads the prompts
            and sends each shard to one of them. All machines need the folder `out`. Processes that stay
            pending lack free cores or GPUs (`ray status`), or they import torch at a low priority, which
            `RAY_worker_niceness=0` changes if it is set before `ray start`. None: without Ray.
        resources: What each actor needs, as in the `map_batches` of Ray Data: `{"num_gpus": 1}`. Without it,
            an actor has one core and one thread.
        retry: Whether to compute the shards again in which a prompt failed.
        allow_versions: Whether to continue a run of other releases of lens_mix, TransformerLens, torch or
            transformers, whose numbers may differ. The files then say which release wrote them, and a
            warning names the differences.
        progress: Whether to show a bar with the prompts per second and the time left.
        residual_shares: As in `lens_mix.run`.
        prepend_bos: As in `lens_mix.run`.
        max_memory: As in `lens_mix.run`. It also bounds the size of a batch.
        options: `queries`, `layers`, `part` and `engine`, as in `lens_mix.run`.

    Returns:
        The number of prompts, how many of them an earlier run had finished, and how many failed.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, or the folder is of a run with another model, other
            prompts, methods or options; the message shows the difference. Or if there are no prompts.
        ImportError: If `actors` is given, and Ray is not installed.
        FileNotFoundError: If the file of prompts does not exist.
        OSError: If a file cannot be written, because the disk is full, for example. Finished shards remain.
        UnsupportedModelError: As in `lens_mix.run`.
    """
    job = _make_job(
        model_factory,
        prompts,
        methods,
        reduce,
        out,
        column=column,
        fields=fields,
        keep_maps=keep_maps,
        dtype=dtype,
        shard_size=shard_size,
        batch_size=batch_size,
        residual_shares=residual_shares,
        prepend_bos=prepend_bos,
        max_memory=max_memory,
        **options,
    )
    check_flags(retry=retry, allow_versions=allow_versions, progress=progress)
    check_cluster(actors, resources)
    process = read_rank(rank)
    # The first shard is read before the model is loaded, because that takes long.
    shards = job.shards()
    first = next(shards)
    job.start(allow_versions)
    done, reused, sent = 0, 0, []
    with tqdm(
        total=_count_own(job, process) if progress else None,
        disable=not progress,
        desc="prompts",
        unit=" prompts",
    ) as bar:
        for shard in itertools.chain([first], shards):
            if not process.computes(shard.number):
                continue
            done += len(shard.entries)
            if job.work.is_finished(shard, retry):
                reused += len(shard.entries)
                _skip(bar, len(shard.entries))
            elif actors is not None:
                sent.append(shard)
            else:
                job.work.do(shard, bar.update)
        if actors is not None:
            do_on_ray(job.work, sent, actors, resources, bar.update)
    return Summary(str(out), done, reused, job.count_failed(process), job.finish())


@dataclasses.dataclass
class _Job:
    """A run on a corpus: where its prompts are, and the work on each shard.

    Attributes:
        work: The work on a shard, which can be pickled.
        manifest: What identifies the run, without the model.
        read: The arguments of `lens_mix.corpus.entries.read_shards`.
    """

    work: Work
    manifest: dict[str, Any]
    read: tuple[Any, int, str, tuple[str, ...]]
    _count: tuple[int, int] = (0, 0)

    @property
    def folder(self) -> Folder:
        """Return the folder."""
        return Folder(self.work.out)

    def start(self, allow_versions: bool = False) -> None:
        """Load the model, and write the manifest or compare it with that of the folder.

        Args:
            allow_versions: Whether the releases of libraries may differ.

        Raises:
            ValueError: If the manifests differ.
            OSError: If the folder cannot be written.
        """
        model = self.work.session().lens.model
        try:
            manifest = {"format": FORMAT, **identity_of_model(model), **self.manifest}
        except ValueError as problem:
            raise ValueError(
                f"model_factory: the model cannot be identified in a later run: {problem}"
            ) from problem
        manifest = json.loads(json.dumps(manifest))
        path = self.folder.manifest_file
        try:
            if not path.exists():
                if self.folder.shards():
                    raise ValueError(
                        f"out: expected a new folder or one with {path.name}, got {self.folder.path}"
                    )
                self.folder.create(list(self.work.reduce))
                write_json(path, manifest)
            there = read_json(path)
            self._compare(there, manifest, allow_versions)
            self.folder.create(list(self.work.reduce))
        except OSError as problem:
            raise OSError(
                problem.errno,
                f"out: expected a folder that can be read and written, got {self.folder.path}: "
                f"{problem.strerror or problem}",
            ) from problem
        self.work.digest = digest_manifest(there)

    def _compare(self, there: dict[str, Any], manifest: dict[str, Any], allow_versions: bool) -> None:
        """Compare the manifest of the folder with that of this run.

        Raises:
            ValueError: If they differ in more than is allowed.
        """
        if there.get("format") != FORMAT:
            raise ValueError(
                f"out: expected a folder of the format {FORMAT!r}, got {there.get('format')!r} in "
                f"{self.folder.manifest_file}, which another release of lens_mix wrote; give another folder"
            )
        versions = there.get("versions")
        differing = _differences({**there, RECORDED: None}, {**manifest, RECORDED: None})
        if versions != manifest["versions"]:
            self.work.versions = manifest["versions"]
        # A configuration has other settings in other releases of transformers.
        by_release = [
            each for each in differing if each.startswith(("versions.", "settings")) and self.work.versions
        ]
        if differing != by_release or (differing and not allow_versions):
            advice = (
                "give another folder, or install the same releases; allow_versions=True (--allow-versions) "
                "continues with these"
                if differing == by_release
                else "give another folder, or the same arguments"
            )
            raise ValueError(
                f"out: expected a folder of this run, got {self.folder.path}, which differs in "
                f"{', '.join(differing)}; {advice}"
            )
        if differing:
            warnings.warn(
                f"out: {self.folder.path} was begun with other releases, and the numbers of its next files "
                f"may differ: {', '.join(differing)}",
                stacklevel=4,
            )

    def shards(self) -> Iterator[Shard]:
        """Yield all shards of the corpus, and count them."""
        prompts = shards = 0
        for shard in read_shards(*self.read):
            prompts, shards = prompts + len(shard.entries), shards + 1
            self._count = prompts, shards
            yield shard

    def count_failed(self, process: Rank) -> int:
        """Return how many prompts of the shards of a process failed.

        Raises:
            ValueError: If a shard is not complete any more, because someone removed a file, for example.
        """
        own = filter(process.computes, range(self._count[1]))
        return sum(self._read(shard)["failed"] for shard in own)

    def _read(self, shard: int) -> dict[str, Any]:
        # Each process has read or written every byte of its own shards.
        return self.folder.read_shard(shard, self.work.digest, self.work.reduce, every_byte=False)

    def finish(self) -> bool:
        """Return whether all shards are finished, and write the file that says so.

        Raises:
            ValueError: If the folder has shards beyond the last one, or a file of another run.
        """
        prompts, shards = self._count
        there = self.folder.shards()
        if there and there[-1] >= shards:
            try:
                self._read(there[-1])
            except BrokenShardError as problem:
                raise ValueError(
                    f"out: expected {shards} shards in {self.folder.path}, but {problem.what}; move it away"
                ) from problem
            raise ValueError(
                f"prompts: expected as many as in the run in {self.folder.path}, got only {prompts}; its "
                f"shard {there[-1]} has later prompts; give the same prompts, or another folder"
            )
        try:
            failed = sum(self._read(shard)["failed"] for shard in range(shards))
        except BrokenShardError:
            return False
        write_json(self.folder.finished_file, {"prompts": prompts, "shards": shards, "failed": failed})
        return True


def _make_job(
    model_factory: Callable[[], TransformerLensModel] | TransformerLensModel,
    prompts: Any,
    methods: MethodLike | Sequence[MethodLike],
    reduce: Mapping[str, Mean] | None,
    out: str | os.PathLike[str],
    *,
    column: str = "text",
    fields: Sequence[str] = (),
    keep_maps: bool = True,
    dtype: str = "float32",
    shard_size: int = 256,
    batch_size: int = 16,
    residual_shares: bool = False,
    prepend_bos: bool | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> _Job:
    """Return the job of the arguments of `run`, after checking them."""
    check_several(prompts)
    check_instance("model_factory", model_factory, Callable, "a function that loads a model, or a model")
    check_instance("column", column, str, "the name of a column")
    check_choice("dtype", dtype, tuple(DTYPES))
    check_flags(keep_maps=keep_maps, residual_shares=residual_shares)
    kept = tuple(check_items("fields", fields, "names of columns", kind=str))
    reductions = check_reductions(reduce, kept)
    folder = check_instance("out", out, str | os.PathLike, "the path of a folder")
    if not os.fspath(folder):
        raise ValueError("out: expected the path of a folder, got an empty one")
    if os.path.lexists(folder) and not Path(folder).is_dir():
        kind = "the file" if Path(folder).exists() else "a link to nothing,"
        raise ValueError(f"out: expected a folder, got {kind} {folder}")
    size = check_whole_number("shard_size", shard_size, 1)
    batch_size = check_whole_number("batch_size", batch_size, 1)
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"{name}: lm.corpus.run has no argument of this name; it has {', '.join(_OPTIONS)}"
            )
    if options.get("part") == "all":
        raise ValueError("part: expected one part of the model, because a shard has one, got 'all'")
    if not keep_maps and not reductions:
        raise ValueError("keep_maps: expected True without reduce=, because nothing would be computed")
    labeled, _ = read_methods(methods)
    work = Work(
        model_factory,
        labeled,
        reductions,
        os.fspath(folder),
        keep_maps=keep_maps,
        dtype=dtype,
        batch_size=batch_size,
        residual_shares=residual_shares,
        prepend_bos=prepend_bos,
        options={**options, "max_memory": max_memory},
    )
    manifest = {
        "methods": {label: identity(method) for label, method in labeled.items()},
        "reduce": {name: identity(reduction) for name, reduction in reductions.items()},
        "options": {
            **{name: identity(value) for name, value in options.items() if value is not None},
            "residual_shares": residual_shares,
            "prepend_bos": prepend_bos,
        },
        "files": {"dtype": dtype, "keep_maps": keep_maps, "shard_size": size},
        "column": column,
        "fields": list(kept),
        RECORDED: {"python": platform.python_version(), **{name: version(name) for name in _RECORDED}},
    }
    return _Job(work, manifest, (prompts, size, column, kept))


def _skip(bar: tqdm, count: int) -> None:
    """Show prompts of an earlier run, which do not count in the prompts per second."""
    if not bar.disable:
        bar.initial += count
        bar.update(count)


def _count_own(job: _Job, process: Rank) -> int | None:
    """Return the number of prompts in the shards of a process; None if it is not known."""
    prompts, size, column, _ = job.read
    total = count_items(prompts, column)
    if total is None:
        return None
    shards = range(process.index, -(-total // size), process.count)
    return sum(min(size, total - shard * size) for shard in shards)


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Return the names of values that differ, with both values if they are short."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        inner = (
            _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key) for key in keys
        )
        return [difference for found in inner for difference in found]
    values = json.dumps(there), json.dumps(here)
    short = max(map(len, values)) <= _LONGEST_VALUE
    return [f"{name}: {values[0]} there, {values[1]} here" if short else name]
