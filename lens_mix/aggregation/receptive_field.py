"""Normalize a rollout by the receptive field of attention.

Abnar & Zuidema (ACL 2020) write that rollout in causal decoders is biased to the first tokens, and that one
should "first normalize based on the receptive field of attention". They give no formula; this one is ours
(`docs/evidence/aggregation.md` has what it changes). R is the rollout of L layers with the residual weight w.
U_l is attention that is uniform over the visible keys of layer l, the null model:

    R0 = rollout of the U_l with the same L and w                (the rollout of no preference)
    B0 = w^L I + (1 − w^L) U, U uniform over the reachable keys  (how no preference should look)
    result = R · B0 / R0, elementwise, with each row scaled back to its sum in R

R / R0 says how much more weight arrived than the number of paths explains, and B0 turns this ratio into
shares. w^L is the weight of the one path that stays at its position in every layer.

No rule that corrects each layer can do this. Suppose that a rule replaces each layer of uniform causal
attention U by M_l, so that the product stays uniform at every depth: M_0 = U, and M_1 M_0 = U. U is
triangular without a zero on its diagonal, so it has an inverse, and M_1 = I. The same is true of every layer
above. The only such rule discards what the layers did. So the product is corrected, at its own depth.

If a map contains the residual stream, or the weight of each row was measured, w differs between layers or
rows, and w^L is the product of the layers' weights. The null model must then have the same weights. With a
smaller weight in the null model, the result for a deep map would follow the position, as the null model does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.products import Product, Residual, add_residual, compose, cumulative, log_matmul
from lens_mix.arguments import check_choice


def normalize_rollout(
    maps: Float[Tensor, "layer query key"],
    visible: Bool[Tensor, "layer query key"],
    residual: Residual,
    heads: Float[Tensor, "layer head query key"] | None = None,
    arithmetic: str = "auto",
    product: Product = torch.matmul,
) -> Float[Tensor, "layer *head query key"]:
    """Return the cumulative rollout of `maps`, with each layer normalized by the null model of its depth.

    The result is float64. Each row has the same sum as in the plain rollout: 1, or less below all-zero rows.

    Args:
        maps: The maps, float64, with heads merged and the residual mixed in (`add_residual`). Rows sum to 1
            or are all zero. Scores of keys that are not visible are 0.
        visible: The keys that attention could see.
        residual: The residual weight w in `maps`, 0 to 1: one, or one per layer and query.
        heads: The maps of each head, float64. If given, the result has a head axis.
        arithmetic: "float64", "log" (logarithms), or "auto": float64 if a bound shows that nothing
            underflows, else logarithms.
        product: The product of two maps in float64.

    Raises:
        ValueError: If the arithmetic does not exist.
    """
    check_choice("arithmetic", arithmetic, ("auto", "float64", "log"))
    null = null_maps(visible, residual)
    largest = float(torch.as_tensor(residual, dtype=torch.float64, device="cpu").max())
    targets = _make_targets(reachable(visible, largest), residual)
    if arithmetic == "float64" or (arithmetic == "auto" and _float64_suffices(null, residual)):
        return _normalize_in_float64(cumulative(maps, heads, product), null, targets, product)
    rolled = cumulative(maps.log(), None if heads is None else heads.log(), log_matmul)
    return _normalize_logarithms(rolled, null.log(), targets)


def _make_uniform(visible: Bool[Tensor, "*axes query key"]) -> Float[Tensor, "*axes query key"]:
    """Return uniform attention over the visible keys, float64. A row without a visible key is all zero."""
    weights = visible.to(torch.float64)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def estimate_residual(
    maps: Float[Tensor, "layer query key"], visible: Bool[Tensor, "layer query key"], least: float
) -> Float[Tensor, "layer query"]:
    """Return the residual weight of each layer, for maps whose diagonal contains the residual stream.

    With n visible keys, uniform attention and a weight w, the diagonal is w + (1 − w)/n. This equation gives
    w for each row that sees more than its own position. The layer's weight is the mean over these rows,
    because one weight for all rows of a layer leaves bidirectional maps unchanged.

    Args:
        maps: The maps with `least` mixed in. Rows sum to 1 or are all zero.
        visible: The keys that attention could see.
        least: The weight that was mixed in, and the smallest that a layer can have.
    """
    even = _make_uniform(visible).diagonal(dim1=-2, dim2=-1)
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    counts = (even > 0) & (even < 1) & maps.any(-1)
    weights = torch.where(counts, (diagonal - even) / (1 - even).clamp(min=0.5), 0.0)
    mean = weights.sum(-1) / counts.sum(-1).clamp(min=1)
    return mean.clamp(least, 1.0)[:, None].expand(diagonal.shape)


def null_maps(
    visible: Bool[Tensor, "layer query key"], residual: Residual
) -> Float[Tensor, "layer query key"]:
    """Return the layers of the null model: uniform attention with the residual mixed in, float64."""
    are_equal = not isinstance(residual, Tensor) and bool((visible == visible[:1]).all())
    distinct = visible[:1] if are_equal else visible
    return add_residual(_make_uniform(distinct), residual).expand(visible.shape)


def reachable(visible: Bool[Tensor, "layer query key"], residual: float) -> Bool[Tensor, "layer query key"]:
    """Return which inputs each position reaches, at each depth, on a path with at least one attention step.

    If the residual weight is above 0, a path may also stay at its position in a layer. For a causal mask that
    all layers share, the result is this mask at every depth.
    """
    identity = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    results = [visible[0]]
    for depth in range(1, len(visible)):
        mask, below = visible[depth], results[-1]
        is_constant = depth > 1 and torch.equal(below, results[-2]) and torch.equal(mask, visible[depth - 1])
        if not is_constant and residual > 0:
            below = below | compose(mask, below | identity)
        elif not is_constant:
            below = compose(mask, below)
        results.append(below)
    return torch.stack(results)


def _make_targets(
    reached: Bool[Tensor, "layer query key"], residual: Residual
) -> Iterator[Float[Tensor, "query key"]]:
    """Yield B0 at each depth. If w > 0, a position that attention connects with nothing has itself as key."""
    identity = torch.eye(reached.shape[-1], dtype=torch.float64, device=reached.device)
    weights = torch.as_tensor(residual, dtype=torch.float64, device=reached.device)
    stayed = weights.expand(reached.shape[:2]).cumprod(0)
    # expm1 computes 1 − w^L without cancellation if w is close to 1.
    moved = -torch.expm1(weights.expand(reached.shape[:2]).log().cumsum(0))
    for depth, keys in enumerate(reached):
        if depth == 0 or not torch.equal(keys, reached[depth - 1]):
            even = _make_uniform(keys)
            if bool((weights > 0).any()):
                even = torch.where(keys.any(-1, keepdim=True), even, identity)
        target = moved[depth, :, None] * even
        target.diagonal().add_(stayed[depth])
        yield target


def _float64_suffices(null: Float[Tensor, "layer query key"], residual: Residual) -> bool:
    """Return whether float64 is accurate enough for R · B0 / R0.

    Each nonzero entry of R0 is at least a product over layers: of the smallest nonzero entry of the null
    model in each layer (1/n, or (1 − w)/n, or w if the diagonal is hidden). Underflow changes an entry of R
    by at most layers · n times the smallest normal number. Before a row is scaled, its sum is at least (1 −
    w)/n, because B0 ≥ (1 − w)/n and R0 ≤ 1. So the result has the 16 digits of float64 if

        product of smallest entries > smallest normal number · layers · n² · 1e16 / (1 − w)
    """
    largest = float(torch.as_tensor(residual, dtype=torch.float64, device="cpu").max())
    if largest == 1:
        # One weight of 1 makes every layer the identity, which is exact.
        return not isinstance(residual, Tensor)
    layers, size = null.shape[0], null.shape[-1]
    # `null_maps` expands one matrix if all layers are equal; its stride over layers is then 0.
    distinct = null[:1] if null.stride(0) == 0 else null
    smallest = torch.where(distinct > 0, distinct, 1.0).flatten(1).amin(1).log().mean().item() * layers
    bound = math.log(torch.finfo(torch.float64).tiny) + math.log(layers * size**2 * 1e16)
    return smallest > bound - math.log1p(-largest)


def _normalize_in_float64(
    rolled: Tensor, null: Tensor, targets: Iterator[Tensor], product: Product
) -> Tensor:
    """Return the normalized rollout, computed in place.

    Args:
        rolled: The plain rollout at each depth, which is overwritten.
        null: The layers of the null model.
        targets: B0 at each depth.
        product: The product of two maps.
    """
    expected: Tensor | None = None
    for plain, matrix, target in zip(rolled, null, targets, strict=True):
        expected = matrix if expected is None else product(matrix, expected)
        factor = target.div_(expected).masked_fill_(expected == 0, 0.0)
        before = plain.sum(-1, keepdim=True)
        total = plain.mul_(factor).sum(-1, keepdim=True)
        plain.mul_(before / total.masked_fill(total == 0, 1))
    return rolled


def _normalize_logarithms(rolled: Tensor, null: Tensor, targets: Iterator[Tensor]) -> Tensor:
    """Return the normalized rollout, not its logarithm, from the logarithms of `rolled` and `null`."""
    expected: Tensor | None = None
    for plain, matrix, target in zip(rolled, null, targets, strict=True):
        expected = matrix if expected is None else log_matmul(matrix, expected)
        # If the null model is zero, the rollout is zero as well; −inf − (−inf) would be NaN.
        weighted = torch.where(expected > -math.inf, plain + target.log() - expected, -math.inf)
        total = torch.logsumexp(weighted, dim=-1, keepdim=True)
        before = torch.logsumexp(plain, dim=-1, keepdim=True)
        plain.copy_((weighted + torch.where(total > -math.inf, before - total, 0.0)).exp())
    return rolled
