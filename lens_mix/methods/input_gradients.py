"""Gradients by the input embeddings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.quadrature import quadrature, rule_name
from lens_mix.arguments import one_of, whole_number
from lens_mix.lens.effort import GRADIENT_PASS, Passes
from lens_mix.method import Method
from lens_mix.methods import baselines
from lens_mix.methods.row_targets import RowTargetMethod, RowTargets, bind_rows, row_passes
from lens_mix.targets import TargetLike, predicted

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Score = Literal["norm", "times_input", "integrated"]


@dataclasses.dataclass(frozen=True)
class InputGradients(RowTargetMethod):
    """Gradients of a target by the embeddings x (Simonyan et al., 2014; Sundararajan et al., ICML 2017).

    F is the target at the position of the row; x is the residual stream that enters the first block: the
    embeddings, with position embeddings and an embedding norm where the model has them. Per token j:

    - "norm": ‖∂F/∂x_j‖₂ (Li et al., NAACL 2016), 0 or more;
    - "times_input": ∂F/∂x_j · x_j, signed, in the target's unit;
    - "integrated": (x_j − x'_j) · ∫₀¹ ∂F(x' + α (x − x'))/∂x_j dα (Sundararajan et al., eq. 1) from the
      baseline x', signed; a row sums to F(x) − F(x') but for the quadrature's error, which
      `provenance["details"]["convergence_delta"]` holds per row (captum's name), as Σ − (F(x) − F(x')). A
      note tells where it is more than 10 % of that difference.

    The baseline 0 is degenerate behind a norm: αx normed is x normed, for all α but the smallest, so that F
    jumps next to α = 0, where no rule has points enough, and the gradient along the rest of the path is 0 or
    nearly. On pre-norm models (LayerNorm or RMSNorm, without position embeddings above all) take "mean".

    One map [1, query, key], a backward pass per row (times `n_steps` for "integrated"): ask for the rows that
    you need (`queries=[-1]`). A causal model's row ends at its own position.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]), read at the row's
            position instead of its own; by default the logit of what the model predicts there. A target that
            names no position needs a single row.
        score: which of the three.
        baseline: x' of "integrated": "zero"; "mean" over the prompt's own positions of x (later ones too: a
            row of a causal model then depends on them); a tensor [d_model], or [pos, d_model] for prompts
            of so many tokens.
        n_steps: points of the path; "integrated" only.
        method: how they are placed (as `AttentionAttribution`); "integrated" only.
        internal_batch_size: most rows in one pass; None: what `max_memory` allows.

    Raises:
        TypeError, ValueError: an unknown option; a target that does not fit. RuntimeError: inside
            torch.inference_mode.
    """

    name: ClassVar[str] = "input_gradients"
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    parts: ClassVar[frozenset[str]] = Method.parts | {"joint"}
    citation: ClassVar[str] = "sundararajan-etal-2017-axiomatic"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="logit"))
    score: Score = "norm"
    baseline: Any = "zero"
    n_steps: int = 32
    method: str = "gauss_legendre"
    internal_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("score", self.score, ("norm", "times_input", "integrated"))
        baselines.check_input_baseline(self.baseline)
        quadrature(self.method, self.n_steps)
        if self.internal_batch_size is not None:
            whole_number("internal_batch_size", self.internal_batch_size, 1)

    def parameters(self) -> dict[str, object]:
        readable = {"baseline": baselines.describe_baseline(self.baseline), "method": rule_name(self.method)}
        return {**super().parameters(), **readable}

    def passes(self, blocks: Sequence[Block]) -> Passes:
        if self.score != "integrated":
            return row_passes(blocks, GRADIENT_PASS, "a backward pass for each row")
        reason, cheaper = f"{self.n_steps} backward passes for each row", "a smaller n_steps takes fewer"
        return row_passes(blocks, self.n_steps * GRADIENT_PASS, reason, cheaper)

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        bound, last = bind_rows(blocks, self.target), blocks[-1]
        chunks = [self._scores(bound, rows) for rows in bound.chunks(self.internal_batch_size)]
        scores, start = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if self.score == "integrated":
            baselines.note_convergence(bound, scores, start, self.n_steps, last)
        return [bound.scattered(scores, last)]

    def _scores(
        self, bound: RowTargets, rows: Tensor
    ) -> tuple[Float[Tensor, "row key"], Float[Tensor, " row"]]:
        """The scores of some rows, and F at the baseline."""
        prompts, gradient = bound.prompts[rows], functools.partial(bound.gradients, rows)
        x = bound.first.inputs[prompts]
        if self.score == "integrated":
            points, weights = quadrature(self.method, self.n_steps)
            baseline = baselines.input_baseline(self.baseline, x, bound.first.real_inputs[prompts])
            start = bound.values(rows, resid_pre=baseline)
            return integrated_gradients(gradient, x, baseline, points, weights), start
        score = gradient_norm if self.score == "norm" else gradient_times_input
        return score(gradient, x), bound.clean[rows]


Gradient = Callable[[Float[Tensor, "row pos d_model"]], Float[Tensor, "row pos d_model"]]


def gradient_norm(gradient: Gradient, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos"]:
    """‖∂F/∂x_j‖₂ for every position j."""
    return _wide(gradient(x)).norm(dim=-1)


def gradient_times_input(gradient: Gradient, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos"]:
    """∂F/∂x_j · x_j for every position j."""
    return einsum(_wide(gradient(x)), _wide(x), "row pos d_model, row pos d_model -> row pos")


def integrated_gradients(
    gradient: Gradient,
    x: Float[Tensor, "row pos d_model"],
    baseline: Float[Tensor, "row pos d_model"],
    points: Float[Tensor, " point"],
    weights: Float[Tensor, " point"],
) -> Float[Tensor, "row pos"]:
    """Equation 1 by a rule of quadrature: (x_j − x'_j) · Σ_k w_k ∂F(x' + α_k (x − x'))/∂x_j."""
    total = torch.zeros_like(_wide(x))
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        total += weight * _wide(gradient(baseline + point * (x - baseline)))
    return reduce((_wide(x) - _wide(baseline)) * total, "row pos d_model -> row pos", "sum")


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: sums over d_model of bfloat16 lose too much."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
