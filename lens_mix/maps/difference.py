"""One map minus another: where two methods, two prompts of the same tokens, or two models differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_mix.maps.arithmetic import at_least_float32

if TYPE_CHECKING:
    from lens_mix.maps import MixingMap

_ALIKE = ("tokens", "key_labels", "layers", "kind", "query_positions")


def difference(mixing_map: MixingMap, other: MixingMap) -> MixingMap:
    """`mixing_map - other`, entry by entry, in the maps' own units (`.normalized()` brings both to one).

    A key is visible where it is in either. A key that one of them could not see counts as 0 there.

    Raises:
        TypeError: `other` is no MixingMap.
        ValueError: other tokens, layers, rows, heads, or another kind.
    """
    if not isinstance(other, type(mixing_map)):
        return NotImplemented
    unlike = [name for name in _ALIKE if getattr(mixing_map, name) != getattr(other, name)]
    unlike += ["heads"] * (mixing_map.scores.shape[1:-2] != other.scores.shape[1:-2])
    if unlike:
        raise ValueError(
            f"difference: expected two maps with the same {', '.join(unlike)}, got {mixing_map!r} and "
            f"{other!r}; .merge_heads(), .select_layers([...]) and .select_queries([...]) bring them together"
        )
    causal = mixing_map.causal and other.causal
    same = causal and mixing_map.mask is None and other.mask is None
    names = [mixing_map.method, other.method]
    device = mixing_map.scores.device
    notes = zip(names, (mixing_map.notes, other.notes), strict=True)
    return mixing_map.replace(
        scores=at_least_float32(mixing_map.scores) - at_least_float32(other.scores).to(device),
        method=" - ".join(names),
        causal=causal,
        mask=None if same else mixing_map.visible() | other.visible().to(device),
        parameters={"of": mixing_map.parameters, "minus": other.parameters},
        provenance={"difference": {"of": mixing_map.provenance, "minus": other.provenance}},
        residual=None,
        residual_shares=None,
        notes=tuple(f"{name}: {note}" for name, of_map in notes for note in of_map),
    )
