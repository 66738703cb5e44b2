"""What single heads attend to (Clark et al., "What Does BERT Look at?", BlackboxNLP 2019).

They are read off maps with heads, `lm.run(model, prompt, lm.AttentionWeights(per_head=True))`, of one prompt
or of many; maps of other methods, and maps without heads (as one head), work alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import instance, number, one_of, several, whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import as_position
from lens_mix.statistics.heads import Head, TokenGroup, each_head, each_map, members, reusable, with_heads

_SEPARATORS = ("[SEP]", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>")
_OFFSETS = (-3, -2, -1, 0, 1, 2, 3)
_GROUPS: dict[str, TokenGroup] = {
    "first": 0,
    "separators": _SEPARATORS,
    "punctuation": lambda token: token.strip(" Ġ▁") in (".", ","),
}


class OffsetHead(NamedTuple):
    """A head that attends to one relative position."""

    layer: int
    head: int
    offset: int
    share: float


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Means over the queries of all prompts; tensors are `[layer, head]`, float64.

    Attributes:
        offsets: relative position (key − query) to the share of a row at that key, 0 to 1: the mean over
            the queries for which that key exists and could be seen; 0 where there is no such query.
        groups: name to the share of a row at the tokens of that group, 0 to 1, mean over all queries.
        entropy: of the rows, in nats: high for heads that attend broadly.
        evenness: entropy divided by that of even attention over the keys that could be seen, 0 to 1: mean
            over queries that could see two keys or more (0 where none could).
        layers: labels of the layers.
        prompts, queries: how many were averaged.
        from_query: the same for one query of each prompt ([CLS] or the last token), or None.
    """

    offsets: dict[int, Float[Tensor, "layer head"]]
    groups: dict[str, Float[Tensor, "layer head"]]
    entropy: Float[Tensor, "layer head"]
    evenness: Float[Tensor, "layer head"]
    layers: list[int]
    prompts: int
    queries: int
    from_query: AttentionStatistics | None = None

    def fixed_offset_heads(self, threshold: float = 0.5) -> list[OffsetHead]:
        """Heads that put more than `threshold` of their attention on one relative position, most first."""
        heads = [
            OffsetHead(head.layer, head.head, offset, head.value)
            for offset, shares in self.offsets.items()
            for head in self._above(shares, threshold)
        ]
        return sorted(heads, key=lambda head: -head.share)

    def group_heads(self, group: str, threshold: float = 0.5) -> list[Head]:
        """Heads that put more than `threshold` of their attention on a group of tokens, most first.

        Raises ValueError: no such group.
        """
        one_of("group", group, self.groups)
        return self._above(self.groups[group], threshold)

    def broad_heads(self, threshold: float = 0.8) -> list[Head]:
        """Heads whose evenness is above `threshold`, most even first."""
        return self._above(self.evenness, threshold)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per head: layer, head, offset_-1, …, first, separators, …, entropy, evenness.

        What `from_query` holds comes with the prefix `query_`.
        """
        table = pd.DataFrame(each_head(self.layers, self.entropy))[["layer", "head"]]
        for prefix, part in (("", self), ("query_", self.from_query)):
            if part is not None:
                offsets = {f"offset_{offset}": shares for offset, shares in part.offsets.items()}
                columns = {**offsets, **part.groups, "entropy": part.entropy, "evenness": part.evenness}
                table = table.assign(
                    **{prefix + name: column.flatten().tolist() for name, column in columns.items()}
                )
        return table

    def _above(self, values: Float[Tensor, "layer head"], threshold: float) -> list[Head]:
        threshold = number("threshold", threshold)
        heads = [head for head in each_head(self.layers, values) if head.value > threshold]
        return sorted(heads, key=lambda head: -head.value)


def attention_statistics(
    maps: MixingMap | Iterable[MixingMap],
    *,
    offsets: Sequence[int] | None = None,
    groups: Mapping[str, TokenGroup] | None = None,
    query: Literal["first", "last"] | int | None = None,
) -> AttentionStatistics:
    """Where heads look: relative positions, groups of tokens, and how broadly (Clark et al. 2019, section 3).

    Rows are divided by their sum first. Every query counts once, so longer prompts count more. Of maps of
    cross-attention (`part="cross"`) the groups are of keys, the source's tokens, and there are no offsets.

    Args:
        maps: one map or several, with the same layers and heads.
        offsets: relative positions, key − query: −1 is the previous token, 0 the token itself. None: −3 to 3,
            and none where the keys are another sequence than the queries.
        groups: name to tokens: a position, a token, several of them, or a function token -> bool. A prompt
            without such a token counts with 0. None: "first" (position 0), "separators" ([SEP], </s>,
            <|endoftext|> and the like), "punctuation" (full stops and commas).
        query: whose attention `from_query` describes: "first" ([CLS]), "last", or a position. None: "last"
            for causal maps and cross-attention, else "first".

    Raises:
        TypeError: maps that are none; offsets that are no whole numbers.
        ValueError: no maps; maps of different layers, heads or kinds of keys; offsets between two sequences;
            negative scores; a query that a prompt does not have; maps without the rows of all positions.
    """
    given_steps = _OFFSETS if offsets is None else several("offsets", offsets, "whole numbers")
    steps = [whole_number("offsets", step) for step in given_steps]
    groups = _GROUPS if groups is None else groups
    instance("groups", groups, Mapping, "a dict of groups by their names")
    chosen = {name: reusable(group) for name, group in groups.items()}
    remaining = iter(each_map(maps, any_keys=True))
    first = next(remaining, None)
    if first is None:
        raise ValueError("maps: expected at least one map, got none")
    if first.key_tokens is not None:
        if offsets is not None and steps:
            raise ValueError(
                "offsets: expected none for maps whose keys are another sequence than their queries, got "
                f"{steps}; leave them out"
            )
        steps = []
    every, single = _Totals(steps, list(chosen)), _Totals(steps, list(chosen))
    for mixing_map in itertools.chain([first], remaining):
        mixing_map.require_every_row("means over all queries", "maps")
        belongs = {name: members(mixing_map.key_labels, group) for name, group in chosen.items()}
        every.add(mixing_map, list(range(len(mixing_map.tokens))), belongs)
        single.add(mixing_map, [_query(mixing_map, query)], belongs)
    return every.means(first.layer_labels, single.means(first.layer_labels, None))


class _Totals:
    """Sums over queries, and how many queries each has."""

    def __init__(self, offsets: list[int], groups: list[str]) -> None:
        self.offsets, self.groups = offsets, groups
        self.sums: dict[str | int, Tensor] = {}
        self.counts: dict[str | int, Tensor] = {}
        self.prompts = self.queries = 0

    def add(self, mixing_map: MixingMap, queries: list[int], belongs: dict[str, Tensor]) -> None:
        weights = with_heads(mixing_map)[:, :, queries]
        visible = mixing_map.visible().cpu()[:, queries]
        self.prompts += 1
        self.queries += len(queries)
        everywhere = torch.ones(visible.shape[:2], dtype=torch.bool, device="cpu")
        for offset in self.offsets:
            keys = torch.tensor(queries, dtype=torch.long, device="cpu") + offset
            # Keys outside are read at an end, and not counted.
            inside = (keys >= 0) & (keys < weights.shape[-1])
            places, keys = torch.arange(len(queries), device="cpu"), keys.clamp(0, weights.shape[-1] - 1)
            self._count(offset, weights[:, :, places, keys], visible[:, places, keys] & inside)
        for name in self.groups:
            self._count(f"group {name}", weights[..., belongs[name]].sum(-1), everywhere)
        entropy = torch.special.entr(weights).sum(-1)
        key_counts = visible.sum(-1)
        self._count("entropy", entropy, everywhere)
        # A query that sees one key is neither even nor uneven.
        self._count(
            "evenness", entropy / key_counts.clamp(min=2).to(entropy.dtype).log()[:, None], key_counts > 1
        )

    def _count(
        self, name: str | int, values: Float[Tensor, "layer head query"], counted: Bool[Tensor, "layer query"]
    ) -> None:
        self.sums[name] = self.sums.get(name, 0) + (values * counted[:, None]).sum(-1)
        self.counts[name] = self.counts.get(name, 0) + counted.sum(-1, keepdim=True)

    def means(self, layers: list[int], from_query: AttentionStatistics | None) -> AttentionStatistics:
        means = {name: total / self.counts[name].clamp(min=1) for name, total in self.sums.items()}
        return AttentionStatistics(
            offsets={offset: means[offset] for offset in self.offsets},
            groups={name: means[f"group {name}"] for name in self.groups},
            entropy=means["entropy"],
            evenness=means["evenness"],
            layers=list(layers),
            prompts=self.prompts,
            queries=self.queries,
            from_query=from_query,
        )


def _query(mixing_map: MixingMap, query: Literal["first", "last"] | int | None) -> int:
    count = len(mixing_map.tokens)
    if query is None:
        # The queries of cross-attention are a decoder's.
        query = "last" if mixing_map.causal or mixing_map.key_tokens is not None else "first"
    if isinstance(query, str) and query in ("first", "last"):
        return 0 if query == "first" else count - 1
    return as_position(query, count, "query", also="'first', 'last' or ")
