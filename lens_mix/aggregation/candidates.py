"""Choose the one row of a map that is scored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from lens_mix.aggregation.flow import flow
from lens_mix.aggregation.gradient_rollout import gradient_rollout
from lens_mix.aggregation.layer_mean import layer_mean
from lens_mix.aggregation.rollout import rollout
from lens_mix.arguments import check_items
from lens_mix.maps import MixingMap

Aggregation = Callable[[MixingMap], MixingMap]  # A function from layer maps to an input map.

AS_IT_IS = "-"  # The name of the aggregation of an input map, which needs none.


def aggregations_by_name(asked: Sequence[str] | Mapping[str, Aggregation]) -> dict[str, Aggregation]:
    """Return functions from layer maps to an input map, by their names in tables.

    Args:
        asked: Names, or functions of your own by name. The names are "rollout", "rollout, receptive field",
            "rollout, residual measured", "flow", "gradient_rollout", "mean" (of the layers' raw rows), "upper
            half" (that of the upper half of the layers) and "last" (the row of the last layer).

    Raises:
        ValueError: A name is unknown, or none is given.
    """
    if isinstance(asked, Mapping):
        return dict(asked)
    known: dict[str, Aggregation] = {
        "rollout": rollout,
        "rollout, receptive field": functools.partial(rollout, receptive_field=True),
        "rollout, residual measured": functools.partial(rollout, residual="measured"),
        "flow": flow,
        "gradient_rollout": gradient_rollout,
        "mean": layer_mean,
        "upper half": _mean_of_upper_half,
        "last": lambda m: m.merge_heads().layer(-1).replace(kind="input"),
    }
    names = check_items("aggregations", asked, "names of aggregations", least=1, kind=str, alone=True)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"aggregations: expected some of {list(known)}, or functions by name; got {unknown}")
    return {name: known[name] for name in names}


def _mean_of_upper_half(m: MixingMap) -> MixingMap:
    """Return the mean of the upper half of the layers; the middle one of an odd number belongs to it."""
    return layer_mean(m.select_layers(m.layer_labels[len(m) // 2 :]))


def join_layers(m: MixingMap) -> Float[Tensor, "*head query key"]:
    """Return the scores of the whole model in an input map.

    They are the sum over layers if its method says that these are shares of one number
    (`Method.layers_add_up`), else the last layer.
    """
    return m.scores.sum(0) if m.provenance.get("layers_add_up") else m.scores[-1]


def candidate_rows(
    m: MixingMap,
    query: int | Sequence[int],
    aggregations: Mapping[str, Aggregation],
    refused: dict[str, str] | None = None,
) -> dict[str, Float[Tensor, " key"]]:
    """Return a map's row for one position, for each aggregation by its name, in float64.

    An input map needs no aggregation (`join_layers`). An aggregation that is not defined for the map (a
    rollout of signed scores) is left out.

    Args:
        m: The map.
        query: The position of the row, or several whose rows are summed.
        aggregations: The aggregations by name.
        refused: A dict that gets the reason for each aggregation that is left out.
    """
    if m.kind == "input":
        return {AS_IT_IS: _sum_rows(m, join_layers(m), query)}
    rows = {}
    for name, aggregation in aggregations.items():
        try:
            made = aggregation(m)
        except ValueError as problem:
            if refused is not None:
                refused[name] = str(problem)
            continue
        rows[name] = _sum_rows(made, made.scores[-1], query)
    return rows


def _sum_rows(
    m: MixingMap, scores: Float[Tensor, "query key"], query: int | Sequence[int]
) -> Float[Tensor, " key"]:
    positions = [query] if isinstance(query, int) else query
    return scores[[m.row_index(position) for position in positions]].double().sum(0)


def layer_forms(m: MixingMap) -> dict[str, MixingMap]:
    """Return a layer map with raw scores ("raw") and, if none is negative, with normalized rows ("shares").

    If cells of all layers are ranked together, the scale of each layer matters.
    """
    forms = {"raw": m.merge_heads()}
    if bool((m.scores >= 0).all()):
        forms["shares"] = forms["raw"].normalized()
    return forms
