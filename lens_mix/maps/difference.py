"""Subtract one map from another, to compare two methods, two prompts or two models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.maps.arithmetic import at_least_float32

if TYPE_CHECKING:
    from lens_mix.maps import MixingMap

_SAME = ("tokens", "key_labels", "layers", "kind", "query_positions")


def difference(mixing_map: MixingMap, other: MixingMap) -> MixingMap:
    """Return `mixing_map - other`, entry by entry.

    The scores stay in the units of their maps; call `.normalized()` on both first to compare shares. A key is
    visible if it is visible in either map. The score of a key that is hidden in one map is 0 in that map.

    Raises:
        TypeError: If `other` is not a MixingMap.
        ValueError: If the maps differ in tokens, layers, rows, heads or kind.
    """
    if not isinstance(other, type(mixing_map)):
        return NotImplemented  # type: ignore[no-any-return]  # this function is `MixingMap.__sub__`
    different = [name for name in _SAME if getattr(mixing_map, name) != getattr(other, name)]
    different += ["heads"] * (mixing_map.scores.shape[1:-2] != other.scores.shape[1:-2])
    if different:
        raise ValueError(
            f"difference: expected two maps with the same {', '.join(different)}, got {mixing_map!r} and "
            f"{other!r}; use .merge_heads(), .select_layers([...]) or .select_queries([...]) to make them fit"
        )
    causal = mixing_map.causal and other.causal
    needs_no_mask = causal and mixing_map.mask is None and other.mask is None
    names = [mixing_map.method, other.method]
    provenance: dict[str, Any] = {"difference": {"of": mixing_map.provenance, "minus": other.provenance}}
    if "predicts_next" in mixing_map.provenance:
        # The rows are the same, so their predictions are of the same tokens.
        provenance["predicts_next"] = mixing_map.provenance["predicts_next"]
    device = mixing_map.scores.device
    notes = zip(names, (mixing_map.notes, other.notes), strict=True)
    return mixing_map.replace(
        scores=at_least_float32(mixing_map.scores) - at_least_float32(other.scores).to(device),
        method=" - ".join(names),
        causal=causal,
        mask=None if needs_no_mask else mixing_map.visible() | other.visible().to(device),
        parameters={"of": mixing_map.parameters, "minus": other.parameters},
        provenance=provenance,
        residual=None,
        residual_shares=None,
        explained=mixing_map.explained if mixing_map.explained == other.explained else None,
        notes=tuple(f"{name}: {note}" for name, map_notes in notes for note in map_notes),
    )
