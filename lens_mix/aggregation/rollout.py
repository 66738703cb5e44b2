"""Compute attention rollout (Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020)."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.collapse import collapse_notes
from lens_mix.aggregation.products import Residual, add_residual, cumulative, lower_product
from lens_mix.aggregation.receptive_field import estimate_residual, normalize_rollout, reachable
from lens_mix.arguments import check_flags, check_instance, check_number
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import add_empty_rows_note, require_no_negative
from lens_mix.maps.checks import as_residual
from lens_mix.registry import all_methods, find_recorded


def rollout(
    mixing_map: MixingMap,
    *,
    residual: float | Literal["measured"] | None = None,
    total_mixing: float | None = None,
    receptive_field: bool = False,
    per_head: bool = False,
    drop_bos: bool = False,
    from_layer: int | None = None,
    to_layer: int | None = None,
) -> MixingMap:
    """Return input maps as products of layer maps: rollout (Abnar & Zuidema, ACL 2020, section 3.1).

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> lm.rollout(m).top(3)

    Heads are averaged, the residual is mixed in, Â_l = ((1 − w) A_l + w I) / rowsum, and the layers are
    multiplied: J_0 = Â_0 and J_l = Â_l J_{l−1}. With w = 0.5 this is the paper's (A + I) / rowsum. The
    computation and the result are float64, on the CPU if the device has no float64.

    The rows of A_l are divided by their sum first, because the scores of most methods have units of their
    own. There are two exceptions:

    - Attention weights of a model with an attention sink that is not a token (gpt-oss). Their map has
      `provenance["sink"]` and a note. A row sums to less than 1, because the sink received the rest. It is
      used without a division, so the residual has a larger share. A row is still divided by its sum after
      `drop`, or with `drop_bos`.
    - An all-zero row, which has no shares. With w > 0, the position itself is its only key. With w = 0, the
      row stays zero, the rows above that used it sum to less than 1, and a note names it.

    Args:
        mixing_map: Layer maps `[layer, query, key]` or `[layer, head, query, key]`, 0 or more.
        residual: The residual weight w, 0 to 1. None: the weight of the method, which is 0.5 for attention
            and 0 if the map already contains the residual. "measured": the weight of each row from
            `lm.run(..., residual_shares=True)`, as a share of the whole row whatever its sum; 0 for maps
            whose diagonal contains the residual.
        total_mixing: The mixing over all layers together, instead of `residual`: w = 1 − total / L for L
            layers, at least 0. With a fixed w, the mixing grows with the depth until tokens are no longer
            distinguished. The documentation compares values.
        receptive_field: Whether to normalize by the rollout of uniform attention, so that a key has no
            advantage because many paths reach it (in causal maps: because it is early). Uniform attention has
            the same residual as the map. The paper gives no formula. Ours is R · B0 / R0, where R0 is the
            rollout of uniform attention, and B0 is what it should be: uniform over the keys in reach.
        per_head: Whether to return the variant of the paper's appendix: each head of layer l times the
            rollout, with heads merged, of the layers below.
        drop_bos: Whether to drop position 0 on both axes first, whatever its token. Rows sum to 1 without it.
        from_layer: The label of the first layer (negative: from the end). None: the first of the map.
        to_layer: The label of the last layer (negative: from the end). None: the last of the map.

    Returns:
        A map of kind "input", `[layer, query, key]`, or `[layer, head, query, key]` with `per_head`. It is
        cumulative: its last layer is the rollout of all layers. Rows sum to 1.

    Raises:
        TypeError: If `mixing_map` is not a `MixingMap`, or if `residual` is not a number or "measured".
        ValueError: If the map is an input map, its keys are not the tokens, its layers do not follow one
            another, or a score is below 0. If the residual is outside 0 to 1, is None although the method has
            none, or is "measured" although the map has no measured shares. If `total_mixing` is below 0, or
            is given together with `residual`. If the map has no heads for `per_head`.
    """
    check_flags(receptive_field=receptive_field, per_head=per_head, drop_bos=drop_bos)
    if receptive_field and isinstance(mixing_map, MixingMap):
        require_no_joint(mixing_map, "receptive_field")
    chosen, weights = _select_layers_and_weights(
        mixing_map, residual, total_mixing, from_layer, to_layer, drop_bos
    )
    has_one_weight = isinstance(weights, float)
    largest = float(torch.as_tensor(weights, dtype=torch.float64, device="cpu").max())
    if per_head and not chosen.has_heads:
        raise ValueError(
            f"per_head: expected a map with heads, got scores of shape {tuple(chosen.scores.shape)}"
        )
    maps, notes, row_weights = mix_layers(chosen, weights)
    heads = None
    if per_head:
        heads, head_notes = _mix_heads(chosen, weights)
        notes = (*notes, *(note for note in head_notes if note not in notes))
    product = lower_product if chosen.causal else torch.matmul
    if receptive_field:
        visible = chosen.visible().to(maps.device)
        contains_residual = has_one_weight and includes_residual(chosen)
        null = estimate_residual(maps, visible, largest) if contains_residual else row_weights
        scores = normalize_rollout(maps, visible, null, heads, product=product)
    else:
        scores = cumulative(maps, heads, product)
    options: dict[str, object] = {"residual": largest if has_one_weight else "measured"}
    options |= {"receptive_field": receptive_field, "per_head": per_head, "drop_bos": drop_bos}
    reached = reached_inputs(chosen.visible(), largest)
    if not per_head and len(chosen.layer_labels) > 1:
        notes = (*notes, *collapse_notes(scores[-1], reached[-1], chosen.query_positions))
    return chosen.replace(
        scores=scores,
        mask=None if chosen.mask is None else reached,
        residual=largest if has_one_weight else None,
        kind="input",
        provenance={**chosen.provenance, "aggregation": {"name": "rollout", **options}},
        notes=_add_notes(chosen, notes, receptive_field),
    )


def _select_layers_and_weights(
    mixing_map: MixingMap,
    residual: float | Literal["measured"] | None,
    total_mixing: float | None,
    *layers: Any,
) -> tuple[MixingMap, Residual]:
    """Return the layers to multiply, and one residual weight for all or one for each row of each layer."""
    if isinstance(residual, str) and residual != "measured":
        raise TypeError(f"residual: expected a number from 0 to 1, or 'measured', got {residual!r}")
    if total_mixing is None and residual != "measured":
        return layers_to_mix(mixing_map, "rollout", residual, *layers)
    # The weight of the method is not used here, so any number will do.
    chosen, _ = layers_to_mix(mixing_map, "rollout", 0.0, *layers)
    if total_mixing is None:
        return chosen, _measured_residual(chosen)
    if residual is not None:
        raise ValueError(
            f"total_mixing: expected residual=None, because both set the weight, got residual={residual!r}"
        )
    total = check_number("total_mixing", total_mixing, 0)
    return chosen, max(0.0, 1 - total / len(chosen.layer_labels))


def _measured_residual(chosen: MixingMap) -> Residual:
    """Return the measured residual weights of a map, float64, or 0 if its diagonal contains the residual.

    Raises:
        ValueError: If the map needs measured weights and has none.
    """
    if chosen.residual_shares is not None:
        return to_float64(chosen.residual_shares)
    if includes_residual(chosen):
        return 0.0
    raise ValueError(
        "residual: expected a map with measured residual shares for 'measured', got one without; measure "
        "them with lm.run(..., residual_shares=True), or give MixingMap(residual_shares=) [layer, query]"
    )


def includes_residual(chosen: MixingMap) -> bool:
    """Return whether the map's diagonal already contains the residual stream, so that none is mixed in."""
    method = find_recorded(chosen.method)
    return chosen.residual == 0 and (method is None or method.includes_residual)


class MixedLayers(NamedTuple):
    """The layers of a map after mixing in the residual.

    Attributes:
        maps: Â_l of every layer, float64.
        notes: The notes of the map, and those about its rows.
        weights: The residual weight in Â_l: the weight that was asked for, or one per row if rows gave weight
            to an attention sink.
    """

    maps: Float[Tensor, "layer query key"]
    notes: tuple[str, ...]
    weights: Residual


def mix_layers(chosen: MixingMap, weight: Residual) -> MixedLayers:
    """Return Â_l = ((1 − w) A_l + w I) / rowsum of every layer, with heads averaged first, as in `rollout`.

    Args:
        chosen: The layer maps.
        weight: The residual weight, or one per row, which is the residual's share of the whole row.

    Raises:
        ValueError: If a score is below 0.
    """
    # One layer at a time, because a pass over a whole stack is slow beside the products of its rollout.
    shape = chosen.scores.shape
    maps = to_float64(chosen.scores.new_empty(shape[0], *shape[-2:]))
    sums = maps.new_empty(maps.shape[:-1])
    weights: list[float | Tensor] = []
    for layer, scores in enumerate(chosen.scores):
        maps[layer] = to_float64(scores).mean(0) if chosen.has_heads else scores
        require_no_negative(maps[layer])
        totals = maps[layer].sum(-1, keepdim=True)
        sums[layer] = totals[:, 0]
        maps[layer].div_(totals.masked_fill(totals == 0, 1))
        weights.append(_compute_row_weights(chosen, weight, sums[layer], layer))
        add_residual(maps[layer], weights[-1])
    notes = add_empty_rows_note(chosen.notes, sums == 0, chosen.layer_labels, chosen.query_positions)
    if any(isinstance(each, Tensor) for each in weights):
        weight = torch.stack(
            [
                torch.as_tensor(each, dtype=sums.dtype, device=sums.device).expand_as(sums[0])
                for each in weights
            ]
        )
    return MixedLayers(maps, notes, weight)


def _compute_row_weights(
    chosen: MixingMap, weight: Residual, sums: Float[Tensor, "*head query"], layer: int
) -> float | Float[Tensor, "*rows query"]:
    """Return the residual's share of rows that summed to `sums` before they were divided by it."""
    if isinstance(weight, Tensor):
        return weight[layer]
    if weight == 0 or not chosen.provenance.get("sink"):
        return weight
    return weight / ((1 - weight) * sums.clamp(max=1) + weight)


def _mix_heads(
    chosen: MixingMap, weight: Residual
) -> tuple[Float[Tensor, "layer head query key"], tuple[str, ...]]:
    """Return Â_l of every head, each with its own row sums, and the notes about its rows."""
    raw = chosen.replace(scores=to_float64(chosen.scores))
    normalized = raw.normalized()
    for layer, scores in enumerate(normalized.scores):
        add_residual(scores, _compute_row_weights(chosen, weight, raw.scores[layer].sum(-1), layer))
    return normalized.scores, normalized.notes


def residual_weight(mixing_map: MixingMap, residual: float | None) -> float:
    """Return the residual weight to mix in: the given weight, else that of the map, else that of its method.

    Raises:
        TypeError: If the weight is not a number.
        ValueError: If the weight is outside 0 to 1, or if neither the map nor the method has one.
    """
    if residual is not None:
        return as_residual(residual)
    if mixing_map.residual is not None:
        return mixing_map.residual
    method = find_recorded(mixing_map.method)
    if method is None:
        raise ValueError(
            f"residual: expected a number from 0 to 1, because method {mixing_map.method!r} is none of "
            f"{', '.join(sorted(all_methods()))} and the map has no residual of its own, got None; give 0.5 "
            "if the map contains the attention branch only, 0 if it already contains the residual"
        )
    return as_residual(method.residual)


def require_layer_maps(mixing_map: MixingMap, purpose: str) -> None:
    """Raise an error if `mixing_map` does not contain layer maps.

    Raises:
        TypeError: If it is not a `MixingMap`.
        ValueError: If it is an input map.
    """
    check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    if mixing_map.kind != "layer":
        raise ValueError(
            f"mixing_map: expected layer maps for {purpose}, got kind {mixing_map.kind!r}, which already "
            "describes all layers down to the input"
        )


def require_chain(mixing_map: MixingMap, purpose: str) -> None:
    """Raise an error if the layers of `mixing_map` cannot be multiplied.

    Raises:
        TypeError: If it is not a `MixingMap`.
        ValueError: If it is an input map, its keys are not the tokens, or rows are missing.
    """
    require_layer_maps(mixing_map, purpose)
    if not mixing_map.keys_are_tokens:
        raise ValueError(
            f"mixing_map: expected the tokens as keys for {purpose}, because other keys do not chain from "
            f"layer to layer, got {len(mixing_map.key_labels)} other keys for {len(mixing_map.tokens)} tokens"
        )
    mixing_map.require_every_row(purpose)


def require_no_joint(mixing_map: MixingMap, purpose: str) -> None:
    """Raise a ValueError for a stack of `joint`, whose layers contain residuals of different sizes."""
    if "joint" in mixing_map.provenance:
        raise ValueError(
            f"mixing_map: expected maps of one part for {purpose}, got a joint stack (lm.aggregation.joint), "
            f"whose layers contain residuals that the formula of {purpose} leaves out; use lm.rollout or "
            "lm.flow with their defaults"
        )


def to_float64(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the same numbers in float64, on the CPU if the device has no float64."""
    return (scores.cpu() if scores.device.type == "mps" else scores).to(torch.float64)


def layers_to_mix(
    mixing_map: MixingMap,
    purpose: str,
    residual: float | None,
    from_layer: int | None,
    to_layer: int | None,
    drop_bos: bool,
    last_name: str = "to_layer",
) -> tuple[MixingMap, float]:
    """Return the map of the chosen layers, and the residual weight w.

    The arguments and errors are those of `rollout`. `purpose` and `last_name` (the name of the argument
    `to_layer`) are for errors.
    """
    require_chain(mixing_map, purpose)
    weight = residual_weight(mixing_map, residual)
    labels = mixing_map.layer_labels
    first = 0 if from_layer is None else mixing_map.layer_index(from_layer, "from_layer")
    last = len(labels) - 1 if to_layer is None else mixing_map.layer_index(to_layer, last_name)
    if first > last:
        raise ValueError(
            f"from_layer: expected to_layer or a layer before it, got from_layer={from_layer} and "
            f"to_layer={to_layer}"
        )
    layers = mixing_map.select_layers(labels[first : last + 1])
    layers.require_no_gaps()
    return layers.drop_bos() if drop_bos else layers, weight


def reached_inputs(
    visible: Bool[Tensor, "layer query key"], weight: float
) -> Bool[Tensor, "layer query key"]:
    """Return which inputs each position reaches at each depth.

    If the residual weight is above 0, a position reaches its own input.
    """
    reached = reachable(visible, weight)
    if weight > 0:
        reached.diagonal(dim1=-2, dim2=-1).fill_(True)
    return reached


def _add_notes(chosen: MixingMap, notes: tuple[str, ...], receptive_field: bool) -> tuple[str, ...]:
    extra = later_start_note(chosen, "rolled out")
    if receptive_field and "merged_words" in chosen.provenance:
        extra.append(
            "tokens were merged into words before the rollout, so the receptive field is uniform over words, "
            "not over tokens"
        )
    return (*notes, *extra, *(looks_causal_note(chosen) if receptive_field else ()))


def later_start_note(chosen: MixingMap, what: str) -> list[str]:
    """Return a note if the first layer is not that of the model."""
    first = chosen.layer_labels[0]
    text = f"{what} from layer {first} on: keys are the inputs of that layer, not the prompt's tokens"
    return [text] if first > 0 else []


def looks_causal_note(chosen: MixingMap) -> list[str]:
    """Return a note, and warn, if no query used a later key although the map is not marked as causal."""
    is_marked = chosen.causal or chosen.mask is not None or len(chosen.tokens) == 1
    if is_marked or bool(chosen.scores.triu(diagonal=1).any()):
        return []
    text = (
        "receptive_field had no effect, because according to the map every query could see every key; "
        "no query used a later key, so if the model is causal, make the map with causal=True"
    )
    # The warning points to the call of rollout or flow.
    warnings.warn(text, stacklevel=4)
    return [text]
