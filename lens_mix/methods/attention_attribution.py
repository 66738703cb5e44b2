"""Self-attention attribution: integrated gradients on attention patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.quadrature import NestedRules, nested_rules, one_rule, rule_name
from lens_mix.arguments import number, whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, replace_pattern
from lens_mix.lens.effort import GRADIENT_PASS, Passes
from lens_mix.method import Method
from lens_mix.methods import target_passes
from lens_mix.methods.baselines import baseline_of, check_baseline, describe_baseline
from lens_mix.methods.path_integral import Integral, Path
from lens_mix.methods.target_passes import BoundTarget, TargetMethod

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AttentionAttribution(TargetMethod):
    """Self-attention attribution (Hao et al., AAAI 2021, eq. 3-4).

    Attr_h(A) = (A_h - B_h) ⊙ ∫₀¹ ∂F(B + α (A - B)) / ∂A_h dα, for one layer's pattern A at a time: all heads
    of the layer move together from the baseline B, and the layers above run again. F is the target. Shape
    [layer, query, key], the sum over heads, or [layer, head, query, key] with `per_head`; signed, in the
    target's unit. The entries of a layer sum to F(A) - F(B) (completeness), but for the quadrature's error.

    Each layer takes as many points as it needs: 3, then 7, 15 and 31 (Patterson's rules, each with the points
    of the one before), until the estimated error (`path_integral.Integral.error`) is accepted. With ReLU or
    experts the gradient jumps along the path and the error falls slowly, so that it is not accepted in many
    layers (measurements: docs/attribution.md). A note names the layers where it was not, and
    `provenance["details"]` holds per layer completeness_gap, target_value F(A), baseline_value F(B), steps,
    estimated_error and visible_share.

    Where a norm follows attention directly (Gemma 2 and 3, OLMo 2), F sees the scale of the pattern only next
    to α = 0: the entries still rank, but their sum says nothing, and a note tells so.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]); by default the
            probability of what the model predicts last, as in the paper.
        n_steps: exactly so many points, in every layer; None: as many as each layer needs.
        method: how `n_steps` points are placed: "gauss_legendre", "riemann_left" (the paper's code, with 20
            steps), "riemann_right" (the paper's formula), "riemann_middle" or "trapezoid".
        baseline: B: "zero" (the paper), "uniform" (even over the keys that a query could see), a tensor
            [layer, head, query, key] for a single prompt, or a function (pattern, layer) -> B.
        per_head: keep the heads apart.
        internal_batch_size: most rows (prompts x points) in one pass; None: what `max_memory` allows.
        tolerance: largest accepted error, in the target's unit. None: 1 % of the sum of the layer's absolute
            scores, for a probability at most 0.01. With `n_steps` it only decides what is noted: a gap above
            it, or with None a gap above 10 % of F(A) - F(B).
        max_steps: most points that a layer may take, 3 or more; rules end at 63. The last rule, half of all
            points, is only taken where it promises to do.

    Raises:
        TypeError, ValueError: an unknown option; a target or baseline that does not fit.
        RuntimeError: inside torch.inference_mode.
    """

    name: ClassVar[str] = "attention_attribution"
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "hao-etal-2021-self"

    n_steps: int | None = None
    method: str = "gauss_legendre"
    baseline: Any = "zero"
    per_head: bool = False
    internal_batch_size: int | None = None
    tolerance: float | None = None
    max_steps: int = 31

    def __post_init__(self) -> None:
        super().__post_init__()
        name, size = rule_name(self.method), self.internal_batch_size
        if self.n_steps is None and name != "gauss_legendre":
            raise ValueError(
                f"method: {name!r} needs n_steps, got n_steps=None (as many as each layer needs)"
            )
        whole_number("max_steps", self.max_steps, 3)
        self._rules()
        check_baseline(self.baseline)
        if size is not None:
            whole_number("internal_batch_size", size, 1)
        if self.tolerance is not None:
            number("tolerance", self.tolerance, 0, above=True)

    def parameters(self) -> dict[str, object]:
        readable = {"baseline": describe_baseline(self.baseline), "method": rule_name(self.method)}
        return {**super().parameters(), **readable}

    def passes(self, blocks: Sequence[Block]) -> Passes:
        steps = self.n_steps or nested_rules(self.max_steps).counts[1] + 1
        # A layer's points run the blocks from there on.
        above = sum(block.n_layers - block.layer for block in blocks) / blocks[-1].n_layers
        counts = [steps * GRADIENT_PASS * above] * len(blocks[-1].batch)
        reason = f"{steps} {'points' if self.n_steps else 'or more points'} for each layer"
        return Passes(counts, reason, "fewer layers (layers=[...]) or a smaller n_steps take fewer")

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        return self.of_stack([block])[0]

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        bound = target_passes.bind(blocks[-1], self.target)
        layers = blocks[-1].with_bar(blocks, len(blocks), "layers")
        return [self._layer(block, bound) for block in layers]

    def interventions(
        self, layer: int, pattern: Float[Tensor, "row head query key"], *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """The hooks that put a point of the path into a pass: one layer's pattern is replaced.

        F, as a function of this pattern (a leaf gets its gradient), is what is integrated. On your run:

            pattern = baseline + alpha * (clean_pattern - baseline)
            logits = model.run_with_hooks(tokens, fwd_hooks=method.interventions(layer, pattern))

        Args as in `lens_mix.hooks.replace_pattern`.
        """
        return [replace_pattern(layer, pattern, attention=attention)]

    def _rules(self) -> NestedRules:
        return nested_rules(self.max_steps) if self.n_steps is None else one_rule(self.method, self.n_steps)

    def _layer(self, block: Block, bound: BoundTarget) -> Float[Tensor, "batch *head query key"]:
        # The points of the path move the whole pattern, and its error counts all rows.
        whole = block.with_every_query()
        pattern = whole.recorded("pattern")
        baseline = baseline_of(self.baseline, whole, pattern)
        path = Path(whole, bound, pattern, baseline, self.interventions, self.internal_batch_size)
        integral = Integral(path, self._rules(), is_smooth=block.is_smooth)
        integral.refine(self.tolerance)
        for prompt in range(len(pattern)):
            integral.report(prompt, self.tolerance, self.max_steps if self.n_steps is None else None)
        scores = torch.stack([integral.scores(prompt) for prompt in range(len(pattern))])
        return block.rows_of(scores if self.per_head else scores.sum(dim=1), axis=-2)


def integrated_gradients(
    target: Callable[[Float[Tensor, "batch head query key"]], Float[Tensor, " batch"]],
    pattern: Float[Tensor, "batch head query key"],
    baseline: Float[Tensor, "batch head query key"],
    points: Float[Tensor, " point"],
    weights: Float[Tensor, " point"],
) -> Float[Tensor, "batch head query key"]:
    """Equation 4 as it stands: (A - B) ⊙ Σ_k w_k ∂F(B + α_k (A - B)) / ∂A; slow, the oracle of the method.

    F is the target as a function of one layer's pattern A, B the baseline; the points α_k and weights w_k are
    those of a rule of quadrature over 0..1.
    """
    total = torch.zeros_like(pattern)
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        leaf = (baseline + point * (pattern - baseline)).detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(target(leaf).sum(), leaf)
        total += weight * gradient
    return (pattern - baseline) * total
