"""Compute what single heads attend to (Clark et al., "What Does BERT Look at?", BlackboxNLP 2019).

The statistics are computed from maps with heads of one prompt or several, as
`lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True))` returns them. Maps of other methods can be
used too. A map without heads counts as one head.
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

from lens_mix.arguments import check_choice, check_instance, check_items, check_number, check_whole_number
from lens_mix.experiments.heads import (
    HeadStatistic,
    TokenGroup,
    find_members,
    get_head_rows,
    iterate_heads,
    iterate_maps,
    read_group,
)
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import as_position

_SEPARATORS = ("[SEP]", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>")
_OFFSETS = (-3, -2, -1, 0, 1, 2, 3)
_GROUPS: dict[str, TokenGroup] = {
    "first": 0,
    "separators": _SEPARATORS,
    "punctuation": lambda token: token.strip(" Ġ▁") in (".", ","),
}


class OffsetHead(NamedTuple):
    """Describe a head that attends to one relative position.

    Attributes:
        layer: The head's layer.
        head: The head's number in its layer.
        offset: The relative position, key − query.
        share: The mean share of the head's attention at that offset, 0 to 1.
    """

    layer: int
    head: int
    offset: int
    share: float


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Contain means over the queries of all prompts; tensors are `[layer, head]`, float64.

    Attributes:
        offsets: For each relative position (key − query), the share of a row at that key, 0 to 1. It is the
            mean over the queries for which that key exists and is visible; 0 if there is no such query.
        groups: For each group of tokens, the share of a row at these tokens, 0 to 1, mean over all queries.
        entropy: The entropy of the rows, in nats: high for heads that attend broadly.
        evenness: The entropy divided by that of even attention over the visible keys, 0 to 1. It is the mean
            over the queries with two visible keys or more; 0 if there is none.
        layers: The labels of the layers.
        prompts: The number of prompts.
        queries: The number of queries of all prompts.
        from_query: The same statistics for one query of each prompt ([CLS] or the last token), or None.
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
        """Return the heads with more than `threshold` of their attention at one relative position.

        The head with the largest share is first.
        """
        heads = [
            OffsetHead(head.layer, head.head, offset, head.value)
            for offset, shares in self.offsets.items()
            for head in self._select_above(shares, threshold)
        ]
        return sorted(heads, key=lambda head: -head.share)

    def group_heads(self, group: str, threshold: float = 0.5) -> list[HeadStatistic]:
        """Return the heads with more than `threshold` of their attention on a group of tokens.

        The head with the largest share is first.

        Raises:
            ValueError: The group does not exist.
        """
        check_choice("group", group, self.groups)
        return self._select_above(self.groups[group], threshold)

    def broad_heads(self, threshold: float = 0.8) -> list[HeadStatistic]:
        """Return the heads with an evenness above `threshold`, the largest first."""
        return self._select_above(self.evenness, threshold)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per head.

        Its columns are layer, head, offset_-1, …, first, separators, …, entropy and evenness. The columns of
        `from_query` have the prefix `query_`.
        """
        table = pd.DataFrame(iterate_heads(self.layers, self.entropy))[["layer", "head"]]
        for prefix, means in (("", self), ("query_", self.from_query)):
            if means is not None:
                offsets = {f"offset_{offset}": shares for offset, shares in means.offsets.items()}
                columns = {**offsets, **means.groups, "entropy": means.entropy, "evenness": means.evenness}
                table = table.assign(
                    **{prefix + name: column.flatten().tolist() for name, column in columns.items()}
                )
        return table

    def _select_above(self, values: Float[Tensor, "layer head"], threshold: float) -> list[HeadStatistic]:
        threshold = check_number("threshold", threshold)
        heads = [head for head in iterate_heads(self.layers, values) if head.value > threshold]
        return sorted(heads, key=lambda head: -head.value)


def attention_statistics(
    maps: MixingMap | Iterable[MixingMap],
    *,
    offsets: Sequence[int] | None = None,
    groups: Mapping[str, TokenGroup] | None = None,
    query: Literal["first", "last"] | int | None = None,
) -> AttentionStatistics:
    """Return the relative positions and groups of tokens that each head attends to, and how broadly.

        >>> method = lm.methods.AttentionWeights(per_head=True)
        >>> m = lm.run(model, "The Eiffel Tower is in the city of", method)
        >>> lm.experiments.attention_statistics(m)

    The statistics are those of Clark et al. (2019, section 3). Rows are divided by their sum first. Every
    query counts once, so longer prompts count more. In maps of cross-attention (`part="cross"`) the groups
    are of keys, the source's tokens, and there are no offsets.

    Args:
        maps: One map or several, with the same layers and heads.
        offsets: Relative positions, key − query: −1 is the previous token, 0 the token itself. None: −3 to 3,
            but no offsets if the keys are another sequence than the queries.
        groups: For each name a group: a position, a token, several of them, or a function token -> bool. A
            prompt without such a token counts with 0. None: "first" (position 0), "separators" ([SEP], </s>,
            <|endoftext|> and the like), "punctuation" (full stops and commas).
        query: The query that `from_query` describes: "first" ([CLS]), "last", or a position. None: "last"
            for causal maps and cross-attention, else "first".

    Returns:
        The means over all queries, and in `from_query` those over one query per prompt.

    Raises:
        TypeError: `maps` contains something else than maps, or `offsets` something else than whole numbers.
        ValueError: No maps; maps with different layers, heads or kinds of keys; offsets between two
            sequences; negative scores; a query that a prompt does not have; maps without the rows of all
            positions.
    """
    listed = _OFFSETS if offsets is None else check_items("offsets", offsets, "whole numbers")
    steps = [check_whole_number("offsets", step) for step in listed]
    groups = _GROUPS if groups is None else groups
    check_instance("groups", groups, Mapping, "a dict of groups by their names")
    chosen = {name: read_group(group) for name, group in groups.items()}
    remaining = iter(iterate_maps(maps, any_keys=True))
    first = next(remaining, None)
    if first is None:
        raise ValueError("maps: expected at least one map, got none")
    if not first.keys_are_tokens:
        if offsets is not None and steps:
            raise ValueError(
                "offsets: expected none for maps whose keys are another sequence than their queries, got "
                f"{steps}; omit them"
            )
        steps = []
    all_queries, one_query = _Totals(steps, list(chosen)), _Totals(steps, list(chosen))
    for mixing_map in itertools.chain([first], remaining):
        mixing_map.require_every_row("means over all queries", "maps")
        members = {name: find_members(mixing_map.key_labels, group) for name, group in chosen.items()}
        all_queries.add(mixing_map, list(range(len(mixing_map.tokens))), members)
        one_query.add(mixing_map, [_read_query(mixing_map, query)], members)
    return all_queries.compute_means(first.layer_labels, one_query.compute_means(first.layer_labels, None))


class _Totals:
    """Add up statistics over queries, and count the queries of each."""

    def __init__(self, offsets: list[int], groups: list[str]) -> None:
        self.offsets, self.groups = offsets, groups
        self.sums: dict[str | int, Tensor] = {}
        self.counts: dict[str | int, Tensor] = {}
        self.prompts = self.queries = 0

    def add(self, mixing_map: MixingMap, queries: list[int], members: dict[str, Tensor]) -> None:
        """Add some queries of one map; `members` has a mask of the keys for each group."""
        weights = get_head_rows(mixing_map)[:, :, queries]
        visible = mixing_map.visible().cpu()[:, queries]
        self.prompts += 1
        self.queries += len(queries)
        all_counted = torch.ones(visible.shape[:2], dtype=torch.bool, device="cpu")
        for offset in self.offsets:
            keys = torch.tensor(queries, dtype=torch.long, device="cpu") + offset
            # Keys outside the prompt are clamped so that indexing works; `inside` then leaves them out.
            inside = (keys >= 0) & (keys < weights.shape[-1])
            rows, keys = torch.arange(len(queries), device="cpu"), keys.clamp(0, weights.shape[-1] - 1)
            self._count(offset, weights[:, :, rows, keys], visible[:, rows, keys] & inside)
        for name in self.groups:
            self._count(f"group {name}", weights[..., members[name]].sum(-1), all_counted)
        entropy = torch.special.entr(weights).sum(-1)
        key_counts = visible.sum(-1)
        self._count("entropy", entropy, all_counted)
        # Evenness is not defined for a query with one visible key.
        self._count(
            "evenness", entropy / key_counts.clamp(min=2).to(entropy.dtype).log()[:, None], key_counts > 1
        )

    def _count(
        self, name: str | int, values: Float[Tensor, "layer head query"], counted: Bool[Tensor, "layer query"]
    ) -> None:
        self.sums[name] = self.sums.get(name, 0) + (values * counted[:, None]).sum(-1)
        self.counts[name] = self.counts.get(name, 0) + counted.sum(-1, keepdim=True)

    def compute_means(self, layers: list[int], from_query: AttentionStatistics | None) -> AttentionStatistics:
        """Return the statistics: each sum divided by its number of queries."""
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


def _read_query(mixing_map: MixingMap, query: Literal["first", "last"] | int | None) -> int:
    count = len(mixing_map.tokens)
    if query is None:
        # The queries of cross-attention are those of a decoder, which is causal.
        is_decoder = mixing_map.causal or mixing_map.predicts_next or not mixing_map.keys_are_tokens
        query = "last" if is_decoder else "first"
    if isinstance(query, str) and query in ("first", "last"):
        return 0 if query == "first" else count - 1
    return as_position(query, count, "query", also="'first', 'last' or ")
