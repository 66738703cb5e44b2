"""Do maps agree? Rank correlation and shared top keys of every two, layer by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import instance, several, whole_number
from lens_mix.evaluation.agreement import spearman, top_k_overlap
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import Queries, as_positions, shortened

if TYPE_CHECKING:
    import pandas


def compare(
    maps: Mapping[str, MixingMap] | Sequence[MixingMap],
    *,
    queries: Queries | None = None,
    k: int = 5,
    drop_first: bool = False,
) -> pandas.DataFrame:
    """How far every two maps of one prompt agree on which keys a query used, per layer.

    Rows are compared over the keys that both can see, scores by magnitude where there are any below 0, heads
    by their mean; only the order counts, so that units may differ.

    Args:
        maps: two or more, by label or one after the other (then called by their methods), over the same
            tokens: layer maps, or input maps (`lm.rollout`, `lm.input_map`). Layers that both hold are
            compared; two input maps of one layer each are, whichever layer that is.
        queries: the rows to compare, as in `lm.run`; None: all that both hold, except where they hold no
            more than `k` keys.
        k: how many of the largest keys to look at, 1 or more.
        drop_first: leave position 0 out of the keys, which many maps give the most to.

    Returns:
        A row per pair and layer, with columns first, second, layer, spearman (-1 to 1), top_k_overlap (0 to
        1; of unrelated rows of n keys about k / n), both means over the rows where they are defined, and
        rows, how many were compared; NaN where none is.

    Raises:
        TypeError: no maps. ValueError: fewer than two; other tokens; layer maps beside input maps; no row or
            layer in common.
    """
    k = whole_number("k", k, 1)
    named = _named(maps)
    records = []
    for (first, one), (second, other) in itertools.combinations(named.items(), 2):
        _require_alike(first, one, second, other)
        rows = _rows(one, other, queries)
        of_one, of_other = (m.select_queries(rows) for m in _at_common_layers(first, one, second, other))
        visible = of_one.visible() & of_other.visible().to(of_one.scores.device)
        visible[..., 0] &= not drop_first
        for layer, label in enumerate(of_one.layer_labels):
            both = zip(visible[layer], of_one.scores[layer], of_other.scores[layer], strict=True)
            pairs = [(_by_size(x[keys]), _by_size(y.to(x.device)[keys])) for keys, x, y in both]
            if queries is None:
                # Where no more than k keys are seen, the top k are the same whatever the maps say.
                pairs = [pair for pair in pairs if len(pair[0]) > k] or pairs
            correlations = _mean([spearman(x, y) for x, y in pairs])
            overlaps = _mean([top_k_overlap(x, y, k) for x, y in pairs])
            records.append((first, second, label, correlations, overlaps, len(pairs)))
    from lens_mix.tables import Table

    return Table(records, columns=["first", "second", "layer", "spearman", "top_k_overlap", "rows"])


def _named(maps: Mapping[str, MixingMap] | Sequence[MixingMap]) -> dict[str, MixingMap]:
    what = "maps by label, or a list of maps"
    if isinstance(maps, Mapping):
        named = dict(maps)
    else:
        listed = [maps] if isinstance(maps, MixingMap) else several("maps", maps, what)
        names = [getattr(each, "method", "") for each in listed]
        named = {
            name if names.count(name) == 1 else f"{name} ({place})": each
            for place, (name, each) in enumerate(zip(names, listed, strict=True))
        }
    for name, each in named.items():
        instance(f"maps[{name!r}]", each, MixingMap, "a MixingMap")
    if len(named) < 2:
        raise ValueError(f"maps: expected two or more to compare ({what}), got {len(named)}")
    return {name: each.merge_heads() for name, each in named.items()}


def _require_alike(first: str, one: MixingMap, second: str, other: MixingMap) -> None:
    if (one.tokens, one.key_labels) != (other.tokens, other.key_labels):
        raise ValueError(
            f"maps: expected the same tokens in all, got {first!r} over {len(one.key_labels)} keys "
            f"{one.key_labels[:4]} … and {second!r} over {len(other.key_labels)} {other.key_labels[:4]} …; "
            "where one has lost its first token, use .drop_bos() on the others"
        )
    if one.kind != other.kind:
        raise ValueError(
            f"maps: expected layer maps or input maps, got {first!r} of kind {one.kind!r} and {second!r} of "
            f"kind {other.kind!r}; lm.rollout, lm.flow or lm.layer_mean make input maps of layer maps"
        )


def _at_common_layers(
    first: str, one: MixingMap, second: str, other: MixingMap
) -> tuple[MixingMap, MixingMap]:
    """Both with the layers that are compared."""
    if one.kind == "input" and len(one) == len(other) == 1:
        return one, other
    common = [label for label in one.layer_labels if label in other.layer_labels]
    if not common:
        raise ValueError(
            f"maps: expected a layer in common, got {first!r} with {shortened(one.layer_labels)} and "
            f"{second!r} with {shortened(other.layer_labels)}"
        )
    return one.select_layers(common), other.select_layers(common)


def _rows(one: MixingMap, other: MixingMap, queries: Queries | None) -> list[int]:
    """The positions whose rows are compared."""
    if queries is not None:
        return as_positions(queries, len(one.tokens))
    common = [position for position in one.query_positions if position in other.query_positions]
    if not common:
        raise ValueError(
            f"maps: expected a row that all hold, got those of {shortened(one.query_positions)} and of "
            f"{shortened(other.query_positions)}"
        )
    return common


def _by_size(scores: Float[Tensor, " key"]) -> Float[Tensor, " key"]:
    return scores.abs() if bool((scores < 0).any()) else scores


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
