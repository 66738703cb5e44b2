"""Which pairs of query and key there are, and the pieces that they are computed in.

A key's zeroed value reaches only the queries that give it weight, so a causal map costs its triangle. A group
of neighbouring keys is done at a time, so that their vectors are read once: the queries that all of them
reach in slabs (keys by queries), small enough for a processor's cache; the others (the diagonal of a causal
map) as stairs, computed like slabs up to the one large matrix product, where the pairs that do not exist
drop out. Where the diagonal is whole it is halved: squares, and triangles of a few keys, in which less drops
out; all of a size are tiles of one piece. The pieces are gathered into chunks for that product.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.algebra.workspace import even


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done at once.

    Attributes:
        group: neighbouring keys that are done together.
        triangle: keys of the smallest triangles that a whole diagonal is cut into.
        slab: rows (pairs) of one slab.
        columns: neurons that are held at once.
        chunk: rows of one product with the second matrix.
        keys: keys whose vectors are held at once.
        positions: positions of all prompts that are held at once.
        ragged: whether a key's pairs end where its queries do; if not, all keys of a group take the queries
            of any (fewer, larger pieces).
    """

    group: int
    triangle: int
    slab: int
    columns: int
    chunk: int
    keys: int
    positions: int
    ragged: bool

    def for_threads(self, threads: int) -> Sizes:
        """Larger pieces for several threads, each of which brings its own caches."""
        factor = max(1, min(threads, 16))
        return dataclasses.replace(self, slab=self.slab * factor, chunk=self.chunk * factor)


CPU = Sizes(group=16, triangle=8, slab=512, columns=512, chunk=1536, keys=128, positions=2048, ragged=True)
GPU = Sizes(
    group=128,
    triangle=128,
    slab=16384,
    columns=4096,
    chunk=16384,
    keys=1024,
    positions=16384,
    ragged=False,
)


@dataclasses.dataclass(frozen=True)
class Slab:
    """Some sources by some of one prompt's queries; or several tiles of this kind.

    Attributes:
        prompt: of which prompt.
        sources, queries: of the first tile.
        tiles: how many there are.
        step: how much further each one is than the one before, in sources and in queries.
    """

    prompt: int
    sources: slice
    queries: slice
    tiles: int = 1
    step: int = 0

    @property
    def keys(self) -> int:
        """How many sources a tile has."""
        return self.sources.stop - self.sources.start

    @property
    def width(self) -> int:
        """How many queries a tile has."""
        return self.queries.stop - self.queries.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its pairs."""
        own = (self.keys, self.width)
        return own if self.tiles == 1 else (self.tiles, *own)

    @property
    def rows(self) -> int:
        """How many pairs."""
        return self.tiles * self.keys * self.width


@dataclasses.dataclass(frozen=True)
class Stairs:
    """Some of a slab's pairs.

    Attributes:
        slab: the slab.
        own: the queries of each of its sources, among the slab's; tile after tile.
    """

    slab: Slab
    own: tuple[slice, ...]

    @property
    def rows(self) -> int:
        """How many pairs."""
        return sum(some.stop - some.start for some in self.own)

    def places(self) -> list[int]:
        """Each pair's number in the slab, source after source."""
        slab = self.slab
        return [
            n * slab.width + query - slab.queries.start - n // slab.keys * slab.step
            for n, some in enumerate(self.own)
            for query in range(some.start, some.stop)
        ]


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is zeroed as one: a key, or a span of keys, of one prompt.

    Attributes:
        prompt: of which prompt, per source.
        column: the map's key axis.
        positions: the zeroed positions; shorter spans are filled up.
        real: which positions are no filling.
        first, last: the queries that give any of them weight lie in first..last - 1.
        prompts, columns: `prompt` and `column` where the maps are.
    """

    prompt: list[int]
    column: list[int]
    positions: Int[Tensor, "source span"]
    real: Bool[Tensor, "source span"]
    first: list[int]
    last: list[int]
    prompts: Int[Tensor, " source"]
    columns: Int[Tensor, " source"]

    def __len__(self) -> int:
        return len(self.prompt)


def find_sources(
    seen: Bool[Tensor, "batch query key"],
    real: Bool[Tensor, "batch pos"],
    spans: Sequence[Sequence[int]] | None,
) -> Sources:
    """Every source of every prompt, and which queries it reaches (the one look at the GPU's numbers).

    Args:
        seen: which keys get weight from any of the heads that are zeroed.
        real: which positions are the prompts' own.
        spans: positions of a prompt, padding not counted, that are zeroed as one; None: each alone.
    """
    seen = seen & real[:, :, None] & real[:, None, :]
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
    device = seen.device
    prompts, columns = [prompt for prompt, *_ in found], [column for _, column, *_ in found]
    return Sources(
        prompts,
        columns,
        torch.tensor(filled, device=device, dtype=torch.long).reshape(-1, longest),
        torch.tensor(no_filling, device=device, dtype=torch.bool).reshape(-1, longest),
        [begin for *_, begin, _ in found],
        [end for *_, end in found],
        torch.tensor(prompts, device=device, dtype=torch.long),
        torch.tensor(columns, device=device, dtype=torch.long),
    )


def chunks(sources: Sources, lot: slice, sizes: Sizes) -> Iterator[list[Slab | Stairs]]:
    """The slabs of some sources, gathered."""
    chunk: list[Slab | Stairs] = []
    rows = 0
    for slab in _slabs(sources, lot, sizes):
        if chunk and rows + slab.rows > sizes.chunk:
            yield chunk
            chunk, rows = [], 0
        chunk.append(slab)
        rows += slab.rows
    if chunk:
        yield chunk


def _slabs(sources: Sources, lot: slice, sizes: Sizes) -> Iterator[Slab | Stairs]:
    """Group by group; whole diagonals of several groups together."""
    most = min(sizes.group, sizes.slab)
    for _, same_prompt in itertools.groupby(range(lot.start, lot.stop), key=sources.prompt.__getitem__):
        own = list(same_prompt)
        groups = [own[begin : begin + most] for begin in range(0, len(own), most)]
        for distance, some in itertools.groupby(groups, key=lambda group: _whole(sources, group, sizes)):
            alike = list(some)
            if distance is None:
                for group in alike:
                    yield from _of_group(sources, group, sizes)
            else:
                yield from _diagonal(sources, alike, sizes)


def _whole(sources: Sources, group: list[int], sizes: Sizes) -> int | None:
    """How far a group's sources and the first queries that they reach are apart; None where it differs.

    None too where these queries are not all there: the diagonal of a group of n sources has n queries.
    """
    keys = len(group)
    numbers = slice(group[0], group[-1] + 1)
    first, last = sources.first[numbers], sources.last[numbers]
    whole = (
        sizes.ragged
        and keys == sizes.group > sizes.triangle
        and keys % 2 == 0
        and (keys // 2) ** 2 <= sizes.slab
        and first == list(range(first[0], first[0] + keys))
        and min(last) == max(last) >= first[0] + keys
    )
    return first[0] - group[0] if whole else None


def _diagonal(sources: Sources, groups: list[list[int]], sizes: Sizes) -> Iterator[Slab | Stairs]:
    """The diagonals of neighbouring groups in halves, then the queries that all sources of a group reach."""
    start, width, count = groups[0][0], sizes.group, len(groups)
    prompt, first = sources.prompt[start], sources.first[start]
    while width > sizes.triangle and width % 2 == 0:
        half = width // 2
        numbers, queries = slice(start, start + half), slice(first + half, first + width)
        yield from _tiles(Slab(prompt, numbers, queries, count, width), sizes.slab)
        width, count = half, count * 2
    numbers, queries = slice(start, start + width), slice(first, first + width)
    for slab in _tiles(Slab(prompt, numbers, queries, count, width), sizes.slab):
        begin = slab.queries.start
        sources_of_all = range(slab.tiles * width)
        yield Stairs(slab, tuple(slice(begin + n, begin + n - n % width + width) for n in sources_of_all))
    for group in groups:
        yield from _rectangle(sources, group, sources.first[group[-1]] + 1, sources.last[group[0]], sizes)


def _tiles(slab: Slab, most: int) -> Iterator[Slab]:
    """A slab's tiles in even parts of at most so many rows."""
    for part in even(0, slab.tiles, max(1, most // (slab.keys * slab.width))):
        moved = part.start * slab.step
        yield dataclasses.replace(
            slab,
            sources=slice(slab.sources.start + moved, slab.sources.stop + moved),
            queries=slice(slab.queries.start + moved, slab.queries.stop + moved),
            tiles=part.stop - part.start,
        )


def _rectangle(sources: Sources, group: list[int], start: int, stop: int, sizes: Sizes) -> Iterator[Slab]:
    """All of a group's sources by some queries."""
    numbers = slice(group[0], group[-1] + 1)
    for queries in even(start, stop, sizes.slab // len(group)):
        yield Slab(sources.prompt[group[0]], numbers, queries)


def _of_group(sources: Sources, group: list[int], sizes: Sizes) -> Iterator[Slab | Stairs]:
    """The queries that all of a group's sources reach, then what is left of each."""
    prompt, numbers = sources.prompt[group[0]], slice(group[0], group[-1] + 1)
    first, last = sources.first[numbers], sources.last[numbers]
    if not sizes.ragged:
        first, last = [min(first)] * len(group), [max(last)] * len(group)
    start = max(first)
    stop = max(start, min(last))
    yield from _rectangle(sources, group, start, stop, sizes)
    before = [slice(begin, min(start, end)) for begin, end in zip(first, last, strict=True)]
    after = [slice(max(stop, begin), end) for begin, end in zip(first, last, strict=True)]
    for own in (before, after):
        yield from _stairs(prompt, numbers, own, sizes.slab)


def _stairs(prompt: int, sources: slice, own: list[slice], most: int) -> Iterator[Slab | Stairs]:
    """Some queries of each source; source by source where they would fill too little of a slab."""
    reach = [n for n, some in enumerate(own) if some.start < some.stop]
    if not reach:
        return
    begin, end = reach[0], reach[-1] + 1
    some, numbers = own[begin:end], slice(sources.start + begin, sources.start + end)
    start, stop = min(own[n].start for n in reach), max(own[n].stop for n in reach)
    if (end - begin) * (stop - start) > 4 * sum(own[n].stop - own[n].start for n in reach):
        for n in reach:
            for queries in even(own[n].start, own[n].stop, most):
                yield Slab(prompt, slice(sources.start + n, sources.start + n + 1), queries)
        return
    for queries in even(start, stop, max(1, most // (end - begin))):
        inside = [
            slice(
                max(part.start, queries.start), max(part.start, queries.start, min(part.stop, queries.stop))
            )
            for part in some
        ]
        stairs = Stairs(Slab(prompt, numbers, queries), tuple(inside))
        if stairs.rows:
            yield stairs
