"""Compute attention weighted by its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import einsum, reduce
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._passes.autograd_graph import Mixing
from lens_mix._passes.backward_rules import PlainRules
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, add_to_pattern, must_fire
from lens_mix.method import Method
from lens_mix.methods.bound_target import BoundTarget, TargetMethod, bind, gradients_of
from lens_mix.targets import TargetLike, predicted

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix._model.anatomy import BlockAnatomy


@dataclasses.dataclass(frozen=True)
class GradientAttention(TargetMethod):
    """Compute attention weighted by its gradient (Chefer et al., ICCV 2021, eq. 5).

        score[l] = mean_h (∂F/∂A_h ⊙ A_h)⁺

    A is the pattern of layer l, F the target, and ⁺ sets negative numbers to 0. The gradient is total: it
    passes through all layers above. One forward and one backward pass serve all layers.

    Shape [layer, query, key], or [layer, head, query, key] with `per_head`. Scores are at least 0, in the
    target's unit, and rows do not sum to 1. `lm.gradient_rollout` combines the maps into the paper's
    relevance R, or into a rollout of attention adjusted by gradients.

        >>> method = lm.methods.GradientAttention(target=" Paris")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        target: The number that is explained: the text of a token, one of `lens_mix.targets`, or any callable
            logits -> [copy]. The default is the logit of the prediction at the last position, as in the
            authors' code.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        per_head: Whether each head has a map of its own.
        rectify: Whether negative products are set to 0. False keeps the sign.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: The target does not fit the prompt.
        RuntimeError: Inference mode (`torch.inference_mode`) is on.
    """

    name: ClassVar[str] = "gradient_attention"
    description: ClassVar[str] = "attention weights times their gradient: what raises the answer's score"
    place_in_list: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    has_gradient_weights: ClassVar[bool] = True
    reads_graph_alone: ClassVar[bool] = True
    citation: ClassVar[str] = "chefer-etal-2021-generic"

    target: TargetLike = dataclasses.field(default_factory=lambda: predicted(of="logit"))
    per_head: bool = False
    rectify: bool = True

    @override
    def clean_rules(self, anatomies: Sequence[BlockAnatomy]) -> PlainRules:
        # The gradient is the model's own, for which the autograd graph of the clean pass can be used.
        return PlainRules()

    @override
    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "batch *head query key"]]:
        bound = bind(blocks, self.target)
        for block in blocks:
            for prompt, value in enumerate(bound.clean.tolist()):
                block.detail(prompt, "target_value", value)
        maps = self._read_graph(blocks, bound)
        if maps is not None:
            return maps
        chunks = [self._compute_gradients(blocks, bound, chunk) for chunk in bound.chunks()]
        by_layer = torch.cat(chunks).unbind(1)
        return [self._weigh(block, gradient) for block, gradient in zip(blocks, by_layer, strict=True)]

    def _weigh(
        self, block: Block, gradient: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch *head query key"]:
        """Return the map of one block from the gradient with respect to its pattern."""
        scores = gradient * block.recorded("pattern").to(gradient.dtype)
        scores = scores.clamp_min_(0) if self.rectify else scores
        return scores if self.per_head else scores.mean(dim=1)

    def interventions(
        self,
        layer: int,
        addition: Float[Tensor, "example head query key"],
        *,
        attention: str = DEFAULT_ATTENTION,
    ) -> list[HookPair]:
        """Return the hooks that make a pass differentiable with respect to one layer's pattern.

        They add a leaf of zeros to the pattern. The patterns above still depend on what is below, so the
        derivative with respect to the leaf is total. In your own run:

            leaf = torch.zeros(batch, head, query, key, requires_grad=True)
            logits = model.run_with_hooks(tokens, fwd_hooks=method.interventions(layer, leaf))
            (gradient,) = torch.autograd.grad(target(logits).sum(), leaf)

        Args:
            layer: The number of the block.
            addition: What is added to the pattern.
            attention: The name of the attention module, with `{layer}`.
        """
        return [add_to_pattern(layer, addition, attention=attention)]

    def _read_graph(
        self, blocks: Sequence[Block], bound: BoundTarget
    ) -> list[Float[Tensor, "1 *head query key"]] | None:
        """Return the maps from the clean pass's autograd graph; None if it does not contain the gradients."""
        graph = blocks[0].clean.graph
        # A kept autograd graph is that of a single prompt, which has one number.
        index = torch.zeros(1, dtype=torch.long, device=bound.prompt_index.device)
        # Another method of the run may have chosen the rules of the graph.
        if graph is None or graph.rules != PlainRules():
            return None
        by_layer, found = {block.layer: block for block in blocks}, dict[int, Tensor]()

        def read(layer: int, mixing: Mixing) -> None:
            if layer in by_layer:
                # The gradient of one layer alone is in memory, because it may be as large as all maps.
                block = by_layer[layer]
                gradient = _pattern_gradient(block.rows_of(mixing.gradient), mixing.values)
                found[layer] = self._weigh(block, gradient)

        try:
            graph.read_mixing(bound.values_in(graph, index), read, check=False)
        except UnsupportedModelError:
            # Blocks of a pass with fused attention are not run again with hooks.
            if graph.fused is not None:
                raise
            # A model that leaves attention to transformers shows no values. Its patterns have gradients.
            return None
        return [found[block.layer] for block in blocks]

    def _compute_gradients(
        self, blocks: Sequence[Block], bound: BoundTarget, chunk: Int[Tensor, " example"]
    ) -> Float[Tensor, "example layer head query key"]:
        """Return the total derivative of the target with respect to each block's asked rows, by one pass."""
        leaves = [torch.zeros_like(block.recorded("pattern")[chunk]).requires_grad_(True) for block in blocks]
        additions = [
            _expand_to_all_rows(block, leaf, chunk) for block, leaf in zip(blocks, leaves, strict=True)
        ]
        pairs = [
            pair
            for block, addition in zip(blocks, additions, strict=True)
            for pair in self.interventions(block.layer, addition, attention=block.stack.attention_template)
        ]
        # A leaf that no hook adds to a pattern has no effect, and no gradient.
        with must_fire(*pairs) as hooks:
            values = bound.values(chunk, hooks, gradients=True)
        gradients = gradients_of(values, leaves)
        return torch.stack(gradients, dim=1).to(torch.promote_types(gradients[0].dtype, torch.float32))


def _pattern_gradient(
    gradient: Float[Tensor, "batch query head d_head"], values: Float[Tensor, "batch key value_head d_head"]
) -> Float[Tensor, "batch head query key"]:
    """Return the gradient with respect to rows of a pattern, from that with respect to pattern @ values."""
    repeats = gradient.shape[2] // values.shape[2]
    axes = "batch query head d_head, batch key head d_head -> batch head query key"
    product = einsum(gradient, values.repeat_interleave(repeats, dim=2).to(gradient.dtype), axes)
    return product.to(torch.promote_types(product.dtype, torch.float32))


def _expand_to_all_rows(
    block: Block, leaf: Float[Tensor, "example head query key"], chunk: Int[Tensor, " example"]
) -> Float[Tensor, "example head all_queries key"]:
    """Return a leaf of the asked rows as an addition to the whole pattern, with 0 in all other rows."""
    if block.every_query:
        return leaf
    index = block.queries[chunk][:, None, :, None].expand_as(leaf)
    with torch.enable_grad():
        return leaf.new_zeros(*leaf.shape[:2], block.real.shape[1], leaf.shape[3]).scatter(2, index, leaf)


def weighted_by_gradient(
    target: Callable[[Float[Tensor, "batch head query key"]], Float[Tensor, " batch"]],
    pattern: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch query key"]:
    """Return mean_h (∂F/∂A_h ⊙ A_h)⁺ of one layer: equation 5, without hooks.

    This is slow. Tests compare the method with it.

    Args:
        target: F, as a function of the pattern of one layer.
        pattern: A.
    """
    leaf = pattern.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(target(leaf).sum(), leaf)
    return reduce((gradient * pattern).clamp_min(0), "batch head query key -> batch query key", "mean")
