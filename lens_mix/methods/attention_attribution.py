"""Compute self-attention attribution: integrated gradients with respect to attention patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.quadrature import NestedRules, nested_rules, one_rule, rule_name
from lens_mix._blocks.cost import Cost, Growth
from lens_mix.arguments import check_number, check_whole_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, replace_pattern
from lens_mix.method import Method
from lens_mix.methods.baselines import check_baseline, describe_baseline, make_pattern_baseline
from lens_mix.methods.bound_target import BoundTarget, TargetMethod, bind
from lens_mix.methods.path_integral import Integral, Path

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class AttentionAttribution(TargetMethod):
    """Compute self-attention attribution (Hao et al., AAAI 2021, eq. 3-4).

        score[l] = Σ_h Attr_h(A)
        Attr_h(A) = (A_h - B_h) ⊙ ∫₀¹ ∂F(B + α (A - B)) / ∂A_h dα

    A is the pattern of layer l, B the baseline and F the target. All heads of the layer move together from B
    to A, and the layers above run again.

    Shape [layer, query, key], or Attr_h in [layer, head, query, key] with `per_head`. Scores are signed, in
    the target's unit. Except for the error of the quadrature, the scores of a layer sum to
    F(A) - F(B) (completeness).

    Each layer uses as many points as it needs: 3, then 7, 15 and 31 (Patterson's rules, each of which
    includes the points of the one before). It stops when the estimated error is at most the tolerance. With
    ReLU or experts the gradient jumps along the path, the error falls slowly, and many layers do not reach
    the tolerance. A note names these layers.

    `provenance["details"]` has for each layer: completeness_gap, target_value F(A), baseline_value F(B),
    steps, estimated_error and visible_share.

    If a norm directly follows attention (Gemma 2 and 3, OLMo 2), F depends on the scale of the pattern only
    near α = 0. The scores then still rank keys, but their sum has no meaning, and a note says so.

        >>> method = lm.methods.AttentionAttribution(target=" Paris")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        target: The number that is explained: the text of a token, one of `lens_mix.targets`, or any callable
            logits -> [copy]. The default is the probability of the prediction at the last position, as in the
            paper.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        n_steps: The number of points in every layer. None: as many as each layer needs.
        method: The rule that places `n_steps` points: "gauss_legendre", "riemann_left" (the paper's code,
            with 20 points), "riemann_right" (the paper's formula), "riemann_middle" or "trapezoid".
        baseline: B: "zero" (as in the paper), "uniform" (equal weights on the keys that a query can see), a
            tensor [layer, head, query, key] for a single prompt, or a function (pattern, layer) -> B.
        per_head: Whether each head has a map of its own.
        internal_batch_size: The largest number of points of all prompts in one pass. None: as many as
            `max_memory` allows.
        tolerance: The largest accepted error, in the target's unit. None: 1 % of the sum of the layer's
            absolute scores, and for a probability at most 0.01. With `n_steps` it only decides when a note is
            written: if the gap is above it or, for None, above 10 % of F(A) - F(B).
        max_steps: The largest number of points in a layer, at least 3. The largest rule has 63. The last rule
            adds half of all points, and is used only if it is expected to reach the tolerance.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is unknown, or the target or the baseline does not fit the prompt.
        RuntimeError: Inference mode (`torch.inference_mode`) is on.
    """

    name: ClassVar[str] = "attention_attribution"
    description: ClassVar[str] = "how much of the answer's score each attention weight accounts for"
    place_in_list: ClassVar[int] = 3
    has_tree: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    cost_grows_with: ClassVar[Growth] = "layers"
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
                f"method: {name!r} needs n_steps, got n_steps=None (as many points as each layer needs)"
            )
        check_whole_number("max_steps", self.max_steps, 3)
        # The rules check the number of their points, so a wrong one raises its error here and not in a run.
        self._choose_rules()
        check_baseline(self.baseline)
        if size is not None:
            check_whole_number("internal_batch_size", size, 1)
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, 0, above=True)

    @override
    def parameters(self) -> dict[str, object]:
        readable = {"baseline": describe_baseline(self.baseline), "method": rule_name(self.method)}
        return {**super().parameters(), **readable}

    @override
    def scale_cost(self, cost: Cost, blocks: Sequence[Block]) -> Cost:
        # Without `n_steps`, most layers need the first two of the nested rules.
        least = nested_rules(self.max_steps).counts[1] + 1
        return cost if self.n_steps is None else cost.times(self.n_steps / least)

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        bound = bind(blocks, self.target)
        layers = blocks[-1].with_bar(blocks, len(blocks), "layers")
        return [self._attribute_layer(block, bound) for block in layers]

    def interventions(
        self, layer: int, pattern: Float[Tensor, "row head query key"], *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """Return the hooks that replace the pattern of one layer by a point of the path.

        They make F a function of this pattern, which is what is integrated. A leaf gets its gradient. In
        your own run:

            pattern = baseline + alpha * (clean_pattern - baseline)
            logits = model.run_with_hooks(tokens, fwd_hooks=method.interventions(layer, pattern))

        Args:
            layer: The number of the block.
            pattern: The pattern that replaces the layer's own.
            attention: The name of the attention module, with `{layer}`.
        """
        return [replace_pattern(layer, pattern, attention=attention)]

    def _choose_rules(self) -> NestedRules:
        return nested_rules(self.max_steps) if self.n_steps is None else one_rule(self.method, self.n_steps)

    def _attribute_layer(self, block: Block, bound: BoundTarget) -> Float[Tensor, "batch *head query key"]:
        # The points of the path move the pattern of all rows, and the error is a sum over all rows.
        whole = block.with_every_query()
        pattern = whole.recorded("pattern")
        baseline = make_pattern_baseline(self.baseline, whole, pattern)
        path = Path(whole, bound, pattern, baseline, self.interventions, self.internal_batch_size)
        integral = Integral(path, self._choose_rules(), is_smooth=block.verification.is_smooth)
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
    """Return (A - B) ⊙ Σ_k w_k ∂F(B + α_k (A - B)) / ∂A: equation 4, computed point by point.

    This is slow. Tests compare the method with it.

    Args:
        target: F, as a function of the pattern of one layer.
        pattern: A.
        baseline: B.
        points: α_k, the points of a quadrature rule over 0..1.
        weights: w_k, the weights of the points.
    """
    total = torch.zeros_like(pattern)
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        leaf = (baseline + point * (pattern - baseline)).detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(target(leaf).sum(), leaf)
        total += weight * gradient
    return (pattern - baseline) * total
