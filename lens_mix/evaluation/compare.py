"""Compare maps with each other: rank correlation and shared top keys of every pair, layer by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_instance, check_items, check_whole_number
from lens_mix.evaluation.agreement import spearman, top_k_overlap
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import shorten
from lens_mix.maps.spans import Span, find_positions

if TYPE_CHECKING:
    import pandas


def compare(
    maps: Mapping[str, MixingMap] | Sequence[MixingMap],
    *,
    queries: Span | None = None,
    k: int = 5,
    drop_first: bool = False,
) -> pandas.DataFrame:
    """Measure, for every pair of maps of one prompt, how far they agree on the keys of a query, per layer.

        >>> maps = lm.run(model, "The Eiffel Tower is in the city of", ["attention", "value_zeroing"])
        >>> lm.compare(maps, queries=[-1], k=3)

    Rows are compared over the keys that both maps can see. If a row has negative scores, absolute values are
    used. Maps with heads are compared by the mean over heads. Only the order of keys counts, so units may
    differ.

    Args:
        maps: Two or more maps over the same tokens, by label or as a list (then their labels are their
            methods). A layer map and an input map (`lm.rollout`, `lm.input_map`) are not compared. The layers
            that both maps of a pair have are compared. Two input maps of one layer each are always compared.
        queries: The rows to compare, as positions or texts, as in `lm.run`. None: all rows that both maps
            have and that can see more than `k` keys.
        k: The number of the highest keys that are compared, at least 1.
        drop_first: Whether position 0 is left out of the keys. In many maps it has the highest scores.

    Returns:
        One row per pair and layer, with the columns

        - first and second: the labels of the maps;
        - layer;
        - spearman (-1 to 1) and top_k_overlap (0 to 1; about k / n for unrelated rows of n keys), both means
          over the rows where they are defined;
        - rows: the number of compared rows.

        Means are NaN if they are defined for no row.

    Raises:
        TypeError: `maps` contains something else than maps.
        ValueError: There are fewer than two maps, their tokens differ, no two are layer maps or input maps,
            or two maps have no row or layer in common.
    """
    k = check_whole_number("k", k, 1)
    named = _read_maps(maps)
    records = []
    all_pairs = list(itertools.combinations(named.items(), 2))
    alike = [pair for pair in all_pairs if pair[0][1].kind == pair[1][1].kind]
    # If no pair is alike, the check of any of them raises the error.
    for (first, one), (second, other) in alike or all_pairs[:1]:
        _check_comparable(first, one, second, other)
        rows = _find_common_rows(one, other, queries)
        of_one, of_other = (m.select_queries(rows) for m in _select_common_layers(first, one, second, other))
        visible = of_one.visible() & of_other.visible().to(of_one.scores.device)
        visible[..., 0] &= not drop_first
        for layer, label in enumerate(of_one.layer_labels):
            both = zip(visible[layer], of_one.scores[layer], of_other.scores[layer], strict=True)
            pairs = [(_use_magnitudes(x[keys]), _use_magnitudes(y.to(x.device)[keys])) for keys, x, y in both]
            if queries is None:
                # Up to k keys, the top k are all of them for every map, so the overlap has no information.
                pairs = [pair for pair in pairs if len(pair[0]) > k] or pairs
            correlations = _mean_of_defined([spearman(x, y) for x, y in pairs])
            overlaps = _mean_of_defined([top_k_overlap(x, y, k) for x, y in pairs])
            records.append((first, second, label, correlations, overlaps, len(pairs)))
    from lens_mix.tables import Table

    return Table(records, columns=["first", "second", "layer", "spearman", "top_k_overlap", "rows"])


def _read_maps(maps: Mapping[str, MixingMap] | Sequence[MixingMap]) -> dict[str, MixingMap]:
    what = "maps by label, or a list of maps"
    if isinstance(maps, Mapping):
        named = dict(maps)
    else:
        listed = [maps] if isinstance(maps, MixingMap) else check_items("maps", maps, what)
        names = [getattr(each, "method", "") for each in listed]
        named = {
            name if names.count(name) == 1 else f"{name} ({place})": each
            for place, (name, each) in enumerate(zip(names, listed, strict=True))
        }
    for name, each in named.items():
        check_instance(f"maps[{name!r}]", each, MixingMap, "a MixingMap")
    if len(named) < 2:
        raise ValueError(f"maps: expected two or more to compare ({what}), got {len(named)}")
    return {name: each.merge_heads() for name, each in named.items()}


def _check_comparable(first: str, one: MixingMap, second: str, other: MixingMap) -> None:
    if (one.tokens, one.key_labels) != (other.tokens, other.key_labels):
        raise ValueError(
            f"maps: expected the same tokens in all, got {first!r} over {len(one.key_labels)} keys "
            f"{one.key_labels[:4]} … and {second!r} over {len(other.key_labels)} {other.key_labels[:4]} …; "
            "if one has lost its first token, use .drop_bos() on the others"
        )
    if one.kind != other.kind:
        raise ValueError(
            f"maps: expected layer maps or input maps, got {first!r} of kind {one.kind!r} and {second!r} of "
            f"kind {other.kind!r}; lm.rollout, lm.flow or lm.layer_mean make input maps of layer maps"
        )


def _select_common_layers(
    first: str, one: MixingMap, second: str, other: MixingMap
) -> tuple[MixingMap, MixingMap]:
    """Return both maps with the layers that are compared."""
    if one.kind == "input" and len(one) == len(other) == 1:
        return one, other
    common = [label for label in one.layer_labels if label in other.layer_labels]
    if not common:
        raise ValueError(
            f"maps: expected a layer in common, got {first!r} with {shorten(one.layer_labels)} and "
            f"{second!r} with {shorten(other.layer_labels)}"
        )
    return one.select_layers(common), other.select_layers(common)


def _find_common_rows(one: MixingMap, other: MixingMap, queries: Span | None) -> list[int]:
    """Return the positions whose rows are compared."""
    if queries is not None:
        return find_positions(one.tokens, queries, "queries")
    common = [position for position in one.query_positions if position in other.query_positions]
    if not common:
        raise ValueError(
            f"maps: expected a row that both have, got those of {shorten(one.query_positions)} and of "
            f"{shorten(other.query_positions)}"
        )
    return common


def _use_magnitudes(scores: Float[Tensor, " key"]) -> Float[Tensor, " key"]:
    return scores.abs() if bool((scores < 0).any()) else scores


def _mean_of_defined(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
