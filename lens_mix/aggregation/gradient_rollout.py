"""Chaining of gradient-weighted attention (Chefer et al., ICCV 2021)."""

from __future__ import annotations

import torch

from lens_mix.aggregation.products import cumulative
from lens_mix.aggregation.rollout import reached_inputs, require_not_joint, require_stackable, to_float64
from lens_mix.arguments import flags
from lens_mix.maps import MixingMap


def gradient_rollout(mixing_map: MixingMap, *, normalize: bool = False) -> MixingMap:
    """Input maps from gradient-weighted layer maps Ā_l (`gradient_attention`, or any maps of 0 or more).

    Without `normalize`: the paper's relevance (eq. 6), R_l = R_{l-1} + Ā_l R_{l-1} from R = I. With it: a
    rollout of attention adjusted by gradients, J_l = Â_l J_{l-1} with Â_l = (Ā_l + I) / rowsum. Unlike
    `lm.rollout`, rows of Ā are not brought to 1 first: how much a layer matters to the target stays in.

    Args:
        mixing_map: layer maps [layer, query, key], or with heads, which are averaged; none below 0.
        normalize: rows that sum to 1 in every layer; False: to 1 and more.

    Returns:
        A map of kind "input", [layer, query, key], cumulative, float64.

    Raises:
        TypeError, ValueError: as `lm.rollout`.
    """
    flags(normalize=normalize)
    require_stackable(mixing_map, "gradient_rollout")
    require_not_joint(mixing_map, "gradient_rollout")
    mixing_map.require_no_gaps()
    if bool((mixing_map.scores < 0).any()):
        raise ValueError(
            "mixing_map: expected scores of 0 or more (gradient_attention with rectify=True), got "
            f"{float(mixing_map.scores.min()):.3g}"
        )
    merged = mixing_map.replace(scores=to_float64(mixing_map.scores)).merge_heads()
    identity = torch.eye(merged.scores.shape[-1], dtype=merged.scores.dtype, device=merged.scores.device)
    maps = merged.scores + identity
    if normalize:
        maps = maps / maps.sum(-1, keepdim=True)
    aggregation = {"name": "gradient_rollout", "normalize": normalize}
    return merged.replace(
        scores=cumulative(maps),
        # Any weight above 0: in every layer a path may stay, as I is added.
        mask=None if merged.mask is None else reached_inputs(merged.visible(), weight=1),
        kind="input",
        provenance={**merged.provenance, "aggregation": aggregation},
    )
