"""Self-attention attribution: integrated gradients on attention patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.quadrature import quadrature, rule_name
from lens_mix.hooks import must_fire, replace_pattern
from lens_mix.methods import target_passes
from lens_mix.methods.base import Method
from lens_mix.methods.target_passes import BoundTarget
from lens_mix.targets import TargetLike, as_target, describe, predicted

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Baseline = (
    Literal["zero", "uniform"]
    | Float[Tensor, "layer head query key"]
    | Callable[[Float[Tensor, "batch head query key"], int], Float[Tensor, "batch head query key"]]
)

# Where a norm hides the scale, the terms of dF/dα were seen to cancel to 1e-4 of their sizes or less;
# elsewhere they kept 2 % and more.
_INVISIBLE = 2e-3
_LARGE_GAP = 0.1


@dataclasses.dataclass(frozen=True)
class AttentionAttribution(Method):
    """Self-attention attribution (Hao et al., AAAI 2021, eq. 3-4).

    Attr_h(A) = (A_h - B_h) ⊙ ∫₀¹ ∂F(B + α (A - B)) / ∂A_h dα, for one layer's pattern A at a time: all heads
    of the layer move together from the baseline B, and the layers above run again. F is the target. Shape
    [layer, query, key], the sum over heads, or [layer, head, query, key] with `per_head`; signed, in the
    target's unit. The entries of one layer sum to F(A) - F(B) (completeness), up to the error of the
    quadrature: `provenance["details"]` holds the gap per layer, with F(A), F(B) and the steps taken.

    Where a norm follows attention directly (Gemma 2 and 3, OLMo 2), F does not see the scale of the
    pattern except next to α = 0: the entries still rank, but their sum says nothing, and a note tells so.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]); by default the
            probability of what the model predicts last, as in the paper.
        n_steps: points of the quadrature.
        method: "gauss_legendre", "riemann_left" (the paper's code, with 20 steps), "riemann_right" (the
            paper's formula), "riemann_middle" or "trapezoid".
        baseline: B: "zero" (the paper), "uniform" (even over the keys that a query could see), a tensor
            [layer, head, query, key] for a single prompt, or a function (pattern, layer) -> B.
        per_head: keep the heads apart.
        internal_batch_size: most rows (prompts x points) in one pass; None: what `max_memory` allows.
        tolerance: largest accepted |gap|, in the target's unit; the number of steps is doubled until it is
            met or `max_steps` is reached, and a note says where it was not. None: no check.
        max_steps: see `tolerance`.

    Raises:
        TypeError, ValueError: an unknown option; a target or baseline that does not fit.
        RuntimeError: inside torch.inference_mode.
    """

    name: ClassVar[str] = "attention_attribution"
    residual: ClassVar[float] = 0.5
    engines: ClassVar[tuple[str, ...]] = ("hooks",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = """@inproceedings{hao-etal-2021-self,
  title = {Self-Attention Attribution: Interpreting Information Interactions Inside Transformer},
  author = {Hao, Yaru and Dong, Li and Wei, Furu and Xu, Ke},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  volume = {35},
  number = {14},
  pages = {12963--12971},
  year = {2021},
}"""

    target: TargetLike = dataclasses.field(default_factory=predicted)
    n_steps: int = 8
    method: str = "gauss_legendre"
    baseline: Any = "zero"
    per_head: bool = False
    internal_batch_size: int | None = None
    tolerance: float | None = None
    max_steps: int = 256

    def __post_init__(self) -> None:
        as_target(self.target)
        quadrature(self.method, self.n_steps)
        if isinstance(self.baseline, str) and self.baseline not in ("zero", "uniform"):
            raise ValueError(
                f"baseline: expected 'zero', 'uniform', a tensor or a function, got {self.baseline!r}"
            )
        if not (isinstance(self.baseline, (str, Tensor)) or callable(self.baseline)):
            got = type(self.baseline).__name__
            raise TypeError(f"baseline: expected 'zero', 'uniform', a tensor or a function, got {got}")
        if self.internal_batch_size is not None and not self.internal_batch_size >= 1:
            raise ValueError(
                f"internal_batch_size: expected None or 1 and more, got {self.internal_batch_size}"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance: expected None or a number above 0, got {self.tolerance}")
        if self.max_steps < self.n_steps:
            raise ValueError(f"max_steps: expected n_steps={self.n_steps} or more, got {self.max_steps}")

    def parameters(self) -> dict[str, object]:
        baseline = self.baseline
        if isinstance(baseline, Tensor):
            baseline = f"a tensor of shape {list(baseline.shape)}"
        elif callable(baseline):
            baseline = getattr(baseline, "__qualname__", type(baseline).__name__)
        given = {
            "target": describe(as_target(self.target)),
            "baseline": baseline,
            "method": rule_name(self.method),
        }
        return {**super().parameters(), **given}

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        return self.of_stack([block])[:, 0]

    def of_stack(self, blocks: Sequence[Block]) -> Float[Tensor, "batch layer *head query key"]:
        bound = target_passes.bind(blocks[-1], self.target)
        maps = [self._layer(block, bound) for block in blocks]
        return torch.stack(maps, dim=1)

    def _layer(self, block: Block, bound: BoundTarget) -> Float[Tensor, "batch *head query key"]:
        pattern = block.recorded("pattern")
        baseline = self._baseline_of(block, pattern)
        path = _Path(block, bound, pattern, baseline, self.internal_batch_size)
        everything = torch.arange(len(pattern), device=pattern.device)
        integral = _Integral.empty(path)
        todo, steps = everything, self.n_steps
        while True:
            integral.update(path, todo, *quadrature(self.method, steps))
            gaps = integral.sums() - (bound.clean.double() - integral.at_baseline.double())
            if self.tolerance is None:
                break
            todo = (gaps.abs() > self.tolerance).nonzero()[:, 0]
            if len(todo) == 0 or 2 * steps > self.max_steps:
                break
            steps *= 2
        self._tell(block, bound, integral, gaps)
        return integral.scores if self.per_head else integral.scores.sum(dim=1)

    def _baseline_of(self, block: Block, pattern: Tensor) -> Float[Tensor, "batch head query key"]:
        if isinstance(self.baseline, str):
            if self.baseline == "zero":
                return torch.zeros_like(pattern)
            seen = block.seen[:, None].to(pattern.dtype).expand_as(pattern)
            return seen / seen.sum(-1, keepdim=True).clamp_min(1)
        if isinstance(self.baseline, Tensor):
            given = self._baseline_tensor(block, pattern)
        else:
            given = self.baseline(pattern, block.layer)
        if not torch.is_tensor(given) or given.shape != pattern.shape:
            got = list(given.shape) if torch.is_tensor(given) else type(given).__name__
            raise ValueError(
                f"baseline: expected shape {list(pattern.shape)} in layer {block.layer}, got {got}"
            )
        given = given.detach().to(pattern)
        hidden = ~block.seen[:, None] & block.real[:, None, :, None]
        if bool((given.masked_select(hidden.expand_as(given)) != 0).any()):
            raise ValueError(
                f"baseline: expected 0 where a query gives no weight to a key (layer {block.layer}), "
                "got weight there: the attention mask would be broken"
            )
        return given

    def _baseline_tensor(self, block: Block, pattern: Tensor) -> Tensor:
        if self.baseline.ndim != 4 or len(self.baseline) <= block.layer:
            raise ValueError(
                "baseline: expected a tensor [layer, head, query, key], "
                f"got shape {list(self.baseline.shape)} in layer {block.layer}"
            )
        if len(pattern) != 1:
            raise ValueError(
                f"baseline: a tensor is for one prompt, got a batch of {len(pattern)}; give a function "
                "(pattern, layer) -> baseline"
            )
        return self.baseline[block.layer][None]

    def _tell(self, block: Block, bound: BoundTarget, integral: _Integral, gaps: Tensor) -> None:
        for index in range(len(gaps)):
            whole, gap = bound.clean[index].item(), gaps[index].item()
            base = integral.at_baseline[index].item()
            block.detail(index, "completeness_gap", gap)
            block.detail(index, "target_value", whole)
            block.detail(index, "baseline_value", base)
            block.detail(index, "steps", integral.steps[index])
            kept = integral.kept(index)
            block.detail(index, "visible_share", kept)
            text = self._warning(whole - base, gap, integral.steps[index], kept)
            if text:
                block.warn(index, text)

    def _warning(self, difference: float, gap: float, steps: int, kept: float) -> str:
        unmet = self.tolerance is not None and abs(gap) > self.tolerance
        large = abs(gap) > _LARGE_GAP * abs(difference) and abs(gap) > 1e-6
        size = f"completeness gap {gap:.2g} with {steps} points, where F(A) - F(baseline) is {difference:.2g}"
        if kept < _INVISIBLE:
            return (
                "completeness is degenerate: along most of the path the target does not see the scale of "
                f"this pattern (a norm follows attention), the signed terms cancel to {kept:.1e} of their "
                f"absolute sum; {size}"
            )
        if unmet:
            return f"tolerance {self.tolerance:.2g} was not met: {size} (max_steps={self.max_steps})"
        return f"{size}: raise n_steps or set tolerance" if large else ""


class _Path:
    """The straight line from the baseline to the pattern of one block, and F and its gradient along it."""

    def __init__(
        self, block: Block, bound: BoundTarget, pattern: Tensor, baseline: Tensor, most: int | None
    ) -> None:
        self.block, self.bound, self.pattern, self.baseline = block, bound, pattern, baseline
        self.difference = pattern - baseline
        self.most = most

    def gradients(
        self,
        points: Float[Tensor, " point"],
        weights: Float[Tensor, " point"],
        prompts: Int[Tensor, " prompt"],
    ) -> tuple[
        Float[Tensor, "batch head query key"], Float[Tensor, "prompt point"], Float[Tensor, "prompt point"]
    ]:
        """Over the points: the weighted sum of gradients, F, and the share of Σ|A g| that its sign leaves."""
        total = self.block.zeros(*self.pattern.shape)
        values, shares = [], []
        for rows, alphas, scale in self._chunks(prompts, points, weights):
            leaf = self._at(rows, alphas).requires_grad_(True)
            value = self._value(leaf, rows)
            gradient = target_passes.gradients_of(value, [leaf])[0].to(total.dtype)
            values.append(value.detach())
            shares.append(_share((gradient * self.difference[rows]).flatten(1)))
            # a point without weight may have no gradient at all (a norm of zero)
            counts = scale.to(total.device) != 0
            scaled = gradient[counts] * scale.to(total)[counts, None, None, None]
            total.index_add_(0, rows[counts], scaled)
        shape = (len(prompts), len(points))
        return total, torch.cat(values).reshape(shape), torch.cat(shares).reshape(shape)

    def _value(self, pattern: Tensor, rows: Tensor) -> Float[Tensor, " row"]:
        hook = replace_pattern(self.block.layer, pattern, attention=self.block.attention_template)
        with must_fire(hook) as hooks:
            return target_passes.values(self.block, self.bound, hooks, rows, gradients=True)

    def _at(self, rows: Tensor, alphas: Tensor) -> Float[Tensor, "row head query key"]:
        scale = alphas.to(self.pattern)[:, None, None, None]
        return (self.baseline[rows] + scale * self.difference[rows]).detach()

    def _chunks(
        self, prompts: Tensor, points: Tensor, weights: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows (prompt by prompt), their points and weights, as many at a time as memory allows."""
        rows = prompts.repeat_interleave(len(points))
        step = self.block.gradient_rows(len(rows), logits=self.bound.reads_logits)
        step = step if self.most is None else min(step, self.most)
        each = (rows, points.repeat(len(prompts)), weights.repeat(len(prompts)))
        return zip(*(tensor.split(step) for tensor in each), strict=True)


@dataclasses.dataclass
class _Integral:
    """What has been integrated so far, per prompt."""

    scores: Float[Tensor, "batch head query key"]
    at_baseline: Float[Tensor, " batch"]
    steps: list[int]
    shares: list[Float[Tensor, " point"]]

    @classmethod
    def empty(cls, path: _Path) -> _Integral:
        batch = len(path.pattern)
        zeros = path.block.zeros
        return cls(zeros(*path.pattern.shape), zeros(batch), [0] * batch, [torch.zeros(0)] * batch)

    def update(self, path: _Path, prompts: Tensor, points: Tensor, weights: Tensor) -> None:
        """Integrate again for some prompts, with these points; the baseline goes along in the same batch."""
        first = 0 if points[0] == 0 or self.steps[int(prompts[0])] else 1
        zero = torch.zeros(first, dtype=points.dtype)
        total, values, shares = path.gradients(torch.cat([zero, points]), torch.cat([zero, weights]), prompts)
        for place, prompt in enumerate(prompts.tolist()):
            self.scores[prompt] = total[prompt] * path.difference[prompt]
            self.shares[prompt] = shares[place, first:]
            if not self.steps[prompt]:
                self.at_baseline[prompt] = values[place, 0]
            self.steps[prompt] = len(points)

    def sums(self) -> Float[Tensor, " batch"]:
        return self.scores.double().flatten(1).sum(-1)

    def kept(self, index: int) -> float:
        """The share of Σ|A g| that the signed sum keeps, at the median of the points."""
        return self.shares[index].median().item()


def _share(terms: Float[Tensor, "row entry"]) -> Float[Tensor, " row"]:
    absolute = terms.abs().sum(-1)
    return torch.where(
        absolute > 0,
        terms.sum(-1).abs() / absolute.clamp_min(torch.finfo(terms.dtype).tiny),
        torch.ones_like(absolute),
    )
