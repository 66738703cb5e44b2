"""Chain layer maps of gradient-weighted attention (Chefer et al., ICCV 2021)."""

from __future__ import annotations

import torch

from lens_mix.aggregation.products import cumulative
from lens_mix.aggregation.rollout import reached_inputs, require_chain, require_no_joint, to_float64
from lens_mix.arguments import check_flags
from lens_mix.maps import MixingMap


def gradient_rollout(mixing_map: MixingMap, *, normalize: bool = False) -> MixingMap:
    """Return input maps from gradient-weighted layer maps Ā_l (Chefer et al., ICCV 2021).

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "gradient_attention")
        >>> lm.gradient_rollout(m).top(3)

    Without `normalize` they are the relevance of the paper (eq. 6), R_l = R_{l-1} + Ā_l R_{l-1} from R = I.
    With `normalize` they are a rollout, J_l = Â_l J_{l-1} with Â_l = (Ā_l + I) / rowsum. Unlike in
    `lm.rollout`, the rows of Ā are not divided by their sum first, so the result depends on how much each
    layer matters to the target.

    Args:
        mixing_map: Layer maps `[layer, query, key]`, 0 or more, such as those of `gradient_attention`. Heads
            are averaged.
        normalize: Whether to divide the rows of every layer by their sum. False: rows sum to 1 or more.

    Returns:
        A map of kind "input", `[layer, query, key]`, cumulative, float64.

    Raises:
        TypeError: As in `lm.rollout`.
        ValueError: As in `lm.rollout`.
    """
    check_flags(normalize=normalize)
    require_chain(mixing_map, "gradient_rollout")
    require_no_joint(mixing_map, "gradient_rollout")
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
        # Adding I lets a path stay at its position in any layer, as with any residual weight above 0.
        mask=None if merged.mask is None else reached_inputs(merged.visible(), weight=1),
        kind="input",
        provenance={**merged.provenance, "aggregation": aggregation},
    )
