"""Which pairs of query and key there are, and the pieces that they are computed in.

A key's zeroed value reaches only the queries that give it weight, so a causal map costs its triangle.
Queries are cut into windows; a slab is some keys by one window, small enough for a processor's cache. Where
keys reach different parts of a window (the diagonal of a causal map), their runs of queries are strung
together: steps over a handful of pairs would cost more than the pairs. Slabs are gathered into chunks for the
one large matrix product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done at once.

    Attributes:
        window: queries of one slab.
        slab: rows (pairs) of one slab.
        columns: neurons that are held at once.
        chunk: rows of one product with the second matrix.
        keys: keys whose vectors are held at once.
        positions: positions of all prompts that are held at once.
        ragged: slabs of fewer rows are strung together; 0: slabs always end at the window, not where a key's
            queries end (fewer, larger pieces).
    """

    window: int
    slab: int
    columns: int
    chunk: int
    keys: int
    positions: int
    ragged: int

    def for_threads(self, threads: int) -> Sizes:
        """Larger pieces for several threads, each of which brings its own caches."""
        factor = max(1, min(threads, 16))
        return dataclasses.replace(self, slab=self.slab * factor, chunk=self.chunk * factor)


CPU = Sizes(window=64, slab=512, columns=512, chunk=1024, keys=128, positions=2048, ragged=64)
GPU = Sizes(window=128, slab=16384, columns=4096, chunk=16384, keys=1024, positions=16384, ragged=0)


@dataclasses.dataclass(frozen=True)
class Slab:
    """Some sources by a window of one prompt's queries."""

    prompt: int
    sources: slice
    queries: slice

    @property
    def keys(self) -> int:
        """How many sources."""
        return self.sources.stop - self.sources.start

    @property
    def rows(self) -> int:
        """How many pairs."""
        return self.keys * (self.queries.stop - self.queries.start)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Slabs of one source each, one after the other."""

    parts: tuple[Slab, ...]

    @property
    def rows(self) -> int:
        """How many pairs."""
        return sum(part.rows for part in self.parts)

    def numbers(self) -> list[int]:
        """The source of each pair."""
        return [part.sources.start for part in self.parts for _ in range(part.rows)]

    def queries(self) -> list[int]:
        """The query of each pair."""
        return [query for part in self.parts for query in range(part.queries.start, part.queries.stop)]

    def prompts(self) -> list[int]:
        """The prompt of each pair."""
        return [part.prompt for part in self.parts for _ in range(part.rows)]


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is zeroed as one: a key, or a span of keys, of one prompt.

    Attributes:
        prompt: of which prompt, per source.
        column: the map's key axis.
        positions: the zeroed positions; shorter spans are filled up.
        real: which positions are no filling.
        first, last: the queries that give any of them weight lie in first..last - 1.
    """

    prompt: list[int]
    column: list[int]
    positions: Int[Tensor, "source span"]
    real: Bool[Tensor, "source span"]
    first: list[int]
    last: list[int]

    def __len__(self) -> int:
        return len(self.prompt)


def find_sources(
    pattern: Float[Tensor, "batch head query key"],
    real: Bool[Tensor, "batch pos"],
    spans: Sequence[Sequence[int]] | None,
) -> Sources:
    """Every source of every prompt, and which queries it reaches (the one look at the GPU's numbers).

    Args:
        pattern: of the heads that are zeroed.
        real: which positions are the prompts' own.
        spans: positions of a prompt, padding not counted, that are zeroed as one; None: each alone.
    """
    # Head by head: a mask of all heads at once would be a quarter of the pattern.
    seen = torch.zeros_like(pattern[:, 0], dtype=torch.bool)
    for head in pattern.unbind(1):
        seen |= head != 0
    seen &= real[:, :, None] & real[:, None, :]
    positions, any_query = seen.shape[1], seen.any(1)
    first = torch.where(any_query, seen.byte().argmax(1), positions)
    last = torch.where(any_query, positions - seen.flip(1).byte().argmax(1), 0)
    first_of, last_of, real_of = (x.tolist() for x in (first, last, real))
    found: list[tuple[int, int, list[int], int, int]] = []
    for prompt, own in enumerate([p for p, is_real in enumerate(row) if is_real] for row in real_of):
        members = [[p] for p in own] if spans is None else [[own[p] for p in span] for span in spans]
        for number, keys in enumerate(members):
            column = keys[0] if spans is None else number
            begin, end = min(first_of[prompt][k] for k in keys), max(last_of[prompt][k] for k in keys)
            if begin < end:
                found.append((prompt, column, keys, begin, end))
    longest = max((len(keys) for _, _, keys, _, _ in found), default=1)
    filled = [keys + [keys[0]] * (longest - len(keys)) for _, _, keys, _, _ in found]
    no_filling = [[i < len(keys) for i in range(longest)] for _, _, keys, _, _ in found]
    device = pattern.device
    return Sources(
        [prompt for prompt, *_ in found],
        [column for _, column, *_ in found],
        torch.tensor(filled, device=device, dtype=torch.long).reshape(-1, longest),
        torch.tensor(no_filling, device=device, dtype=torch.bool).reshape(-1, longest),
        [begin for *_, begin, _ in found],
        [end for *_, end in found],
    )


def chunks(sources: Sources, lot: slice, sizes: Sizes) -> Iterator[list[Slab | Runs]]:
    """The slabs of some sources, gathered."""
    chunk: list[Slab | Runs] = []
    rows = 0
    for slab in _strung(_slabs(sources, lot, sizes), sizes):
        if chunk and rows + slab.rows > sizes.chunk:
            yield chunk
            chunk, rows = [], 0
        chunk.append(slab)
        rows += slab.rows
    if chunk:
        yield chunk


def _strung(slabs: Iterator[Slab], sizes: Sizes) -> Iterator[Slab | Runs]:
    """The small slabs of a source each, strung together."""
    few: list[Slab] = []
    rows = 0
    for slab in slabs:
        if slab.rows >= sizes.ragged:
            yield slab
            continue
        for number in range(slab.sources.start, slab.sources.stop):
            one = dataclasses.replace(slab, sources=slice(number, number + 1))
            if few and rows + one.rows > sizes.slab:
                yield Runs(tuple(few))
                few, rows = [], 0
            few.append(one)
            rows += one.rows
    if few:
        yield Runs(tuple(few))


def _slabs(sources: Sources, lot: slice, sizes: Sizes) -> Iterator[Slab]:
    """Window by window, the neighbouring sources that reach the same queries of it."""
    numbers = range(lot.start, lot.stop)
    for prompt in sorted({sources.prompt[n] for n in numbers}):
        own = [n for n in numbers if sources.prompt[n] == prompt]
        end = max(sources.last[n] for n in own)
        for start in range(min(sources.first[n] for n in own), end, sizes.window):
            stop = min(start + sizes.window, end)
            reach = [
                (n, max(start, sources.first[n]), min(stop, sources.last[n]))
                for n in own
                if sources.first[n] < stop and sources.last[n] > start
            ]
            if not sizes.ragged:
                reach = [(n, start, stop) for n, _, _ in reach]
            for part in _squares(reach, sizes.ragged):
                yield from _grouped(prompt, part, sizes.slab)


def _squares(reach: list[tuple[int, int, int]], least: int) -> Iterator[list[tuple[int, int, int]]]:
    """A staircase (each source starts at a later query than the one before) cut into squares and the rest.

    Args:
        reach: number, first query and last query + 1 per source.
        least: rows of the smallest square.
    """
    starts = [start for _, start, _ in reach]
    half = len(reach) // 2
    stairs = starts == sorted(starts) and starts[0] != starts[-1] if reach else False
    if not stairs or len({stop for _, _, stop in reach}) > 1:
        yield reach
        return
    cut, stop = starts[half], reach[0][2]
    if half * (stop - cut) < max(1, least):
        yield reach
        return
    yield [(n, cut, stop) for n, _, _ in reach[:half]]
    yield from _squares([(n, start, cut) for n, start, _ in reach[:half] if start < cut], least)
    yield from _squares(reach[half:], least)


def _grouped(prompt: int, reach: list[tuple[int, int, int]], rows: int) -> Iterator[Slab]:
    begin = 0
    while begin < len(reach):
        number, start, stop = reach[begin]
        most = begin + max(1, rows // (stop - start))
        end = begin + 1
        while end < min(len(reach), most) and reach[end] == (number + end - begin, start, stop):
            end += 1
        yield Slab(prompt, slice(number, number + end - begin), slice(start, stop))
        begin = end
