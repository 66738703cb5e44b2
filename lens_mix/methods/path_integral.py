"""Integrate gradients along the line from a baseline pattern to that of a block, with an error estimate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.quadrature import NestedRules
from lens_mix.hooks import HookPair, must_fire
from lens_mix.methods.baselines import LARGE_GAP
from lens_mix.methods.bound_target import BoundTarget, gradients_of

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

# If the terms of dF/dα cancel to less than this share of their sizes, a norm hides the scale of the pattern.
_LARGEST_DEGENERATE_SHARE = 2e-3
# The default tolerance, as a share of the sum of a layer's absolute scores.
_TOLERANCE = 0.01
# The rounding error of F(A) - F(B), in units of the last place of F.
_ROUNDING = 30


@dataclasses.dataclass(frozen=True)
class Path:
    """The straight line B + α (A - B) from the baseline B to the pattern A of one block.

    Attributes:
        block: The block.
        bound: The target F.
        pattern: A.
        baseline: B.
        interventions: The function that makes the hooks for a point of the path:
            `AttentionAttribution.interventions`.
        largest_chunk: The largest number of points of all prompts in one pass. None: as many as memory
            allows.
    """

    block: Block
    bound: BoundTarget
    pattern: Float[Tensor, "batch head query key"]
    baseline: Float[Tensor, "batch head query key"]
    interventions: Callable[..., list[HookPair]]
    largest_chunk: int | None = None

    @functools.cached_property
    def difference(self) -> Float[Tensor, "batch head query key"]:
        """Return A - B."""
        return self.pattern - self.baseline

    def gradients(
        self, prompts: Int[Tensor, " row"], alphas: Float[Tensor, " row"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, "row head query key"]]:
        """Return F and its gradient with respect to the pattern, at one point of the path per row."""
        # One pass has the points of several prompts, each with a pattern of its own.
        scale = alphas.to(self.pattern)[:, None, None, None]
        leaf = (self.baseline[prompts] + scale * self.difference[prompts]).detach().requires_grad_(True)
        pairs = self.interventions(self.block.layer, leaf, attention=self.block.stack.attention_template)
        with must_fire(*pairs) as hooks:
            values = self.bound.values(prompts, hooks, block=self.block, gradients=True)
        return values.detach(), gradients_of(values, [leaf])[0]

    def chunks(self, rows: int) -> Iterator[slice]:
        """Return slices over `rows` rows, with as many rows in each as memory allows."""
        step = self.block.copies_with_gradients(rows, logits=self.bound.reads_logits)
        step = step if self.largest_chunk is None else min(step, self.largest_chunk)
        return (slice(start, start + step) for start in range(0, rows, step))


class Integral:
    """The integral of the gradient along a path, for every prompt, by the rules of a nested family.

    Each rule uses the points of the smaller ones again. So one sum per rule is stored, and no gradients. F at
    the baseline needs no gradient, but is computed in the same pass as the first points, because on short
    prompts that is faster than a forward pass of its own.

    Args:
        path: The path.
        rules: The nested rules.
        is_smooth: False if the gradient may jump along the path (ReLU, experts).

    Attributes:
        path: As given.
        rules: As given.
        is_smooth: As given.
        rule: For each prompt, the number of the largest rule so far.
        at_baseline: For each prompt, F(B).
    """

    def __init__(self, path: Path, rules: NestedRules, is_smooth: bool = True) -> None:
        batch = len(path.pattern)
        self.path, self.rules, self.is_smooth = path, rules, is_smooth
        self.rule = [0] * batch
        self.at_baseline = path.block.zeros(batch)
        self._sums = path.block.zeros(len(rules.counts), *path.pattern.shape)
        self._shares: list[list[float]] = [[] for _ in range(batch)]

    def _advance(self, prompts: list[int], rule: int) -> None:
        """Evaluate the points that a rule adds, for some prompts."""
        start = self.rules.counts[self.rule[prompts[0]]] if self._shares[prompts[0]] else 0
        added = slice(start, self.rules.counts[rule])
        points, weights = self.rules.points[added], self.rules.weights[:, added]
        if start == 0 and points[0] != 0:
            points = torch.cat([points.new_zeros(1), points])
            weights = torch.nn.functional.pad(weights, (1, 0))
        rows = torch.tensor(prompts, device=self._sums.device, dtype=torch.long)
        rows = rows.repeat_interleave(len(points))
        alphas, weights = points.repeat(len(prompts)), weights.repeat(1, len(prompts)).to(self._sums)
        for chunk in self.path.chunks(len(rows)):
            self._add_points(rows[chunk], alphas[chunk], weights[:, chunk])
        for prompt in prompts:
            self.rule[prompt] = rule

    def _add_points(
        self, prompts: Int[Tensor, " row"], alphas: Float[Tensor, " row"], weights: Float[Tensor, "rule row"]
    ) -> None:
        values, gradients = self.path.gradients(prompts, alphas)
        gradients = gradients.to(self._sums.dtype)
        terms = (gradients * self.path.difference[prompts]).flatten(1)
        # If all terms are 0, the quotient is 0 / 0: no terms cancel, so the share is 1.
        shares = (terms.sum(-1).abs() / terms.abs().sum(-1)).nan_to_num(1.0)
        # A point without weight may have no finite gradient, for example if a norm divides by zero.
        counts = (weights != 0).any(0)
        axes = "rule row, row head query key -> rule head query key"
        for prompt in prompts.unique().tolist():
            here = counts & (prompts == prompt)
            self._sums[:, prompt] += einsum(weights[:, here], gradients[here], axes)
            self._shares[prompt] += shares[here].tolist()
        starts = alphas == 0
        self.at_baseline[prompts[starts]] = values[starts].to(self.at_baseline)

    def scores(self, prompt: int, rule: int | None = None) -> Float[Tensor, "head query key"]:
        """Return the attribution (A - B) ⊙ ∫ ∂F/∂A dα, by the largest rule so far or by the given one."""
        rule = self.rule[prompt] if rule is None else rule
        return self._sums[rule, prompt] * self.path.difference[prompt]

    def steps(self, prompt: int) -> int:
        """Return the number of points so far."""
        return self.rules.counts[self.rule[prompt]]

    def gap(self, prompt: int) -> float:
        """Return the completeness gap Σ scores - (F(A) - F(B))."""
        difference = self.path.bound.clean[prompt].double() - self.at_baseline[prompt].double()
        return (self.scores(prompt).double().sum() - difference).item()

    def size(self, prompt: int) -> float:
        """Return the sum of the absolute scores."""
        return self.scores(prompt).double().abs().sum().item()

    def error(self, prompt: int) -> float:
        """Return the larger of the completeness gap and the estimated error, summed over the scores.

        The gap alone can be 0 by accident, because errors of two signs cancel in it. So the scores are also
        compared with those of the smaller rule. Their difference, the share δ of the absolute sum, estimates
        the error of the smaller rule. A rule that is exact up to degree d has an error that falls with the
        (d + 1)-th power of the distance of its points. So the larger rule, exact up to degree D, has the
        error δ^((D + 1) / (d + 1)): δ³ for 3 points after 1, and δ² from then on.

        If the gradient jumps along the path, errors fall only like 1 / points, whatever the degree, so δ
        itself is the estimate. docs/evidence/layers.md compares both with true errors.
        """
        rule, size = self.rule[prompt], self.size(prompt)
        if rule == 0 or size == 0:
            return abs(self.gap(prompt))
        change = (self.scores(prompt) - self.scores(prompt, rule - 1)).double().abs().sum().item() / size
        if not self.is_smooth:
            return max(abs(self.gap(prompt)), size * change)
        smaller, larger = self.rules.degrees[rule - 1 : rule + 1]
        share = change ** ((larger + 1) / (smaller + 1)) if change < 1 else change
        return max(abs(self.gap(prompt)), size * share)

    def visible(self, prompt: int) -> float:
        """Return the share of Σ|A g| that remains in the signed sum, at the median of the points."""
        return torch.tensor(self._shares[prompt], dtype=torch.float64, device="cpu").median().item()

    def is_degenerate(self, prompt: int) -> bool:
        """Return whether F does not depend on the scale of the pattern on most of the path."""
        return self.visible(prompt) < _LARGEST_DEGENERATE_SHARE

    def accepted(self, prompt: int, tolerance: float | None) -> float:
        """Return the largest accepted error, in the target's unit.

        It is the tolerance. If that is None, it is 1 % of the sum of the absolute scores, but for a
        probability at most 0.01, and never less than the rounding error of F.
        """
        if tolerance is not None:
            return tolerance
        bound = self.path.bound
        largest = max(abs(bound.clean[prompt].item()), abs(self.at_baseline[prompt].item()))
        size = min(1.0, self.size(prompt)) if bound.is_probability else self.size(prompt)
        return max(_TOLERANCE * size, _ROUNDING * torch.finfo(self.path.pattern.dtype).eps * largest)

    def refine(self, tolerance: float | None) -> None:
        """Use one rule after the other until the error of each prompt is accepted.

        A degenerate path is not refined after its first points. The last rule adds half of all points. It is
        used only if its expected error is accepted: the square of the current share of the error, or half of
        it if the gradient may jump.
        """
        todo, last = list(range(len(self.rule))), len(self.rules.counts) - 1
        for rule in range(min(1, last), last + 1):
            self._advance(todo, rule)
            todo = [prompt for prompt in todo if self._needs_more(prompt, tolerance)]
            if not todo:
                return

    def _needs_more(self, prompt: int, tolerance: float | None) -> bool:
        error, accepted = self.error(prompt), self.accepted(prompt, tolerance)
        if error <= accepted or self.is_degenerate(prompt):
            return False
        before_last = self.rule[prompt] + 2 == len(self.rules.counts)
        # Twice the points square the share of the error, or halve it if the gradient jumps.
        is_promising = error**2 <= accepted * self.size(prompt) if self.is_smooth else error <= 2 * accepted
        return not before_last or is_promising

    def report(self, prompt: int, tolerance: float | None, max_steps: int | None) -> None:
        """Record the results, and a note if they are not reliable.

        Args:
            prompt: The number of the prompt.
            tolerance: As in `refine`.
            max_steps: The largest number of points that `refine` could use. None: the number was given.
        """
        block, clean = self.path.block, self.path.bound.clean[prompt].item()
        block.detail(prompt, "completeness_gap", self.gap(prompt))
        block.detail(prompt, "target_value", clean)
        block.detail(prompt, "baseline_value", self.at_baseline[prompt].item())
        block.detail(prompt, "steps", self.steps(prompt))
        block.detail(prompt, "visible_share", self.visible(prompt))
        if max_steps is not None:
            block.detail(prompt, "estimated_error", self.error(prompt))
        if text := self._describe_problem(
            prompt, tolerance, max_steps, clean - self.at_baseline[prompt].item()
        ):
            block.warn(prompt, text)

    def _describe_problem(
        self, prompt: int, tolerance: float | None, max_steps: int | None, difference: float
    ) -> str:
        gap, steps = self.gap(prompt), self.steps(prompt)
        size = f"completeness gap {gap:.2g} with {steps} points, where F(A) - F(baseline) is {difference:.2g}"
        if self.is_degenerate(prompt):
            return (
                "completeness is degenerate: on most of the path the target does not depend on the scale of "
                "this pattern (a norm follows attention), and the signed terms cancel to "
                f"{self.visible(prompt):.1e} of their absolute sum; {size}"
            )
        if max_steps is not None:
            error, accepted = self.error(prompt), self.accepted(prompt, tolerance)
            unmet = f"{size}; estimated error of the scores {error:.2g} (max_steps={max_steps})"
            unmet += "" if self.is_smooth else "; with ReLU or experts the error falls only like 1 / points"
            return f"tolerance {accepted:.2g} was not met: {unmet}" if error > accepted else ""
        if tolerance is not None and abs(gap) > tolerance:
            return f"tolerance {tolerance:.2g} was not met: {size}"
        large = abs(gap) > max(LARGE_GAP * abs(difference), 1e-6)
        return f"{size}: raise n_steps, or let each layer choose (n_steps=None)" if large else ""
