"""Compute one shard of a corpus: the work that every process does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._inputs.batches import Prompt, group_by_length
from lens_mix.corpus.entries import Entry, Shard
from lens_mix.corpus.files import BrokenShardError, Folder, write_table, writing_maps
from lens_mix.corpus.reductions import Mean, merge_moments
from lens_mix.corpus.rows import failed_row, map_row
from lens_mix.map_prompts import find_measuring_method, map_prompts
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.session import Session

# Without `max_memory`, a batch has as many prompts as need about so many bytes.
_BATCH_BYTES = 1 << 30
# A block records about so many tensors as large as its stream: queries, keys, values, others.
_STREAMS = 12
_LONGEST_REASON = 2000


@dataclasses.dataclass
class Work:
    """What a process needs to compute shards. It can be pickled if the function that loads the model can be.

    Attributes:
        load: The function that loads the model, or the model.
        methods: The methods by their labels.
        reduce: The reductions by their names.
        out: The folder.
        digest: The digest of the manifest.
        versions: The versions of this process, if they are not those of the manifest.
        keep_maps: Whether the files have the maps, and not only the tokens of each prompt.
        dtype: The type of scores in the files.
        batch_size: The most prompts of a batch.
        residual_shares: As in `lens_mix.run`.
        prepend_bos: As in `lens_mix.run`.
        options: The options of `lens_mix.session.Session`.
    """

    load: Callable[[], TransformerLensModel] | TransformerLensModel
    methods: Mapping[str, Method]
    reduce: Mapping[str, Mean]
    out: str
    digest: str = ""
    versions: Mapping[str, str] | None = None
    keep_maps: bool = True
    dtype: str = "float32"
    batch_size: int = 16
    residual_shares: bool = False
    prepend_bos: bool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _session: Session | None = dataclasses.field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the loaded model."""
        return {**vars(self), "_session": None}

    def session(self) -> Session:
        """Return the session, whose model is loaded by the first call.

        Raises:
            TypeError: If the model is not a TransformerLens model.
            ValueError: If an option does not fit the model.
            UnsupportedModelError: If the model or a method on it cannot be used.
        """
        if self._session is None:
            load: Any = self.load
            model: Any = load if isinstance(load, nn.Module) else load()
            methods = dict(self.methods)
            # The measured residual has an engine of its own, as in `run_many`.
            engine = dict.fromkeys(methods, self.options.get("engine", "auto"))
            if self.residual_shares and self.options.get("part") != "cross":
                methods |= find_measuring_method(methods)
            self._session = Session(model, methods, **{**self.options, "engine": engine})
        return self._session

    def is_finished(self, shard: Shard, retry: bool = False) -> bool:
        """Return whether the folder has the result of a shard.

        Args:
            shard: The shard.
            retry: Whether a shard with failed prompts counts as not finished.

        Raises:
            ValueError: If the result is of other prompts or of another run.
        """
        try:
            record = Folder(self.out).read_shard(shard.number, self.digest, self.reduce)
        except BrokenShardError:
            return False
        there, here = record["prompts"], shard.fingerprints()
        if there != here:
            pairs = enumerate(zip(there, here, strict=False))
            differing = [shard.entries[place].number for place, pair in pairs if pair[0] != pair[1]]
            which = f"prompt {differing[0]} is another one" if differing else "their number differs"
            raise ValueError(
                f"prompts: expected those of the run in {self.out}, got others for shard {shard.number}: "
                f"{which} ({len(there)} there, {len(here)} here); give the same prompts, or another folder"
            )
        return not (retry and record["failed"])

    def do(self, shard: Shard, report: Callable[[int], Any] | None = None) -> int:
        """Compute a shard and write its files. Return the number of prompts that failed.

        Args:
            shard: The shard.
            report: A function that is called with the number of prompts that were finished.

        Raises:
            OSError: If a file cannot be written.
            UnsupportedModelError: If a method cannot be used on this model.
            ValueError: If every prompt of the shard failed for the same reason: then the prompts are not it.
        """
        # An error while the model is loaded is not one of writing.
        self.session()
        try:
            return self._compute(shard, report)
        except OSError as problem:
            reason = problem.strerror or problem
            raise OSError(
                problem.errno,
                f"out: expected to write shard {shard.number} in {self.out}, got: {reason}; "
                "the finished shards remain: run again when it can be written",
            ) from problem

    def _compute(self, shard: Shard, report: Callable[[int], Any] | None) -> int:
        folder, fields = Folder(self.out), {entry.number: entry.fields for entry in shard.entries}
        texts = {entry.number: entry.prompt for entry in shard.entries if isinstance(entry.prompt, str)}
        observed: dict[str, dict[tuple[int, int], Any]] = {name: {} for name in self.reduce}
        reasons: dict[int, str] = {}
        rounding = 0.0
        order = {label: place for place, label in enumerate(self.methods)}
        with writing_maps(folder.maps_file(shard.number), self.dtype) as writer:
            for number, found in self._map_shard(shard):
                rows: list[dict[str, Any]] = []
                parts: dict[str, dict[tuple[int, int], Any]] = {name: {} for name in self.reduce}
                try:
                    if isinstance(found, str):
                        raise _FailedPrompt(found)
                    for label, mixing in found.items():
                        row, error = map_row(
                            number, label, fields[number], mixing, self.dtype, self.keep_maps
                        )
                        rows.append(row)
                        rounding = max(rounding, error)
                        for name, reduction in self.reduce.items():
                            table = reduction.observe(label, mixing, fields[number])
                            if table is not None:
                                parts[name][number, order[label]] = table
                except (ValueError, TypeError) as problem:
                    # A prompt is in all of its rows and reductions, or in none.
                    reasons[number] = _describe(problem)
                    rows = [
                        failed_row(number, label, fields[number], reasons[number]) for label in self.methods
                    ]
                    parts = {}
                for row in rows:
                    writer.add({**row, "text": texts.get(number)})
                for name, tables in parts.items():
                    observed[name] |= tables
                if report is not None:
                    report(1)
            self._check_reasons(shard, reasons)
            reduced = {
                name: write_table(folder.reduced_file(name, shard.number), self._merge(name, tables))
                for name, tables in observed.items()
            }
            writer.describe(
                {
                    "run": self.digest,
                    "shard": shard.number,
                    "prompts": shard.fingerprints(),
                    "failed": len(reasons),
                    "rounding": rounding,
                    "reduced": reduced,
                    **({"versions": self.versions} if self.versions else {}),
                }
            )
        return len(reasons)

    def _merge(self, name: str, tables: Mapping[tuple[int, int], Any]) -> Any:
        """Return the Parquet table of a reduction of one shard."""
        import pandas as pd
        import pyarrow as pa

        by = ["method", *self.reduce[name].by]
        # In the order of the prompts, so that the batches do not matter.
        ordered = [tables[key] for key in sorted(tables)]
        merged = merge_moments(ordered, by) if ordered else pd.DataFrame(columns=[*by, "count", "mean", "m2"])
        return pa.Table.from_pandas(merged, preserve_index=False)

    def _check_reasons(self, shard: Shard, reasons: Mapping[int, str]) -> None:
        """Raise an error if all prompts failed in the same way, although all could be read."""
        readable = [entry.number for entry in shard.entries if entry.error is None]
        if len(readable) > 1 and set(readable) <= set(reasons):
            different = {reasons[number] for number in readable}
            if len(different) == 1:
                raise ValueError(
                    f"shard {shard.number}: every prompt failed for the same reason: {different.pop()}"
                )

    def _map_shard(self, shard: Shard) -> Iterator[tuple[int, dict[str, MixingMap] | str]]:
        """Yield the number of each prompt with its maps or the reason why it has none, batch by batch."""
        session = self.session()
        numbers: list[int] = []
        prompts: list[Prompt] = []
        for entry in shard.entries:
            read = self._read(session, entry)
            if isinstance(read, str):
                yield entry.number, read
            else:
                numbers.append(entry.number)
                prompts.append(read)
        for batch in self._plan(session, prompts):
            for some in session.batches([prompts[index] for index in batch]):
                ids = [numbers[batch.pop(0)] for _ in some]
                yield from zip(ids, self._map_batch(session, some), strict=True)

    def _read(self, session: Session, entry: Entry) -> Prompt | str:
        if entry.error is not None:
            return entry.error
        prompt = (
            torch.tensor(entry.prompt, dtype=torch.long, device="cpu")
            if isinstance(entry.prompt, list)
            else entry.prompt
        )
        try:
            return session.read(prompt, prepend_bos=self.prepend_bos)
        # Tokenizers and chat templates raise errors of other classes too.
        except Exception as problem:
            return _describe(problem)

    def _plan(self, session: Session, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Yield the indices of the prompts of each batch: of similar length, and as many as fit in memory."""
        bound = min(self.options.get("max_memory") or _BATCH_BYTES, _BATCH_BYTES)
        for group in group_by_length(prompts, self.batch_size):
            length = max(_length(prompts[index]) for index in group)
            size = max(1, bound // _bytes_of_prompt(session, length))
            for start in range(0, len(group), size):
                yield group[start : start + size]

    def _map_batch(self, session: Session, prompts: list[Prompt]) -> list[dict[str, MixingMap] | str]:
        """Return the maps of each prompt of a batch. If one fails, they run one by one."""
        try:
            return list(map_prompts(session, prompts, prepend_bos=self.prepend_bos))
        except Exception as problem:
            if len(prompts) == 1:
                return [_describe(problem)]
        # Outside of the `except`, the tensors of the failed batch are free.
        return [self._map_batch(session, [prompt])[0] for prompt in prompts]


class _FailedPrompt(ValueError):
    """A prompt has no map; the text is the reason."""


def _describe(problem: Exception) -> str:
    """Return the reason why a prompt has no map."""
    is_named = isinstance(problem, (_FailedPrompt, ValueError, TypeError, UnsupportedModelError))
    text = str(problem) if is_named else f"{type(problem).__name__}: {problem}"
    return text[:_LONGEST_REASON] or type(problem).__name__


def _length(prompt: Prompt) -> int:
    return len(prompt.tokens) + (0 if prompt.target is None else len(prompt.target))


def _bytes_of_prompt(session: Session, length: int) -> int:
    """Return about how many bytes the records and maps of one prompt have."""
    cfg: Any = session.lens.model.cfg
    layers, heads = session.lens.n_layers, session.lens.n_heads
    pairs = 2 * heads * length * length
    return 4 * layers * (pairs + _STREAMS * length * int(getattr(cfg, "d_model", 0) or 1))
