"""Attention rollout (Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020)."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.collapse import collapse_notes
from lens_mix.aggregation.products import Residual, add_residual, cumulative, lower_product
from lens_mix.aggregation.receptive_field import held_residual, normalise_rollout, reachable
from lens_mix.arguments import flags, instance, number
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import require_nonnegative, with_empty_rows
from lens_mix.maps.checks import as_residual
from lens_mix.methods import METHODS


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
    """Input maps from layer maps, by multiplying the layers (section 3.1 of the paper).

    Heads are averaged, the residual is mixed in, Â_l = ((1 − w) A_l + w I) / rowsum, and the layers are
    multiplied: J_0 = Â_0 and J_l = Â_l J_{l−1}. With w = 0.5 this is the paper's (A + I) / rowsum. The
    arithmetic is float64, and so is the result (on the CPU where the device has no float64).

    The rows of A_l are divided by their sum first, because the scores of most methods have units of their
    own. The exception is a map of attention weights from a model with an attention sink that is not a token
    (gpt-oss). In such a map, which has `provenance["sink"]` and a note, a row sums to less than 1, because
    the rest went to the sink. The row is used as it is, so that the residual counts for more. What `drop` (or
    `drop_bos` here) leaves of a row is divided by its sum in every map. An all-zero row has no shares: with
    w > 0 the position keeps itself; with w = 0 the row stays zero, rows above that used it sum to less than
    1, and a note names it.

    Args:
        mixing_map: layer maps `[layer, query, key]` or `[layer, head, query, key]`, none below 0.
        residual: the weight w, 0 to 1. None: what the method calls for, 0.5 for attention and 0 where the map
            already holds the residual. "measured": each row's own, from `lm.run(..., residual_shares=True)`,
            as a share of the whole row whatever it sums to; 0 for maps whose diagonal holds the residual.
        total_mixing: in place of `residual`, how much is mixed over all layers together: w = 1 − total / L
            with L the number of layers, at least 0. With w fixed, deep stacks mix more the deeper they are,
            until nothing is left of the tokens; 1.5 and 5 did well (docs/input_map.md).
        receptive_field: normalise against the rollout of even attention, so that keys are not preferred for
            being reachable on many paths (causal maps: for being early). Even attention keeps as much of the
            residual as the map does. The paper gives no formula; ours is derived in docs/receptive_field.md.
        per_head: the appendix variant: each head of layer l times the rollout, heads merged, of those below.
        drop_bos: drop position 0, whatever its token, on both axes first; rows sum to 1 without it.
        from_layer, to_layer: roll out these layers and those between, by label (negative: from the end).
            None: the first, the last.

    Returns:
        A map of kind "input": `[layer, query, key]`, cumulative (its last layer is the rollout of all), or
        `[layer, head, query, key]` with `per_head`. Rows sum to 1.

    Raises:
        TypeError: not a `MixingMap`; a residual that is no number.
        ValueError: input maps; keys that are not the tokens; layers that do not follow one another; scores
            below 0; a residual outside 0 to 1, or None where the method has none; "measured" where nothing
            was; a total below 0, or besides `residual`; no heads for `per_head`.
    """
    flags(receptive_field=receptive_field, per_head=per_head, drop_bos=drop_bos)
    if receptive_field and isinstance(mixing_map, MixingMap):
        require_not_joint(mixing_map, "receptive_field")
    chosen, weights = _layers_and_weights(mixing_map, residual, total_mixing, from_layer, to_layer, drop_bos)
    one_weight = isinstance(weights, float)
    largest = float(torch.as_tensor(weights, dtype=torch.float64, device="cpu").max())
    if per_head and not chosen.has_heads:
        raise ValueError(
            f"per_head: expected a map with heads, got scores of shape {tuple(chosen.scores.shape)}"
        )
    maps, notes, row_weights = mixed_layers(chosen, weights)
    heads = None
    if per_head:
        heads, separate_notes = _mixed_heads(chosen, weights)
        notes = (*notes, *(note for note in separate_notes if note not in notes))
    product = lower_product if chosen.causal else torch.matmul
    if receptive_field:
        visible = chosen.visible().to(maps.device)
        held = one_weight and holds_residual(chosen)
        null = held_residual(maps, visible, largest) if held else row_weights
        scores = normalise_rollout(maps, visible, null, heads, product=product)
    else:
        scores = cumulative(maps, heads, product)
    options: dict[str, object] = {"residual": largest if one_weight else "measured"}
    options |= {"receptive_field": receptive_field, "per_head": per_head, "drop_bos": drop_bos}
    reached = reached_inputs(chosen.visible(), largest)
    if not per_head and len(chosen.layer_labels) > 1:
        notes = (*notes, *collapse_notes(scores[-1], reached[-1], chosen.query_positions))
    return chosen.replace(
        scores=scores,
        mask=None if chosen.mask is None else reached,
        residual=largest if one_weight else None,
        kind="input",
        provenance={**chosen.provenance, "aggregation": {"name": "rollout", **options}},
        notes=_notes(chosen, notes, receptive_field),
    )


def _layers_and_weights(
    mixing_map: MixingMap,
    residual: float | Literal["measured"] | None,
    total_mixing: float | None,
    *layers: Any,
) -> tuple[MixingMap, Residual]:
    """The layers to roll out, and the weight of the residual in all of them, or in each row of each."""
    if isinstance(residual, str) and residual != "measured":
        raise TypeError(f"residual: expected a number from 0 to 1, or 'measured', got {residual!r}")
    if total_mixing is None and residual != "measured":
        return layers_to_mix(mixing_map, "rollout", residual, *layers)
    # No weight of the method's is asked for.
    chosen, _ = layers_to_mix(mixing_map, "rollout", 0.0, *layers)
    if total_mixing is None:
        return chosen, _measured_residual(chosen)
    if residual is not None:
        raise ValueError(f"total_mixing: expected no residual besides it, got residual={residual!r}")
    total = number("total_mixing", total_mixing, 0)
    return chosen, max(0.0, 1 - total / len(chosen.layer_labels))


def _measured_residual(chosen: MixingMap) -> Residual:
    """The residual weights that a map's run has measured, float64; 0 where its diagonal holds the residual.

    A map without them that needs them is a ValueError.
    """
    if chosen.residual_shares is not None:
        return to_float64(chosen.residual_shares)
    if holds_residual(chosen):
        return 0.0
    raise ValueError(
        "residual: expected a map with measured residual shares for 'measured', got one without; ask for "
        "them with lm.run(..., residual_shares=True), or give MixingMap(residual_shares=) [layer, query]"
    )


def holds_residual(chosen: MixingMap) -> bool:
    """Whether the map says of its diagonal that the residual stream is in it, so that none is mixed in."""
    method = METHODS.get(chosen.method)
    return chosen.residual == 0 and (method is None or method.holds_residual)


class MixedLayers(NamedTuple):
    """Â_l of every layer (float64), the notes of the map with those about its rows, and the weights in Â_l.

    `weights` is the weight that was asked for, or one per row if rows gave weight to an attention sink.
    """

    maps: Float[Tensor, "layer query key"]
    notes: tuple[str, ...]
    weights: Residual


def mixed_layers(chosen: MixingMap, weight: Residual) -> MixedLayers:
    """Return Â_l = ((1 − w) A_l + w I) / rowsum of every layer, heads averaged first; as in `rollout`.

    A weight per row (measured) is the residual's share of the whole row. Scores below 0 are a ValueError.
    """
    # One layer at a time, because a pass over a whole stack is slow beside the products of its rollout.
    shape = chosen.scores.shape
    maps = to_float64(chosen.scores.new_empty(shape[0], *shape[-2:]))
    sums = maps.new_empty(maps.shape[:-1])
    weights: list[float | Tensor] = []
    for place, scores in enumerate(chosen.scores):
        maps[place] = to_float64(scores).mean(0) if chosen.has_heads else scores
        require_nonnegative(maps[place])
        totals = maps[place].sum(-1, keepdim=True)
        sums[place] = totals[:, 0]
        maps[place].div_(totals.masked_fill(totals == 0, 1))
        weights.append(_weight_of_rows(chosen, weight, sums[place], place))
        add_residual(maps[place], weights[-1])
    notes = with_empty_rows(chosen.notes, sums == 0, chosen.layer_labels, chosen.query_positions)
    if any(isinstance(each, Tensor) for each in weights):
        weight = torch.stack(
            [
                torch.as_tensor(each, dtype=sums.dtype, device=sums.device).expand_as(sums[0])
                for each in weights
            ]
        )
    return MixedLayers(maps, notes, weight)


def _weight_of_rows(
    chosen: MixingMap, weight: Residual, sums: Float[Tensor, "*head query"], layer: int
) -> float | Float[Tensor, "*rows query"]:
    """Return the residual's share of rows that summed to `sums` before they were divided by it."""
    if isinstance(weight, Tensor):
        return weight[layer]
    if weight == 0 or not chosen.provenance.get("sink"):
        return weight
    return weight / ((1 - weight) * sums.clamp(max=1) + weight)


def _mixed_heads(
    chosen: MixingMap, weight: Residual
) -> tuple[Float[Tensor, "layer head query key"], tuple[str, ...]]:
    """Return Â_l of every head, each with its own row sums, and the notes about its rows."""
    whole = chosen.replace(scores=to_float64(chosen.scores))
    separate = whole.normalized()
    for place, scores in enumerate(separate.scores):
        add_residual(scores, _weight_of_rows(chosen, weight, whole.scores[place].sum(-1), place))
    return separate.scores, separate.notes


def residual_weight(mixing_map: MixingMap, residual: float | None) -> float:
    """The residual weight to mix in: as given, or the map's own, or its method's.

    No number is a TypeError; one outside 0 to 1, or None where neither has one, a ValueError.
    """
    if residual is not None:
        return as_residual(residual)
    if mixing_map.residual is not None:
        return mixing_map.residual
    method = METHODS.get(mixing_map.method)
    if method is None:
        raise ValueError(
            f"residual: expected a number from 0 to 1, because method {mixing_map.method!r} is none of "
            f"{', '.join(sorted(METHODS))} and the map has no residual of its own; got None (0.5 where "
            "the map holds the attention branch only, 0 where it already holds the residual)"
        )
    return as_residual(method.residual)


def require_layer_maps(mixing_map: MixingMap, purpose: str) -> None:
    """Raise a TypeError for what is no `MixingMap`, a ValueError for one that is no layer map."""
    instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    if mixing_map.kind != "layer":
        raise ValueError(
            f"mixing_map: expected layer maps for {purpose}, got kind {mixing_map.kind!r}, which already "
            "speaks of the whole stack"
        )


def require_stackable(mixing_map: MixingMap, purpose: str) -> None:
    """As `require_layer_maps`, and a ValueError for layers that do not chain."""
    require_layer_maps(mixing_map, purpose)
    if mixing_map.key_tokens is not None:
        raise ValueError(
            f"mixing_map: expected the tokens as keys for {purpose}, got {len(mixing_map.key_labels)} other "
            f"keys for {len(mixing_map.tokens)} tokens; such layers do not chain"
        )
    mixing_map.require_every_row(purpose)


def require_not_joint(mixing_map: MixingMap, purpose: str) -> None:
    """Raise a ValueError for a stack of `joint`: its layers leave positions as they are, or keep shares."""
    if "joint" in mixing_map.provenance:
        raise ValueError(
            f"mixing_map: expected maps of one part for {purpose}, got a joint stack (lm.joint), whose "
            "layers hold residuals that its formula does not know of; use lm.rollout or lm.flow as they are"
        )


def to_float64(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same numbers in float64, on the CPU where the device has none."""
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
    """The map of the layers that are asked for, and the residual weight w. Args and errors: as `rollout`."""
    require_stackable(mixing_map, purpose)
    weight = residual_weight(mixing_map, residual)
    labels = mixing_map.layer_labels
    first = 0 if from_layer is None else mixing_map.layer_index(from_layer, "from_layer")
    last = len(labels) - 1 if to_layer is None else mixing_map.layer_index(to_layer, last_name)
    if first > last:
        raise ValueError(
            f"from_layer: expected no later layer than to_layer, got from_layer={from_layer} and "
            f"to_layer={to_layer}"
        )
    layers = mixing_map.select_layers(labels[first : last + 1])
    layers.require_no_gaps()
    return layers.drop_bos() if drop_bos else layers, weight


def reached_inputs(
    visible: Bool[Tensor, "layer query key"], weight: float
) -> Bool[Tensor, "layer query key"]:
    """Which inputs each position reaches at each depth, by attention or (weight above 0) by staying."""
    reached = reachable(visible, weight)
    if weight > 0:
        reached.diagonal(dim1=-2, dim2=-1).fill_(True)
    return reached


def _notes(chosen: MixingMap, notes: tuple[str, ...], receptive_field: bool) -> tuple[str, ...]:
    extra = later_start_note(chosen, "rolled out")
    if receptive_field and "merged_words" in chosen.provenance:
        extra.append(
            "merged into words before the rollout: the receptive field was taken as even over words, "
            "not over their pieces"
        )
    return (*notes, *extra, *(looks_causal_note(chosen) if receptive_field else ()))


def later_start_note(chosen: MixingMap, what: str) -> list[str]:
    """A note where the first layer is not the model's."""
    first = chosen.layer_labels[0]
    text = f"{what} from layer {first} on: keys are the inputs of that layer, not the prompt's tokens"
    return [text] if first > 0 else []


def looks_causal_note(chosen: MixingMap) -> list[str]:
    """A note, and a warning, where nothing says that a map is causal though no query used a later key."""
    said = chosen.causal or chosen.mask is not None or len(chosen.tokens) == 1
    if said or bool(chosen.scores.triu(diagonal=1).any()):
        return []
    text = (
        "receptive_field changed nothing, because the map says that every query could see every key; "
        "no query used a later key, so if the model is causal make the map with causal=True"
    )
    warnings.warn(text, stacklevel=4)  # where rollout or flow was called
    return [text]
