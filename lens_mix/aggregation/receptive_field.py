"""Normalising a rollout by the receptive field of attention. `docs/receptive_field.md` derives it.

Abnar & Zuidema (ACL 2020) say of causal decoders only that rollout is biased to the first tokens and
that one should "first normalize based on the receptive field of attention". They give no formula;
this one is ours. With w the residual weight, U_l attention spread evenly over the keys that layer l
allows, and R the rollout of L layers:

    R0 = rollout of the U_l with the same L and w          (what rollout makes of no preference)
    B0 = w^L I + (1 − w^L) U, U even over the reachable keys  (what no preference should look like)
    result = R · B0 / R0, elementwise, each row scaled back to the sum it had in R

Where a map holds the residual stream, or its weight was measured row by row, w differs from layer to layer or
from row to row, and w^L is the product of the layers' weights. The null model must stay where the map stays:
against one that does not, the quotient of a deep map that does is the null model's own shape, the position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.products import Product, Residual, add_residual, compose, cumulative, log_matmul
from lens_mix.arguments import one_of


def normalise_rollout(
    maps: Float[Tensor, "layer query key"],
    visible: Bool[Tensor, "layer query key"],
    residual: Residual,
    heads: Float[Tensor, "layer head query key"] | None = None,
    arithmetic: str = "auto",
    product: Product = torch.matmul,
) -> Float[Tensor, "layer *head query key"]:
    """The cumulative rollout of `maps`, each layer normalised against the null model of its depth, float64.

    Every row has the sum it has in the plain rollout: 1, less what all-zero rows lost.

    Args:
        maps: float64, the residual already mixed in (`add_residual`), heads merged; rows sum to 1 or, where
            nothing is known, are all zero. Zero wherever not visible.
        residual: the residual weight w in `maps`, 0 to 1: one, or one per layer and query.
        heads: float64, the same per head; the result then has a head axis.
        arithmetic: "float64", "log", or "auto": float64 where a bound shows that nothing underflows,
            logarithms elsewhere. Another name is a ValueError.
        product: of two maps in float64.
    """
    one_of("arithmetic", arithmetic, ("auto", "float64", "log"))
    null = null_maps(visible, residual)
    stays = float(torch.as_tensor(residual, dtype=torch.float64, device="cpu").max())
    targets = _even_targets(reachable(visible, stays), residual)
    if arithmetic == "float64" or (arithmetic == "auto" and _float64_suffices(null, residual)):
        return _in_float64(cumulative(maps, heads, product), null, targets, product)
    rolled = cumulative(maps.log(), None if heads is None else heads.log(), log_matmul)
    return _in_logarithms(rolled, null.log(), targets)


def _even_attention(visible: Bool[Tensor, "*axes query key"]) -> Float[Tensor, "*axes query key"]:
    """Attention spread evenly over the visible keys, float64; a row that sees nothing is all zero."""
    weights = visible.to(torch.float64)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def held_residual(
    maps: Float[Tensor, "layer query key"], visible: Bool[Tensor, "layer query key"], least: float
) -> Float[Tensor, "layer query"]:
    """The residual weight of maps whose diagonal holds the residual stream: one per layer, for all its rows.

    With n visible keys, even attention and a weight w put w + (1 − w)/n on the diagonal. This w is read off
    each row that sees more than itself, and averaged over the layer's rows: one weight per layer keeps
    bidirectional maps unchanged.

    Args:
        maps: rows sum to 1 or are all zero; `least` mixed in already.
        least: what was mixed in, below which no layer can be.
    """
    even = _even_attention(visible).diagonal(dim1=-2, dim2=-1)
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    counts = (even > 0) & (even < 1) & maps.any(-1)
    weights = torch.where(counts, (diagonal - even) / (1 - even).clamp(min=0.5), 0.0)
    mean = weights.sum(-1) / counts.sum(-1).clamp(min=1)
    return mean.clamp(least, 1.0)[:, None].expand(diagonal.shape)


def null_maps(
    visible: Bool[Tensor, "layer query key"], residual: Residual
) -> Float[Tensor, "layer query key"]:
    """The null model's layers: even attention with the residual mixed in, float64."""
    alike = not isinstance(residual, Tensor) and bool((visible == visible[:1]).all())
    different = visible[:1] if alike else visible
    return add_residual(_even_attention(different), residual).expand(visible.shape)


def reachable(visible: Bool[Tensor, "layer query key"], residual: float) -> Bool[Tensor, "layer query key"]:
    """Which inputs each position reaches, at each depth, on a path with at least one attention step.

    Where the residual weight is above 0 a path may also stay at its position in a layer. For one mask that
    holds its diagonal and composes to itself (a causal mask) this is the mask.
    """
    identity = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    results = [visible[0]]
    for place in range(1, len(visible)):
        mask, below = visible[place], results[-1]
        settled = place > 1 and torch.equal(below, results[-2]) and torch.equal(mask, visible[place - 1])
        if not settled and residual > 0:
            below = below | compose(mask, below | identity)
        elif not settled:
            below = compose(mask, below)
        results.append(below)
    return torch.stack(results)


def _even_targets(
    reached: Bool[Tensor, "layer query key"], residual: Residual
) -> Iterator[Float[Tensor, "query key"]]:
    """B0 at each depth. A position that reaches nothing by attention keeps itself where w > 0."""
    identity = torch.eye(reached.shape[-1], dtype=torch.float64, device=reached.device)
    weights = torch.as_tensor(residual, dtype=torch.float64, device=reached.device)
    stayed = weights.expand(reached.shape[:2]).cumprod(0)
    # −expm1 of the logarithm: 1 − w^L keeps its digits where w is near 1
    moved = -torch.expm1(weights.expand(reached.shape[:2]).log().cumsum(0))
    for place, keys in enumerate(reached):
        if place == 0 or not torch.equal(keys, reached[place - 1]):
            even = _even_attention(keys)
            if bool((weights > 0).any()):
                even = torch.where(keys.any(-1, keepdim=True), even, identity)
        target = moved[place, :, None] * even
        target.diagonal().add_(stayed[place])
        yield target


def _float64_suffices(null: Float[Tensor, "layer query key"], residual: Residual) -> bool:
    """Whether R · B0 / R0 can be computed in float64 without loss.

    Every entry of R0 that is not zero is at least the product over layers of the null model's smallest entry
    that is not zero (1/n per layer, or (1 − w)/n, or w where the diagonal is hidden). What an entry of R
    loses to underflow is at most layers · n smallest normal numbers. The row it goes into sums, before it is
    scaled, to at least (1 − w)/n, since B0 ≥ (1 − w)/n and R0 ≤ 1. So float64 keeps its 16 digits where

        product of smallest entries > smallest normal number · layers · n² · 1e16 / (1 − w)
    """
    largest = float(torch.as_tensor(residual, dtype=torch.float64, device="cpu").max())
    if largest == 1:
        return not isinstance(residual, Tensor)  # of one weight for all: the identity, layer by layer
    layers, size = null.shape[0], null.shape[-1]
    # One matrix stands for all layers where they share it.
    different = null[:1] if null.stride(0) == 0 else null
    smallest = torch.where(different > 0, different, 1.0).flatten(1).amin(1).log().mean().item() * layers
    bound = math.log(torch.finfo(torch.float64).tiny) + math.log(layers * size**2 * 1e16)
    return smallest > bound - math.log1p(-largest)


def _in_float64(rolled: Tensor, null: Tensor, targets: Iterator[Tensor], product: Product) -> Tensor:
    """`rolled`, written over; `null` and `targets` are the null model's layers and B0 at each depth."""
    expected: Tensor | None = None
    for plain, matrix, target in zip(rolled, null, targets, strict=True):
        expected = matrix if expected is None else product(matrix, expected)
        factor = target.div_(expected).masked_fill_(expected == 0, 0.0)
        before = plain.sum(-1, keepdim=True)
        total = plain.mul_(factor).sum(-1, keepdim=True)
        plain.mul_(before / total.masked_fill(total == 0, 1))
    return rolled


def _in_logarithms(rolled: Tensor, null: Tensor, targets: Iterator[Tensor]) -> Tensor:
    """The same where `rolled` and `null` are logarithms; numbers, not logarithms, come back."""
    expected: Tensor | None = None
    for plain, matrix, target in zip(rolled, null, targets, strict=True):
        expected = matrix if expected is None else log_matmul(matrix, expected)
        # Where the null model is zero the rollout is too; −inf − (−inf) would be NaN.
        weighted = torch.where(expected > -math.inf, plain + target.log() - expected, -math.inf)
        total = torch.logsumexp(weighted, dim=-1, keepdim=True)
        before = torch.logsumexp(plain, dim=-1, keepdim=True)
        plain.copy_((weighted + torch.where(total > -math.inf, before - total, 0.0)).exp())
    return rolled
