"""Attention weighted by its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, add_to_pattern, must_fire
from lens_mix.method import Method
from lens_mix.methods import target_passes
from lens_mix.methods.target_passes import BoundTarget, TargetMethod
from lens_mix.targets import TargetLike, predicted

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class GradientAttention(TargetMethod):
    """Attention weighted by its gradient (Chefer et al., ICCV 2021, eq. 5): mean_h (∂F/∂A_h ⊙ A_h)⁺.

    F is the target; the gradient is total, through all layers above. One forward and one backward pass
    serve all layers. Shape [layer, query, key], or [layer, head, query, key] with `per_head`; 0 or more, in
    the target's unit, rows don't sum to 1. `lm.gradient_rollout` chains the maps to the paper's relevance R,
    or to a rollout of attention adjusted by gradients.

    Args:
        target: what is explained (`lens_mix.targets`, or any callable logits -> [copy]); by default the logit
            of what the model predicts last, as in the paper's code.
        per_head: keep the heads apart.
        rectify: keep only what speaks for the target, (...)⁺; False: signed.

    Raises:
        TypeError, ValueError: a target that does not fit. RuntimeError: inside torch.inference_mode.
    """

    name: ClassVar[str] = "gradient_attention"
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "chefer-etal-2021-generic"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="logit"))
    per_head: bool = False
    rectify: bool = True

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        return self.of_stack([block])[0]

    def of_stack(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        bound = target_passes.bind(blocks[-1], self.target)
        lowest = min(blocks, key=lambda block: block.layer)
        rows = torch.arange(len(lowest.batch), device=lowest.resid_pre.device)
        chunks = rows.split(lowest.gradient_rows(len(rows), logits=bound.reads_logits))
        gradients = torch.cat([self._gradients(blocks, lowest, bound, chunk) for chunk in chunks])
        maps = []
        for place, block in enumerate(blocks):
            for prompt, value in enumerate(bound.clean.tolist()):
                block.detail(prompt, "target_value", value)
            scores = gradients[:, place] * block.recorded("pattern").to(gradients.dtype)
            scores = scores.clamp_min(0) if self.rectify else scores
            maps.append(scores if self.per_head else scores.mean(dim=1))
        return maps

    def interventions(
        self, layer: int, addition: Float[Tensor, "row head query key"], *, attention: str = DEFAULT_ATTENTION
    ) -> list[HookPair]:
        """The hooks that make a pass differentiable by one layer's pattern: a leaf of zeros is added to it.

        The patterns above still depend on what lies below: the derivative by the leaf is total. On your run:

            leaf = torch.zeros(batch, head, query, key, requires_grad=True)
            logits = model.run_with_hooks(tokens, fwd_hooks=method.interventions(layer, leaf))
            (gradient,) = torch.autograd.grad(target(logits).sum(), leaf)

        Args as in `lens_mix.hooks.add_to_pattern`.
        """
        return [add_to_pattern(layer, addition, attention=attention)]

    def _gradients(
        self, blocks: Sequence[Block], lowest: Block, bound: BoundTarget, rows: Tensor
    ) -> Float[Tensor, "row layer head query key"]:
        """The total derivative of the target by each block's asked rows, of all in one backward pass."""
        leaves = [torch.zeros_like(block.recorded("pattern")[rows]).requires_grad_(True) for block in blocks]
        additions = [_among_all(block, leaf, rows) for block, leaf in zip(blocks, leaves, strict=True)]
        pairs = [
            pair
            for block, addition in zip(blocks, additions, strict=True)
            for pair in self.interventions(block.layer, addition, attention=block.attention_template)
        ]
        with must_fire(*pairs) as hooks:
            value = target_passes.values(lowest, bound, hooks, rows, gradients=True)
        gradients = target_passes.gradients_of(value, leaves)
        return torch.stack(gradients, dim=1).to(torch.promote_types(gradients[0].dtype, torch.float32))


def _among_all(block: Block, leaf: Float[Tensor, "row head query key"], rows: Tensor) -> Tensor:
    """A leaf of the asked rows as an addition to the whole pattern: 0 in all other rows."""
    if block.every_query:
        return leaf
    index = block.queries[rows][:, None, :, None].expand_as(leaf)
    with torch.enable_grad():
        return leaf.new_zeros(*leaf.shape[:2], block.real.shape[1], leaf.shape[3]).scatter(2, index, leaf)


def weighted_by_gradient(
    target: Callable[[Float[Tensor, "batch head query key"]], Float[Tensor, " batch"]],
    pattern: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch query key"]:
    """Equation 5 as it stands, for one layer: mean_h (∂F/∂A_h ⊙ A_h)⁺; slow, the oracle of the method."""
    leaf = pattern.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(target(leaf).sum(), leaf)
    return reduce((gradient * pattern).clamp_min(0), "batch head query key -> batch query key", "mean")
