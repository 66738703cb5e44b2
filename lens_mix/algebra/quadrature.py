"""Points and weights of the rules that integrate over 0..1."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Rule = Literal["gauss_legendre", "riemann_left", "riemann_right", "riemann_middle", "trapezoid"]

# captum's names for two of them
_ALIASES = {"gausslegendre": "gauss_legendre", "riemann_trapezoid": "trapezoid"}
RULES = ("gauss_legendre", "riemann_left", "riemann_right", "riemann_middle", "trapezoid")


def rule_name(method: str) -> str:
    """The rule's name here; captum's spellings are known too.

    Raises:
        ValueError: no such rule.
    """
    name = _ALIASES.get(method, method)
    if name not in RULES:
        raise ValueError(f"method: expected one of {list(RULES)}, got {method!r}")
    return name


def quadrature(method: str, n_steps: int) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Points in 0..1 and weights that sum to 1, float64.

    With n steps: Gauss-Legendre is exact for polynomials up to degree 2n - 1; the left rule has its points at
    k/n for k = 0..n-1, the right one for k = 1..n, the middle one halfway between; the trapezoid rule has n
    points, ends included, 1/(n - 1) apart. (captum 0.9 weighs them by 1/n, so that its trapezoid weights sum
    to (n - 1)/n.)

    Raises:
        ValueError: no such rule; fewer steps than the rule needs.
    """
    name = rule_name(method)
    least = 2 if name == "trapezoid" else 1
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < least:
        raise ValueError(f"n_steps: expected a whole number, {least} or more for {name!r}, got {n_steps!r}")
    if name == "gauss_legendre":
        import numpy

        points, weights = numpy.polynomial.legendre.leggauss(n_steps)
        return torch.from_numpy((points + 1) / 2), torch.from_numpy(weights / 2)
    count = torch.arange(n_steps, dtype=torch.float64)
    if name == "trapezoid":
        even = torch.full((n_steps,), 1 / (n_steps - 1), dtype=torch.float64)
        even[0] = even[-1] = even[0] / 2
        return count / (n_steps - 1), even
    shift = {"riemann_left": 0.0, "riemann_middle": 0.5, "riemann_right": 1.0}[name]
    return (count + shift) / n_steps, torch.full((n_steps,), 1 / n_steps, dtype=torch.float64)
