"""The graph of a pass under changed rules; where the clean pass leaves it, no pass of its own is needed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens_mix.hooks import AttentionHook
from lens_mix.hooks.mixing import check_mixing
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.changed_backward import ChangedRules, Rules
from lens_mix.lens.changes import Changes, forward_hook, forward_pre_hook
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.replay import BlockCall, enter_with, first_tensor


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What one layer's attention mixed, pattern @ values = mixed, and the gradient by that."""

    pattern: Float[Tensor, "*batch head query key"]
    values: Float[Tensor, "*batch key value_head d_head"]
    mixed: Float[Tensor, "*batch query head d_head"]
    gradient: Float[Tensor, "*batch query head d_head"]

    def at(self, places: Int[Tensor, " pos"]) -> Mixing:
        """Of the only prompt, without the batch's axis: some positions."""
        rows = (each[0, places] for each in (self.values, self.mixed, self.gradient))
        return Mixing(self.pattern[0][:, places][..., places], *rows)


class Graph:
    """From what enters the first block on, as the rules differentiate it.

    Args:
        lens: the face of the model.
        anatomies: of all its blocks.
        rules: what the backward pass does.

    Attributes:
        rules: as given.
        resid_post: what the last block gave, in the graph; None before a pass.
    """

    def __init__(self, lens: Lens, anatomies: Sequence[BlockAnatomy], rules: Rules) -> None:
        self.rules, self._lens = rules, lens
        self.resid_post: Float[Tensor, "batch pos d_model"] | None = None
        self._changed = ChangedRules(lens, anatomies, rules)
        template = lens.stack.attention_template
        self._keepers = [_KeepMixing(layer, template) for layer in lens.stack.attention_layers]

    @contextlib.contextmanager
    def built(self) -> Iterator[None]:
        """Passes inside go by the rules, with gradients on; the first through the blocks is the graph's."""
        pairs = [*self._changed.pairs, *((keeper.matches, keeper) for keeper in self._keepers)]
        first, last = self._lens.stack.blocks[0], self._lens.stack.blocks[-1]
        ends = [forward_pre_hook(first, self._enter, with_kwargs=True), forward_hook(last, self._leave)]
        with torch.enable_grad(), self._lens.hooked(pairs), Changes([*self._changed.changes, *ends]):
            yield

    def mixing(self, value: Float[Tensor, " 1"]) -> dict[int, Mixing]:
        """What every layer mixed, with the gradient of a number in the graph; the graph stays.

        Raises:
            ValueError: no gradient goes through the number. UnsupportedModelError: none comes back to a
                layer, or through a changed rule, or mixed values that are not pattern @ values.
        """
        if not value.requires_grad:
            raise ValueError(
                "target: expected a differentiable function of the output, got a value without a gradient "
                "(a detach, an argmax or a no_grad inside?)"
            )
        keepers = [keeper for keeper in self._keepers if keeper.mixed is not None]
        # The leaf too, as the rules of the first block are only reached on the way to it.
        inputs = [self._leaf, *(keeper.mixed for keeper in keepers if keeper.mixed is not None)]
        one = torch.ones_like(value)
        _, *gradients = torch.autograd.grad(value, inputs, one, allow_unused=True, retain_graph=True)
        gradient_of = dict(zip(keepers, gradients, strict=True))
        for keeper in self._keepers:
            if gradient_of.get(keeper) is None:
                raise UnsupportedModelError(f"hooks: no gradient came back to {keeper.module}.hook_z")
        self._changed.require_gradients()
        return {keeper.layer: keeper.mixing(gradient) for keeper, gradient in gradient_of.items()}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The first block reads its residual stream as a leaf."""
        if self.resid_post is not None:
            return None
        self._leaf = BlockCall(args, kwargs, None).resid_pre.detach().requires_grad_(True)
        return enter_with(self._leaf)(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.resid_post = first_tensor(output)


class _KeepMixing(AttentionHook):
    """Keeps what is mixed, in the graph."""

    points = ("values", "pattern", "mixed")
    mixed: Tensor | None = None

    def __init__(self, layer: int, attention: str) -> None:
        super().__init__(layer, attention)
        self.layer = layer

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if not (torch.is_grad_enabled() and mixed.requires_grad):
            return None
        self.mixed, self._kept = mixed, (pattern, values)
        self.calls += 1
        # The pass goes on from what was looked at, or no gradient comes back to it.
        return mixed

    def mixing(self, gradient: Tensor) -> Mixing:
        """With the gradient that came back."""
        pattern, values = self._kept
        assert self.mixed is not None
        if pattern is None:
            raise UnsupportedModelError(
                f"expected {self.module}.hook_pattern to fire before hook_z; got none: this model leaves "
                "attention to transformers"
            )
        pattern, values, mixed = pattern.detach(), values.detach(), self.mixed.detach()
        try:
            check_mixing("gradients by mixed values", mixed, pattern, values)
        except RuntimeError as problem:
            raise UnsupportedModelError(str(problem)) from problem
        return Mixing(pattern, values, mixed, gradient)
