"""Compute gradients with respect to the input embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.quadrature import quadrature, rule_name
from lens_mix._blocks.cost import Cost, Growth
from lens_mix._passes.backward_rules import PlainRules
from lens_mix.arguments import check_choice, check_whole_number
from lens_mix.method import Method
from lens_mix.methods import baselines
from lens_mix.methods.bound_target import BoundRows, RowTargetMethod, bind_rows
from lens_mix.methods.row_gradients import Streams, score_rows
from lens_mix.targets import TargetLike, predicted

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._model.anatomy import BlockAnatomy

Score = Literal["norm", "times_input", "integrated"]


@dataclasses.dataclass(frozen=True)
class InputGradients(RowTargetMethod):
    """Compute gradients with respect to the embeddings.

    Papers: Simonyan et al., 2014; Sundararajan et al., ICML 2017.

        score[query, j] = ‖∂F/∂x_j‖₂                                        "norm"
        score[query, j] = ∂F/∂x_j · x_j                                     "times_input"
        score[query, j] = (x_j − x'_j) · ∫₀¹ ∂F(x' + α (x − x'))/∂x_j dα    "integrated"

    F is the target at the position of the row. x is the residual stream that enters the first block: the
    embeddings, with position embeddings and an embedding norm if the model has them. `score` chooses the
    formula:

    - "norm" (Li et al., NAACL 2016) is at least 0.
    - "times_input" is signed, in the target's unit.
    - "integrated" (Sundararajan et al., eq. 1) is signed. x' is the baseline. Except for the error of the
      quadrature, a row sums to F(x) − F(x'). `provenance["details"]["convergence_delta"]` has Σ − (F(x) −
      F(x')) for each row (captum's name). A note says if it is more than 10 % of that difference.

    The baseline 0 is degenerate if a norm follows: for all but the smallest α, αx and x have the same norm
    output. F then changes only near α = 0, where no rule has enough points, and the gradient along the rest
    of the path is almost 0. On pre-norm models use "mean", especially on those without position embeddings.

    The result is one map [1, query, key]. Each row takes a backward pass, and "integrated" takes `n_steps` of
    them. Ask only for the rows that you need (`queries=[-1]`). In a causal model a row ends at its own
    position.

        >>> method = lm.methods.InputGradients(score="integrated", baseline="mean")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: The number that is explained: the text of a token, one of `lens_mix.targets`, or any callable
            logits -> [copy]. It is read at the row's position instead of its own. The default is the logit of
            the prediction there. A target without a position needs a single row.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        score: "norm", "times_input" or "integrated".
        baseline: x' of "integrated": "zero", "mean", a tensor [d_model], or a tensor [pos, d_model] for
            prompts of that many tokens. "mean" is over all positions of the prompt, so that a row of a causal
            model depends on later positions too.
        n_steps: The number of points of the path, for "integrated" only.
        method: The rule that places the points, for "integrated" only. See `AttentionAttribution`.
        internal_batch_size: The largest number of rows, or of their points, in one pass. None: as many as
            `max_memory` allows.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is unknown, or the target or the baseline does not fit the prompt.
        RuntimeError: Inference mode (`torch.inference_mode`) is on.
    """

    name: ClassVar[str] = "input_gradients"
    description: ClassVar[str] = "how sensitive the answer is to each token's embedding"
    place_in_list: ClassVar[int] = 4
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    parts: ClassVar[frozenset[str]] = Method.parts | {"joint"}
    reads_graph_alone: ClassVar[bool] = True
    cost_grows_with: ClassVar[Growth] = "rows"
    citation: ClassVar[str] = "sundararajan-etal-2017-axiomatic"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="logit"))
    score: Score = "norm"
    baseline: Any = "zero"
    n_steps: int = 32
    method: str = "gauss_legendre"
    internal_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("score", self.score, ("norm", "times_input", "integrated"))
        baselines.check_input_baseline(self.baseline)
        quadrature(self.method, self.n_steps)
        if self.internal_batch_size is not None:
            check_whole_number("internal_batch_size", self.internal_batch_size, 1)

    @override
    def parameters(self) -> dict[str, object]:
        readable = {"baseline": baselines.describe_baseline(self.baseline), "method": rule_name(self.method)}
        return {**super().parameters(), **readable}

    @override
    def scale_cost(self, cost: Cost, blocks: Sequence[Block]) -> Cost:
        if self.score != "integrated":
            return cost
        # Each point of a path is an input of its own, which needs a forward pass beside the backward pass.
        return cost._replace(per_row=self.n_steps * (1 + cost.per_row))

    @override
    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> PlainRules | None:
        # The points of a path are other inputs than those of the clean pass.
        return None if self.score == "integrated" else PlainRules()

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch query key"]]:
        bound, last = bind_rows(blocks, self.target), blocks[-1]
        rules = self.clean_rules([block.anatomy for block in blocks])
        if rules is not None and bound.block.clean.graph is not None:
            scores = score_rows(bound, rules, [0], self._score_stream, self.internal_batch_size)
            return [bound.scatter(scores, last)]
        chunks = [self._compute_scores(bound, rows) for rows in bound.chunks(self.internal_batch_size)]
        scores, start = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if self.score == "integrated":
            baselines.note_convergence(bound, scores, start, self.n_steps, last)
        return [bound.scatter(scores, last)]

    def _score_stream(self, streams: Streams) -> Float[Tensor, "row pos"]:
        """Return the scores of some rows from the embeddings, and the gradients with respect to them."""
        ((x, gradient),) = streams
        score = gradient_norm if self.score == "norm" else gradient_times_input
        return score(lambda _: gradient, x.expand_as(gradient))

    def _compute_scores(
        self, bound: BoundRows, rows: Tensor
    ) -> tuple[Float[Tensor, "row key"], Float[Tensor, " row"]]:
        """Return the scores of some rows, and F at the baseline."""
        prompts = bound.prompt_index[rows]
        x = bound.block.inputs[prompts]

        def gradient(at: Float[Tensor, "copy pos d_model"]) -> Float[Tensor, "copy pos d_model"]:
            return bound.gradients(rows.repeat_interleave(len(at) // len(rows)), at)

        if self.score == "integrated":
            points, weights = quadrature(self.method, self.n_steps)
            baseline = baselines.make_input_baseline(self.baseline, x, bound.block.real_inputs[prompts])
            # The scores of a row are compared with its change from this number
            # (`baselines.note_convergence`).
            start = bound.values(rows, resid_pre=baseline)
            fitting = bound.block.copies_with_gradients(len(rows) * len(points), logits=bound.reads_logits)
            fitting = min(fitting, self.internal_batch_size or fitting)
            at_once = max(1, fitting // len(rows))
            return integrated_gradients(gradient, x, baseline, points, weights, at_once), start
        score = gradient_norm if self.score == "norm" else gradient_times_input
        return score(gradient, x), bound.clean[rows]


Gradient = Callable[[Float[Tensor, "copy pos d_model"]], Float[Tensor, "copy pos d_model"]]


def gradient_norm(gradient: Gradient, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos"]:
    """Return ‖∂F/∂x_j‖₂ for every position j."""
    lengths: Tensor = _widen(gradient(x)).norm(dim=-1)
    return lengths


def gradient_times_input(gradient: Gradient, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos"]:
    """Return ∂F/∂x_j · x_j for every position j."""
    return einsum(_widen(gradient(x)), _widen(x), "row pos d_model, row pos d_model -> row pos")


def integrated_gradients(
    gradient: Gradient,
    x: Float[Tensor, "row pos d_model"],
    baseline: Float[Tensor, "row pos d_model"],
    points: Float[Tensor, " point"],
    weights: Float[Tensor, " point"],
    at_once: int = 1,
) -> Float[Tensor, "row pos"]:
    """Return (x_j − x'_j) · Σ_k w_k ∂F(x' + α_k (x − x'))/∂x_j: equation 1 by a quadrature rule.

    Args:
        gradient: The gradient of F, as a function of the embeddings. It gets `at_once` points of the first
            row, then those of the next row.
        x: The embeddings.
        baseline: x'.
        points: α_k, the points of the rule.
        weights: w_k, the weights of the points.
        at_once: The number of points of each row in one pass.
    """
    total = torch.zeros_like(_widen(x))
    for some, shares in zip(points.split(at_once), weights.split(at_once), strict=True):
        at = torch.stack([baseline + point * (x - baseline) for point in some.tolist()], dim=1)
        gradients = _widen(gradient(at.flatten(0, 1))).unflatten(0, at.shape[:2])
        axes = "row point pos d_model, point -> row pos d_model"
        total += einsum(gradients, shares.to(total), axes)
    return reduce((_widen(x) - _widen(baseline)) * total, "row pos d_model -> row pos", "sum")


def _widen(tensor: Tensor) -> Tensor:
    """Return the tensor in at least float32, because sums over d_model lose too many digits in bfloat16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
