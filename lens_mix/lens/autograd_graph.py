"""The graph of a pass under changed rules; where the clean pass leaves it, no pass of its own is needed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.hooks import record_mixing
from lens_mix.hooks.mixing import check_mixing
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.changed_backward import ChangedRules, Rules
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError


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


class AutogradGraph:
    """From what enters the first block on, as the rules differentiate it.

    Args:
        lens: the face of the model.
        anatomies: of all its blocks.
        rules: what the backward pass does.

    Attributes:
        rules: as given.
    """

    def __init__(self, lens: Lens, anatomies: Sequence[BlockAnatomy], rules: Rules) -> None:
        self.rules, self._lens = rules, lens
        self._changed = ChangedRules(lens, anatomies, rules, after=[lens.n_layers], leaf=True)
        template = lens.stack.attention_template
        self._recorded: dict[str, Tensor] = {}
        self._recording = [
            record_mixing(layer, self._recorded, attention=template) for layer in lens.stack.attention_layers
        ]

    @property
    def resid_post(self) -> Float[Tensor, "batch pos d_model"] | None:
        """What the last block gave, in the graph; None before a pass."""
        return self._changed.streams.get(self._lens.n_layers)

    def built(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose passes follow the rules; the first through the blocks is the graph's."""
        return self._changed.applied(self._recording)

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
        layers = self._lens.stack.attention_layers
        recorded = {layer: self._recorded_of(layer) for layer in layers}
        mixed = {layer: z for layer, (_, _, z) in recorded.items() if z.requires_grad}
        # The leaf too, as the rules of the first block are only reached on the way to it.
        inputs, one = [self._changed.streams[0], *mixed.values()], torch.ones_like(value)
        _, *gradients = torch.autograd.grad(value, inputs, one, allow_unused=True, retain_graph=True)
        gradient_of = dict(zip(mixed, gradients, strict=True))
        for layer in layers:
            if gradient_of.get(layer) is None:
                name = self._lens.stack.hook_name("z", layer)
                raise UnsupportedModelError(f"hooks: no gradient came back to {name}")
        self._changed.require_gradients()
        return {layer: _checked(*recorded[layer], gradient) for layer, gradient in gradient_of.items()}

    def _recorded_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pattern, the values and z of one layer."""
        pattern, value, z = (self._lens.stack.hook_name(role, layer) for role in ("pattern", "value", "z"))
        if z not in self._recorded:
            raise UnsupportedModelError(
                f"expected {pattern} to fire before hook_z; got none: this model leaves attention to "
                "transformers"
            )
        return self._recorded[pattern], self._recorded[value], self._recorded[z]


def _checked(pattern: Tensor, values: Tensor, mixed: Tensor, gradient: Tensor) -> Mixing:
    pattern, values, mixed = pattern.detach(), values.detach(), mixed.detach()
    try:
        check_mixing("gradients by mixed values", mixed, pattern, values)
    except RuntimeError as problem:
        raise UnsupportedModelError(str(problem)) from problem
    return Mixing(pattern, values, mixed, gradient)
