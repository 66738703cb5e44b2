"""Integrated gradients through a neuron in closed form: the shares of its output that belong to its inputs.

A neuron reads p = b + Σ_j p_j, and its output is g(p). Along the straight path from b to p, the integrated
gradient of share p_j is p_j m, with one m for all shares,

    m = (g(p) - g(b)) / (p - b)                                                  plain, act(p)

A gated neuron g(A) B reads two sums, A = a + Σ_j A_j and B = b + Σ_j B_j. Share j is A_j m_gate + B_j m_up,

    m_up = I = ∫ g(A(t)) dt,   m_gate = (g(A) B - g(a) b - (B - b) I) / (A - a)   gated, act(A) B

where I is integrated over t in 0..1 by Gauss-Legendre. m_gate follows from I by integration by parts, so the
shares add up to the change exactly, whatever the error of I. The computations are in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.budget import chunks
from lens_mix._model.anatomy import ACTIVATIONS

Activation = Callable[[Tensor], Tensor]

_LONGEST_INTERVAL = 16.0  # Longer paths are divided into intervals of at most this length.
_STEEPNESS = {"quick_gelu": 1.702}  # An activation's argument is scaled by this, compared with SiLU.
_IN_CACHE = 8192  # This many paths are integrated at once on a CPU.
# If two ends are this close, their difference quotient has a larger error than the derivative between them.
_CLOSE = 1e-5
# These activations have a kink at 0, in themselves or in their slope, where quadrature converges slowly.
_PRIMITIVES: dict[str, Activation] = {
    "relu": lambda x: x.clamp_min(0).square() / 2,
    "relu_squared": lambda x: x.clamp_min(0).pow(3) / 3,
}


def path_multipliers(
    activation: str,
    ends: Sequence[Float[Tensor, "*batch d_mlp"]],
    starts: Sequence[Float[Tensor, "*batch d_mlp"]] | None = None,
) -> tuple[Float[Tensor, "*batch d_mlp"], ...]:
    """Return m of each pre-activation of a layer, the gate's first; paths without `starts` start at zero."""
    if len(ends) == 1:
        return (plain_multiplier(activation, ends[0], None if starts is None else starts[0]),)
    (gate_start, up_start) = (None, None) if starts is None else starts
    return gated_multipliers(activation, ends[0], gate_start, ends[1], up_start)


def plain_multiplier(
    activation: str, end: Float[Tensor, "*batch d_mlp"], start: Float[Tensor, "*batch d_mlp"] | None
) -> Float[Tensor, "*batch d_mlp"]:
    """Return m of a plain neuron that reads `end` (p), on the path from `start` (b; None for zero)."""
    function = ACTIVATIONS[activation]
    if start is None:
        # g(p) / p is accurate down to p = 0, because every activation has g(0) = 0.
        return _ratio(function(end), end, lambda near: derivative(function, torch.zeros_like(end[near])), 0.0)

    # The derivative at the middle differs from the quotient only in the second order of the distance.
    middle = (end + start) / 2
    change = function(end) - function(start)
    return _ratio(change, end - start, lambda near: derivative(function, middle[near]), _CLOSE)


def gated_multipliers(
    activation: str,
    end: Float[Tensor, "*batch d_mlp"],
    start: Float[Tensor, "*batch d_mlp"] | None,
    up_end: Float[Tensor, "*batch d_mlp"],
    up_start: Float[Tensor, "*batch d_mlp"] | None,
) -> tuple[Float[Tensor, "*batch d_mlp"], Float[Tensor, "*batch d_mlp"]]:
    """Return (m_gate, m_up) of a gated neuron on the path from a, b (`start`, `up_start`) to A, B."""
    function = ACTIVATIONS[activation]
    a = torch.zeros_like(end) if start is None else start
    b = torch.zeros_like(up_end) if up_start is None else up_start
    m_up = _mean_on_path(activation, a, end)
    change = function(end) * up_end - function(a) * b - (up_end - b) * m_up

    def by_quadrature(near: Tensor) -> Tensor:
        at, gate, up, change = a[near], (end - a)[near], b[near], (up_end - b)[near]
        # These paths are very short, so one interval and the fewest points are enough.
        return _integral(
            lambda t: derivative(function, at + t * gate) * (up + t * change), 1, _points(_CLOSE)
        )

    return _ratio(change, end - a, by_quadrature, _CLOSE), m_up


def _mean_on_path(
    activation: str, start: Float[Tensor, "*batch"], end: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return ∫ g(start + t (end - start)) dt over t in 0..1."""

    def by_quadrature(near: Tensor | slice) -> Tensor:
        ends, starts = end[near].flatten(), start[near].flatten()
        out = torch.empty_like(ends)
        # Chunks fit the caches of a CPU, and a long path requires more points only in its own chunk.
        for chunk in chunks(0, len(ends), _IN_CACHE if end.device.type == "cpu" else len(ends)):
            out[chunk] = _mean(activation, starts[chunk], ends[chunk])
        return out.view(end[near].shape)

    primitive = _PRIMITIVES.get(activation)
    if primitive is None:
        return by_quadrature(slice(None))
    return _ratio(primitive(end) - primitive(start), end - start, by_quadrature, _CLOSE)


def _mean(activation: str, start: Float[Tensor, " path"], end: Float[Tensor, " path"]) -> Tensor:
    function, change = ACTIVATIONS[activation], end - start
    longest = float(change.abs().max())
    intervals = max(1, math.ceil(longest / _LONGEST_INTERVAL))
    points = _points(longest / intervals * _STEEPNESS.get(activation, 1.0))
    return _integral(lambda t: function(torch.add(start, change, alpha=t)), intervals, points)


def _points(length: float) -> int:
    """Return the number of Gauss-Legendre points for 1e-13 on a path; SiLU has poles at ±πi."""
    return math.ceil(5 + 2.5 * length)


_nodes = functools.cache(np.polynomial.legendre.leggauss)


def derivative(function: Activation, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return g'(x), elementwise."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _integral(integrand: Callable[[float], Tensor], intervals: int, points: int) -> Tensor:
    nodes, weights = _nodes(points)
    # The rule's points are in -1..1.
    places = ((np.arange(intervals)[:, None] + (nodes + 1) / 2) / intervals).flatten().tolist()
    shares = np.tile(weights / 2 / intervals, intervals).tolist()
    total: Tensor = integrand(places[0]) * shares[0]
    for place, share in zip(places[1:], shares[1:], strict=True):
        total.add_(integrand(place), alpha=share)
    return total


def _ratio(above: Tensor, below: Tensor, limit: Callable[[Tensor], Tensor], close: float) -> Tensor:
    """Return above / below; `limit` computes the places at which `below` is `close` to zero."""
    near = below.abs() <= close
    if not bool(near.any()):
        return above / below
    out = above / torch.where(near, torch.ones_like(below), below)
    out[near] = limit(near)
    return out
