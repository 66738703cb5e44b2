"""An encoder-decoder as one stack over source and target (ALTI+: Ferrando et al., EMNLP 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.aggregation.rollout import (
    later_start_note,
    mixed_layers,
    require_stackable,
    residual_weight,
    to_float64,
)
from lens_mix.arguments import flags, instance, shown
from lens_mix.lens.parts import PARTS
from lens_mix.maps import MixingMap
from lens_mix.method import RESIDUAL_KEY


def joint(
    maps: Mapping[str, MixingMap],
    *,
    residual: float | Mapping[str, float] | None = None,
    encoder: bool = True,
) -> MixingMap:
    """One stack of layer maps over source and target tokens, for `rollout`, `flow` and graphs.

    With C the rows of a part's layer, heads averaged, and w its residual weight, the layers are, from below
    (source positions first, then the target's), each row divided by its sum as in `rollout`:

        encoder layer         [[(1 - w) C + w I, 0], [0, I]]
        decoder self-attn.    [[I, 0], [0, (1 - w) C + w I]]
        its cross-attention   [[I, 0], [(1 - w) C_source, diag((1 - w) c_own + w)]]

    c_own is the share of the decoder's own residual stream where the map holds it (`[RESIDUAL]`: `attn_res`,
    `attn_res_ln`, `alti`), else 0. The last layer of `lm.rollout(lm.joint(maps))` has, in the rows of the
    target, what each source token and each token of the target's prefix contributed to each decoder position;
    these rows sum to 1. With `alti` these are the input attributions of ALTI+, without feed-forwards.

    Args:
        maps: what `lm.run(..., part="all")` gives for one method, or {"encoder", "decoder", "cross"} of any
            methods, all rows held.
        residual: the weight w, 0 to 1, of all parts or by part; None: what each method calls for.
        encoder: whether the encoder's layers are there; False: source keys are the encoder's outputs.

    Returns:
        Layer maps [layer, position, position], float64, residuals mixed in (so that `residual` is 0), with
        the encoder's layers first, then self- and cross-attention of each decoder layer.
        `provenance["joint"]` has the numbers of source and target tokens and the layers' names.

    Raises:
        TypeError, ValueError: other maps than these; parts that do not fit each other; rows or layers that
            are missing; scores below 0; a cross-attention that leaves nothing of the target (no residual).
    """
    flags(encoder=encoder)
    parts = fitting_parts(maps)
    own_key, cross = _has_own_key(parts["cross"]), parts["cross"]
    weights = {name: residual_weight(part, _given(residual, name)) for name, part in parts.items()}
    if weights["cross"] == 0 and not own_key:
        raise ValueError(
            f"residual: expected a weight above 0 for cross-attention, as {cross.method} does not say what a "
            "decoder position keeps of its own, and the target would drop out; give one (residual=0.5, or "
            f'residual={{"cross": 0.5}}), or take a method whose maps hold {RESIDUAL_KEY}; got 0'
        )
    tokens = [*parts["encoder"].tokens, *parts["decoder"].tokens]
    mixed, masks, notes = {}, {}, []
    for name, part in parts.items():
        scores = _embedded(to_float64(part.merge_heads().scores), name, tokens)
        square = MixingMap(
            scores=scores,
            tokens=tokens,
            layers=part.layers,
            method=part.method,
            provenance=part.provenance,
            notes=part.notes,
        )
        mixed[name], made, _ = mixed_layers(square, weights[name])
        visible = _embedded(part.visible().to(mixed[name].device, mixed[name].dtype), name, tokens) > 0
        # Itself every position sees: the residual passes.
        masks[name] = visible | torch.eye(len(tokens), dtype=torch.bool, device=visible.device)
        notes += [f"{name}: {note}" for note in (*made, *later_start_note(part, name))]
    layers = [("encoder", layer) for layer in range(len(mixed["encoder"]))] if encoder else []
    layers += [(name, layer) for layer in range(len(mixed["cross"])) for name in ("decoder", "cross")]
    if not encoder:
        notes.append("source keys are the encoder's outputs, not the source's tokens (encoder=False)")
    labels = [f"{name} {parts[name].layer_labels[layer]}" for name, layer in layers]
    attributes = {"source": len(parts["encoder"].tokens), "target": len(cross.tokens), "layers": labels}
    return MixingMap(
        scores=torch.stack([mixed[name][layer] for name, layer in layers]),
        tokens=tokens,
        method=cross.method,
        mask=torch.stack([masks[name][layer] for name, layer in layers]),
        parameters=cross.parameters,
        residual=0.0,
        provenance={**cross.provenance, "joint": {**attributes, "residual": weights, "encoder": encoder}},
        notes=tuple(dict.fromkeys(notes)),
    )


def _given(residual: float | Mapping[str, float] | None, name: str) -> float | None:
    if not isinstance(residual, Mapping):
        return residual
    unknown = sorted(set(residual) - set(PARTS))
    if unknown:
        raise ValueError(f"residual: expected some of {list(PARTS)}, got {unknown}")
    return residual.get(name)


def _has_own_key(cross: MixingMap) -> bool:
    return cross.key_labels[-1] == RESIDUAL_KEY


def fitting_parts(maps: Mapping[str, MixingMap]) -> dict[str, MixingMap]:
    """The three parts, which have the same tokens and layers. TypeError, ValueError: as `joint`."""
    instance("maps", maps, Mapping, 'a dict of three maps (lm.run(..., part="all") with one method)')
    if set(maps) != set(PARTS) or not all(isinstance(part, MixingMap) for part in maps.values()):
        raise ValueError(
            f'maps: expected a MixingMap each for {list(PARTS)} (lm.run(..., part="all") with one method), '
            f"got { {name: type(part).__name__ for name, part in maps.items()} }"
        )
    parts = {name: maps[name] for name in PARTS}
    cross = parts["cross"]
    if cross.kind != "layer" or cross.key_tokens is None:
        raise ValueError(f"maps['cross']: expected layer maps with key_tokens, got {shown(cross)}")
    for name, part in parts.items():
        if name == "cross":
            part.require_every_row("joint", "maps['cross']")
        else:
            require_stackable(part, "joint")
        part.require_no_gaps()
    source = cross.key_tokens[:-1] if _has_own_key(cross) else cross.key_tokens
    pairs = {
        "the source's tokens of encoder and cross": (parts["encoder"].tokens, source),
        "the target's tokens of decoder and cross": (parts["decoder"].tokens, cross.tokens),
        "the layers of decoder and cross": (parts["decoder"].layer_labels, cross.layer_labels),
    }
    for what, (first, second) in pairs.items():
        if first != second:
            raise ValueError(f"maps: expected {what} to be the same, got {first} and {second}")
    return parts


def _embedded(
    scores: Float[Tensor, "layer query key"], name: str, tokens: list[str]
) -> Float[Tensor, "layer position position"]:
    """A part's rows at their positions among all, with a key of the query's own on the diagonal.

    The positions that it does not speak of keep themselves.
    """
    count, rows = len(tokens), scores.shape[1]
    out = torch.eye(count, dtype=scores.dtype, device=scores.device).repeat(len(scores), 1, 1)
    first = 0 if name == "encoder" else count - rows
    here = slice(first, first + rows)
    out[:, here] = 0
    if name != "cross":
        out[:, here, here] = scores
        return out
    out[:, here, :first] = scores[..., :first]
    if scores.shape[2] > first:
        out[:, here, here] = torch.diag_embed(scores[..., -1])
    return out
