"""Integrated gradients through a neuron in closed form: which share of its output belongs to which input.

A neuron reads p = b + Σ_j p_j and gives g(p). Along the straight path from b to p the integrated gradient of
share p_j is p_j m with one m for all shares,

    m = (g(p) - g(b)) / (p - b)                                                  plain, act(p)

A gated neuron g(A) B reads two sums, A = a + Σ_j A_j and B = b + Σ_j B_j; share j gets A_j m_gate + B_j m_up,

    m_up = I = ∫ g(A(t)) dt,   m_gate = (g(A) B - g(a) b - (B - b) I) / (A - a)   gated, act(A) B

with I over t in 0..1, by Gauss-Legendre. m_gate follows from I by parts, so the shares add up to the change
exactly, whatever the error of I. All in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import chunks
from lens_mix.lens.anatomy import ACTIVATIONS

Activation = Callable[[Tensor], Tensor]

_LONGEST_INTERVAL = 16.0  # longer paths are cut into intervals of this length
_STEEPNESS = {"quick_gelu": 1.702}  # how much faster than SiLU an activation turns
_IN_CACHE = 8192  # paths that are integrated at once
# Where two ends are this close, their difference quotient is further off than the derivative between them.
_CLOSE = 1e-5
# Integrals of the activations with a kink at 0, in themselves or their slope: quadrature converges slowly.
_PRIMITIVES: dict[str, Activation] = {
    "relu": lambda x: x.clamp_min(0).square() / 2,
    "relu_squared": lambda x: x.clamp_min(0).pow(3) / 3,
}


def path_multipliers(
    activation: str,
    ends: Sequence[Float[Tensor, "*batch d_mlp"]],
    starts: Sequence[Float[Tensor, "*batch d_mlp"]] | None = None,
) -> tuple[Float[Tensor, "*batch d_mlp"], ...]:
    """Return m of each pre-activation of a layer, of the gate's first; None: paths start at zero."""
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
        # g(p) / p keeps all its digits down to p = 0, for every activation has g(0) = 0.
        return _ratio(function(end), end, lambda near: derivative(function, torch.zeros_like(end[near])), 0.0)

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
    """(m_gate, m_up) of a gated neuron; `end` and `start` are A and a, `up_end` and `up_start` B and b."""
    function = ACTIVATIONS[activation]
    a = torch.zeros_like(end) if start is None else start
    b = torch.zeros_like(up_end) if up_start is None else up_start
    m_up = _mean_on_path(activation, a, end)
    change = function(end) * up_end - function(a) * b - (up_end - b) * m_up

    def by_quadrature(near: Tensor) -> Tensor:
        at, gate, up, change = a[near], (end - a)[near], b[near], (up_end - b)[near]
        # Paths of next to no length: one interval, and the fewest points.
        return _integral(
            lambda t: derivative(function, at + t * gate) * (up + t * change), 1, _points(_CLOSE)
        )

    return _ratio(change, end - a, by_quadrature, _CLOSE), m_up


def _mean_on_path(
    activation: str, start: Float[Tensor, "*batch"], end: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """∫ g(start + t (end - start)) dt over t in 0..1."""

    def by_quadrature(near: Tensor | slice) -> Tensor:
        ends, starts = end[near].flatten(), start[near].flatten()
        out = torch.empty_like(ends)
        # On a processor some at a time: what stays in its caches, and few long paths make few others wait.
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
    """Gauss-Legendre points that are good to 1e-13 on a path of a length: SiLU has poles at ±πi."""
    return math.ceil(5 + 2.5 * length)


_nodes = functools.cache(np.polynomial.legendre.leggauss)


def derivative(function: Activation, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """g'(x), elementwise."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _integral(integrand: Callable[[float], Tensor], intervals: int, points: int) -> Tensor:
    nodes, weights = _nodes(points)
    # The rule's points lie in -1..1.
    places = ((np.arange(intervals)[:, None] + (nodes + 1) / 2) / intervals).flatten().tolist()
    shares = np.tile(weights / 2 / intervals, intervals).tolist()
    total: Tensor = integrand(places[0]) * shares[0]
    for place, share in zip(places[1:], shares[1:], strict=True):
        total.add_(integrand(place), alpha=share)
    return total


def _ratio(above: Tensor, below: Tensor, limit: Callable[[Tensor], Tensor], close: float) -> Tensor:
    """Return above / below; where `below` is this close to zero, what `limit` gives for these places."""
    near = below.abs() <= close
    if not bool(near.any()):
        return above / below
    out = above / torch.where(near, torch.ones_like(below), below)
    out[near] = limit(near)
    return out
