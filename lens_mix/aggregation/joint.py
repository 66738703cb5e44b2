"""Join the parts of an encoder-decoder into one stack of maps (ALTI+: Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._model.parts import PARTS
from lens_mix.aggregation.rollout import (
    later_start_note,
    mix_layers,
    require_chain,
    residual_weight,
    to_float64,
)
from lens_mix.arguments import check_flags, check_instance, describe_value
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.method import RESIDUAL_KEY


def joint(
    maps: Mapping[str, MixingMap],
    *,
    residual: float | Mapping[str, float] | None = None,
    encoder: bool = True,
) -> MixingMap:
    """Return one stack of layer maps over source and target tokens, for `rollout`, `flow` and graphs.

        >>> maps = lm.run(model, ("The cat sleeps", "Le chat dort"), "alti", part="all")
        >>> lm.rollout(lm.aggregation.joint(maps)).top(3)

    C is the map of one layer of a part, with heads averaged and each row divided by its sum as in `rollout`.
    w is the part's residual weight. Source positions come first, then those of the target. From below, the
    layers are:

        encoder layer              [[(1 - w) C + w I, 0], [0, I]]
        decoder self-attention     [[I, 0], [0, (1 - w) C + w I]]
        decoder cross-attention    [[I, 0], [(1 - w) C_source, diag((1 - w) c_own + w)]]

    c_own is the share of the decoder's own residual stream if the map contains it (as the key `[RESIDUAL]` of
    `attn_res`, `attn_res_ln` and `alti`), else 0. In the last layer of
    `lm.rollout(lm.aggregation.joint(maps))`, the rows of the target are the contributions of the source
    tokens and of the target's prefix to each decoder position. These rows sum to 1. With `alti` they are the
    input attributions of ALTI+, without feed-forwards.

    Args:
        maps: The maps that `lm.run(..., part="all")` returns for one method, or {"encoder", "decoder",
            "cross"} of any methods, with all rows.
        residual: The residual weight w, 0 to 1, of all parts or by part. None: the weight of each method.
        encoder: Whether to include the encoder's layers. False: source keys are the encoder's outputs.

    Returns:
        Layer maps `[layer, position, position]`, float64, with the encoder's layers first, then the self- and
        the cross-attention of each decoder layer. Residuals are mixed in, so `residual` is 0.
        `provenance["joint"]` contains the numbers of source and target tokens and the names of the layers.

    Raises:
        TypeError: If `maps` is not such a dict, or if a weight is not a number.
        ValueError: If the parts do not fit each other, rows or layers are missing, a score is below 0, or
            nothing of the target remains because cross-attention has no residual.
    """
    check_flags(encoder=encoder)
    parts = check_parts(maps)
    has_own_key, cross = _has_own_key(parts["cross"]), parts["cross"]
    weights = {name: residual_weight(part, _select_residual(residual, name)) for name, part in parts.items()}
    if weights["cross"] == 0 and not has_own_key:
        raise ValueError(
            "residual: expected a weight above 0 for cross-attention, because the maps of "
            f"{cross.method} do not contain what a decoder position keeps of its own state, got 0; give a "
            f'weight (residual=0.5, or residual={{"cross": 0.5}}), or use a method whose maps have the key '
            f"{RESIDUAL_KEY}"
        )
    tokens = [*parts["encoder"].tokens, *parts["decoder"].tokens]
    mixed, masks, notes = {}, {}, []
    for name, part in parts.items():
        scores = _embed(to_float64(part.merge_heads().scores), name, tokens)
        square = MixingMap(
            scores=scores,
            tokens=tokens,
            layers=part.layers,
            method=part.method,
            provenance=part.provenance,
            notes=part.notes,
        )
        mixed[name], part_notes, _ = mix_layers(square, weights[name])
        visible = _embed(part.visible().to(mixed[name].device, mixed[name].dtype), name, tokens) > 0
        # The residual connects every position with itself.
        masks[name] = visible | torch.eye(len(tokens), dtype=torch.bool, device=visible.device)
        notes += [f"{name}: {note}" for note in (*part_notes, *later_start_note(part, name))]
    layers = [("encoder", layer) for layer in range(len(mixed["encoder"]))] if encoder else []
    layers += [(name, layer) for layer in range(len(mixed["cross"])) for name in ("decoder", "cross")]
    if not encoder:
        notes.append("source keys are the encoder's outputs, not the source's tokens (encoder=False)")
    labels = [f"{name} {parts[name].layer_labels[layer]}" for name, layer in layers]
    sources = len(parts["encoder"].tokens)
    attributes = {"source": sources, "target": len(cross.tokens), "layers": labels}
    return MixingMap(
        scores=torch.stack([mixed[name][layer] for name, layer in layers]),
        tokens=tokens,
        method=cross.method,
        mask=torch.stack([masks[name][layer] for name, layer in layers]),
        parameters=cross.parameters,
        residual=0.0,
        provenance={**cross.provenance, "joint": {**attributes, "residual": weights, "encoder": encoder}},
        notes=tuple(dict.fromkeys(notes)),
        explained=None if cross.explained is None else (*[Explained()] * sources, *cross.explained),
    )


def _select_residual(residual: float | Mapping[str, float] | None, name: str) -> float | None:
    if not isinstance(residual, Mapping):
        return residual
    unknown = sorted(set(residual) - set(PARTS))
    if unknown:
        raise ValueError(f"residual: expected some of {list(PARTS)}, got {unknown}")
    return residual.get(name)


def _has_own_key(cross: MixingMap) -> bool:
    return cross.key_labels[-1] == RESIDUAL_KEY


def check_parts(maps: Mapping[str, MixingMap]) -> dict[str, MixingMap]:
    """Return the maps of the three parts, after a check that their tokens and layers fit.

    Raises:
        TypeError: If `maps` is not a dict of maps.
        ValueError: If the parts do not fit each other, or if rows or layers are missing.
    """
    check_instance("maps", maps, Mapping, 'a dict of three maps (lm.run(..., part="all") with one method)')
    if set(maps) != set(PARTS) or not all(isinstance(part, MixingMap) for part in maps.values()):
        raise ValueError(
            f"maps: expected one MixingMap for each of {list(PARTS)} "
            'from lm.run(..., part="all") with one method, '
            f"got { {name: type(part).__name__ for name, part in maps.items()} }"
        )
    parts = {name: maps[name] for name in PARTS}
    cross = parts["cross"]
    if cross.kind != "layer" or cross.keys_are_tokens:
        raise ValueError(
            f"maps['cross']: expected layer maps of cross-attention, got {describe_value(cross)}"
        )
    for name, part in parts.items():
        if name == "cross":
            part.require_every_row("joint", "maps['cross']")
        else:
            require_chain(part, "joint")
        part.require_no_gaps()
    source = cross.key_tokens[:-1] if _has_own_key(cross) else cross.key_tokens
    pairs = {
        "the source's tokens of encoder and cross": (parts["encoder"].tokens, source),
        "the target's tokens of decoder and cross": (parts["decoder"].tokens, cross.tokens),
        "the layers of decoder and cross": (parts["decoder"].layer_labels, cross.layer_labels),
    }
    for description, (first, second) in pairs.items():
        if first != second:
            raise ValueError(f"maps: expected {description} to be the same, got {first} and {second}")
    return parts


def _embed(
    scores: Float[Tensor, "layer query key"], name: str, tokens: list[str]
) -> Float[Tensor, "layer position position"]:
    """Return the rows of a part as rows of a map over all positions.

    The other positions have rows of the identity. The score of cross-attention's key `[RESIDUAL]` is on the
    diagonal.
    """
    count, rows = len(tokens), scores.shape[1]
    embedded = torch.eye(count, dtype=scores.dtype, device=scores.device).repeat(len(scores), 1, 1)
    first = 0 if name == "encoder" else count - rows
    own = slice(first, first + rows)
    embedded[:, own] = 0
    if name != "cross":
        embedded[:, own, own] = scores
        return embedded
    embedded[:, own, :first] = scores[..., :first]
    if scores.shape[2] > first:
        embedded[:, own, own] = torch.diag_embed(scores[..., -1])
    return embedded
