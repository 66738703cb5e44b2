"""Points and weights of quadrature rules over 0..1."""

from __future__ import annotations

import dataclasses
import functools

import numpy
import torch
from jaxtyping import Float
from numpy.polynomial import legendre
from torch import Tensor

from lens_mix.arguments import check_choice, check_whole_number

RULES = ("gauss_legendre", "riemann_left", "riemann_right", "riemann_middle", "trapezoid")
# captum uses these names for two of the rules.
_ALIASES = {"gausslegendre": "gauss_legendre", "riemann_trapezoid": "trapezoid"}
_LARGEST_NESTED = 63  # float64 is too imprecise for the points of larger nested rules.
# One rule has at most so many points. More have no benefit, and finding Gauss-Legendre's takes cubic time.
_MOST_STEPS = 2_000


def rule_name(method: str) -> str:
    """Return the rule's name, which may be given in captum's spelling.

    Raises:
        ValueError: The rule does not exist.
    """
    name = _ALIASES.get(method, method) if isinstance(method, str) else method
    check_choice("method", name, RULES)
    return name


def quadrature(method: str, n_steps: int) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Return points in 0..1 and weights that sum to 1, in float64.

    With n steps, Gauss-Legendre is exact for polynomials up to degree 2n - 1. The left rule has its points at
    k/n for k = 0..n-1, the right rule for k = 1..n, and the middle rule halfway between. The trapezoid rule
    has n points, with both ends, at distances of 1/(n - 1). (The weights of captum 0.9 are based on 1/n, so
    that its trapezoid weights sum to (n - 1)/n.)

    Raises:
        ValueError: The rule does not exist, or it needs more steps.
    """
    name = rule_name(method)
    least = 2 if name == "trapezoid" else 1
    n_steps = check_whole_number("n_steps", n_steps, least, _MOST_STEPS)
    if name == "gauss_legendre":
        nodes, masses = legendre.leggauss(n_steps)
        return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(masses / 2)
    intervals = n_steps - 1 if name == "trapezoid" else n_steps
    weights = torch.full((n_steps,), 1 / intervals, dtype=torch.float64, device="cpu")
    if name == "trapezoid":
        weights[[0, -1]] /= 2
    shift = {"riemann_middle": 0.5, "riemann_right": 1.0}.get(name, 0.0)
    return (torch.arange(n_steps, dtype=torch.float64, device="cpu") + shift) / intervals, weights


@dataclasses.dataclass(frozen=True)
class NestedRules:
    """Rules of growing size over 0..1, each with all points of the one before it.

    Attributes:
        points: The points, in the order in which the rules need them.
        weights: The weights of every rule, 0 for the points of larger rules only; they sum to 1 per rule.
        counts: The number of points of each rule.
        degrees: The largest degree of polynomials for which each rule is exact.
    """

    points: Float[Tensor, " point"]
    weights: Float[Tensor, "rule point"]
    counts: tuple[int, ...]
    degrees: tuple[int, ...]


def one_rule(method: str, n_steps: int) -> NestedRules:
    """Return a single rule of `quadrature` as nested rules."""
    points, weights = quadrature(method, n_steps)
    return NestedRules(points, weights[None], (n_steps,), (0,))


@functools.cache
def nested_rules(largest: int) -> NestedRules:
    """Return Gauss-Legendre's rules of 1 and 3 points, and Patterson's of 7, 15, 31 and 63.

    Patterson (Math. Comp. 22, 1968) adds n + 1 points to n, so that the degree of exactness is the highest
    possible. It is 3n/2 for the resulting n points, while Gauss-Legendre, whose rules share no points, has
    2n. The ends of the interval are no points. Rules with more than `largest` points are left out.
    """
    nodes, counts = numpy.zeros(1), [1]
    while 2 * len(nodes) + 1 <= min(largest, _LARGEST_NESTED):
        nodes = numpy.concatenate([nodes, _further_nodes(nodes)])
        counts.append(len(nodes))
    weights = numpy.zeros((len(counts), len(nodes)))
    for rule, count in enumerate(counts):
        # The weights have to integrate the Legendre polynomials of degree 0..count - 1 over -1..1.
        polynomials, integrals = legendre.legvander(nodes[:count], count - 1), 2 * numpy.eye(count)[0]
        weights[rule, :count] = numpy.linalg.solve(polynomials.T, integrals)
    degrees = (1, *((3 * count + 1) // 2 for count in counts[1:]))
    points = torch.from_numpy((nodes + 1) / 2)
    return NestedRules(points, torch.from_numpy(weights / 2), tuple(counts), degrees)


def _further_nodes(nodes: numpy.ndarray) -> numpy.ndarray:
    """Return Patterson's n + 1 further nodes in -1..1 for n given ones.

    They are the roots of the polynomial E of degree n + 1 for which ∫ Π(x - node) E(x) P_k(x) dx = 0 for all
    Legendre polynomials P_k of degree k <= n.
    """
    count = len(nodes)
    # This rule is exact, because the integrands have degree 3 n + 1 at most.
    x, measure = legendre.leggauss(2 * count + 2)
    given = numpy.prod([2 * (x - node) for node in nodes], axis=0)
    basis = legendre.legvander(x, count + 1)
    products = (basis[:, :-1] * (measure * given / abs(given).max())[:, None]).T @ basis
    # The equations of one parity are 0 = 0, so they are solved by least squares.
    below = numpy.linalg.lstsq(products[:, :-1], -products[:, -1], rcond=None)[0]
    coefficients = numpy.append(below, 1.0)
    roots = numpy.sort(legendre.legroots(coefficients).real)
    # Newton's steps correct the last digits, which eigenvalues of a companion matrix lack.
    for _ in range(3):
        roots -= legendre.legval(roots, coefficients) / legendre.legval(roots, legendre.legder(coefficients))
    # This makes the roots exactly symmetric about 0.
    symmetric: numpy.ndarray = (roots - roots[::-1]) / 2
    return symmetric
