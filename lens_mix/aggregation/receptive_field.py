"""Normalising a rollout by the receptive field of attention. `docs/receptive_field.md` derives it.

Abnar & Zuidema (ACL 2020) say of causal decoders only that rollout is biased to the first tokens and
that one should "first normalize based on the receptive field of attention". They give no formula;
this one is ours. With w the residual weight, U_l attention spread evenly over the keys that layer l
allows, and R the rollout of L layers:

    R0 = rollout of the U_l with the same L and w          (what rollout makes of no preference)
    B0 = w^L I + (1 − w^L) U, U even over the reachable keys  (what no preference should look like)
    result = R · B0 / R0, elementwise, each row scaled back to the sum it had in R
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.products import add_residual, compose, cumulative, log_matmul


def normalise_rollout(
    maps: Float[Tensor, "layer query key"],
    visible: Bool[Tensor, "layer query key"],
    residual: float,
    heads: Float[Tensor, "layer head query key"] | None = None,
    arithmetic: str = "auto",
) -> Float[Tensor, "layer *head query key"]:
    """The cumulative rollout of `maps`, each layer normalised against the null model of its depth.

    Args:
        maps: float64, the residual already mixed in (`add_residual`), heads merged; rows sum to 1
            or, where nothing is known, are all zero. Zero wherever not visible.
        visible: which keys each query could see in each layer.
        residual: the residual weight w mixed into `maps`, 0 to 1.
        heads: float64, the same per head; the result then has a head axis.
        arithmetic: "float64", "log", or "auto": float64 where a bound shows that nothing
            underflows, logarithms elsewhere.

    Returns:
        float64; every row has the sum it has in the plain rollout: 1, less what all-zero rows lost.

    Raises:
        ValueError: an unknown `arithmetic`.
    """
    if arithmetic not in ("auto", "float64", "log"):
        raise ValueError(f"arithmetic: expected 'auto', 'float64' or 'log', got {arithmetic!r}")
    null = null_maps(visible, residual)
    reached = reachable(visible, residual)
    if arithmetic == "float64" or (arithmetic == "auto" and float64_suffices(null, residual)):
        return _in_float64(maps, null, reached, residual, heads)
    return _in_logarithms(maps, null, reached, residual, heads)


def even_attention(visible: Bool[Tensor, "*axes query key"]) -> Float[Tensor, "*axes query key"]:
    """Attention spread evenly over the visible keys, float64; a row that sees nothing is all zero."""
    weights = visible.to(torch.float64)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def null_maps(visible: Bool[Tensor, "layer query key"], residual: float) -> Float[Tensor, "layer query key"]:
    """The null model's layers: even attention with the residual mixed in, float64."""
    return add_residual(even_attention(visible), residual)


def reachable(visible: Bool[Tensor, "layer query key"], residual: float) -> Bool[Tensor, "layer query key"]:
    """Which inputs each position reaches, at each depth, on a path with at least one attention step.

    Where the residual weight is above 0 a path may also stay at its position in a layer. For one
    mask that holds its diagonal and composes to itself (a causal mask) this is the mask.
    """
    identity = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    results = [visible[0]]
    for mask in visible[1:]:
        below = results[-1]
        reached = compose(mask, below | identity if residual > 0 else below)
        results.append(reached | below if residual > 0 else reached)
    return torch.stack(results)


def target_share(depth: int, residual: float) -> tuple[float, float]:
    """log w^depth and log(1 − w^depth), exact at both ends."""
    if residual == 0:
        return -math.inf, 0.0
    if residual == 1:
        return 0.0, -math.inf
    stayed = depth * math.log(residual)
    return stayed, math.log(-math.expm1(stayed))


def log_target(reached: Bool[Tensor, "query key"], depth: int, residual: float) -> Float[Tensor, "query key"]:
    """log B0 at one depth. A position that reaches nothing by attention keeps itself where w > 0."""
    stayed, moved = target_share(depth, residual)
    even = add_residual(even_attention(reached), 0.0)
    identity = torch.eye(len(reached), dtype=torch.float64, device=reached.device)
    if residual > 0:
        even = torch.where(reached.any(-1, keepdim=True), even, identity)
    return torch.logaddexp(identity.log() + stayed, even.log() + moved)


def float64_suffices(null: Float[Tensor, "layer query key"], residual: float) -> bool:
    """Whether R · B0 / R0 can be computed in float64 without loss.

    Every entry of R0 that is not zero is at least the product over layers of the null model's
    smallest entry that is not zero (1/n per layer, or (1 − w)/n, or w where the diagonal is hidden).
    What an entry of R loses to underflow is at most layers · n smallest normal numbers. The row it
    goes into sums, before it is scaled, to at least (1 − w)/n, since B0 ≥ (1 − w)/n and R0 ≤ 1. So
    float64 keeps its 16 digits where

        product of smallest entries > smallest normal number · layers · n² · 1e16 / (1 − w)
    """
    if residual == 1:
        return True
    layers, size = null.shape[0], null.shape[-1]
    smallest = torch.where(null > 0, null, 1.0).flatten(1).amin(1).log().sum().item()
    needed = math.log(torch.finfo(torch.float64).tiny) + math.log(layers * size**2 * 1e16)
    return smallest > needed - math.log1p(-residual)


def _in_float64(maps: Tensor, null: Tensor, reached: Tensor, residual: float, heads: Tensor | None) -> Tensor:
    rolled, expected = cumulative(maps, heads), cumulative(null)
    results = []
    for place, plain in enumerate(rolled):
        target = log_target(reached[place], place + 1, residual).exp()
        factor = torch.where(expected[place] > 0, target / expected[place], 0.0)
        weighted = plain * factor
        total = weighted.sum(-1, keepdim=True)
        scale = plain.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
        results.append(weighted * scale)
    return torch.stack(results)


def _in_logarithms(
    maps: Tensor, null: Tensor, reached: Tensor, residual: float, heads: Tensor | None
) -> Tensor:
    log_heads = None if heads is None else heads.log()
    rolled = cumulative(maps.log(), log_heads, product=log_matmul)
    expected = cumulative(null.log(), product=log_matmul)
    results = []
    for place, plain in enumerate(rolled):
        target = log_target(reached[place], place + 1, residual)
        # Where the null model is zero the rollout is too; −inf − (−inf) would be NaN.
        weighted = torch.where(expected[place] > -math.inf, plain + target - expected[place], -math.inf)
        total = torch.logsumexp(weighted, dim=-1, keepdim=True)
        wanted = torch.logsumexp(plain, dim=-1, keepdim=True)
        scale = torch.where(total > -math.inf, wanted - total, 0.0)
        results.append((weighted + scale).exp())
    return torch.stack(results)
