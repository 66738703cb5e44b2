"""The autograd graph of a pass with changed rules; the clean pass can build it at no further pass."""

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
from lens_mix.lens.changed_backward import BackwardRules, ChangedRules
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class Mixing:
    """One layer's pattern, values, pattern @ values, and the gradient with respect to that product."""

    pattern: Float[Tensor, "*batch head query key"]
    values: Float[Tensor, "*batch key value_head d_head"]
    mixed: Float[Tensor, "*batch query head d_head"]
    gradient: Float[Tensor, "*batch query head d_head"]

    def at(self, places: Int[Tensor, " pos"]) -> Mixing:
        """Return some positions of the only prompt, without the batch axis."""
        rows = (each[0, places] for each in (self.values, self.mixed, self.gradient))
        return Mixing(self.pattern[0][:, places][..., places], *rows)


class AutogradGraph:
    """The autograd graph from the first block's input to the last block's output, with changed rules.

    Args:
        lens: The lens of the model.
        anatomies: The anatomies of all blocks.
        rules: The rules of the backward pass.

    Attributes:
        rules: The rules of the backward pass.
    """

    def __init__(self, lens: Lens, anatomies: Sequence[BlockAnatomy], rules: BackwardRules) -> None:
        self.rules, self._lens = rules, lens
        self._changed = ChangedRules(lens, anatomies, rules, after=range(1, lens.n_layers + 1), leaf=True)
        template = lens.stack.attention_template
        self._recorded: dict[str, Tensor] = {}
        self._recording = [
            record_mixing(layer, self._recorded, attention=template) for layer in lens.stack.attention_layers
        ]

    @property
    def resid_post(self) -> Float[Tensor, "batch pos d_model"] | None:
        """The last block's output in the autograd graph; None before a pass."""
        return self._changed.streams.get(self._lens.n_layers)

    @property
    def has_mixing(self) -> bool:
        """Whether the pass showed the pattern and the values of every layer before they were mixed."""
        names = (self._lens.stack.hook_name("z", layer) for layer in self._lens.stack.attention_layers)
        return all(name in self._recorded for name in names)

    def built(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose passes follow the rules; the first pass builds the autograd graph."""
        return self._changed.applied(self._recording)

    def release(self) -> None:
        """Free the autograd graph. References in cycles would otherwise keep it after its use."""
        self._recorded.clear()
        self._changed.streams.clear()

    def gradients(
        self, values: Float[Tensor, " value"], numbers: Sequence[int], *, at_once: bool = False
    ) -> list[tuple[Float[Tensor, "1 pos d_model"], Float[Tensor, "value pos d_model"]]]:
        """Return residual streams, and the gradient of each value with respect to them; the graph is kept.

        Args:
            values: The values, of a single prompt.
            numbers: After how many blocks each stream is read; 0 for the input of the first block.
            at_once: Whether one vectorised backward pass may compute the gradients of all values.

        Raises:
            ValueError: A value has no gradient.
            UnsupportedModelError: A changed rule gets no gradient.
        """
        _require_differentiable(values)
        streams = [self._changed.streams[number] for number in numbers]
        # The leaf is included, because only its gradient reaches the rules of the first block.
        _, *gradients = _gradients_of_each(values, [self._changed.streams[0], *streams], at_once=at_once)
        self._changed.require_gradients()
        return [(stream.detach(), each) for stream, each in zip(streams, gradients, strict=True)]

    def mixing(self, value: Float[Tensor, " 1"], *, check: bool = True) -> dict[int, Mixing]:
        """Return every layer's mixing with the gradient of a number; the autograd graph is kept.

        Args:
            value: The number.
            check: Whether to check that the mixed values of each layer are pattern @ values.

        Raises:
            ValueError: The number has no gradient.
            UnsupportedModelError: A layer or a changed rule gets no gradient, or the check fails.
        """
        _require_differentiable(value)
        layers = self._lens.stack.attention_layers
        recorded = {layer: self._recorded_of(layer) for layer in layers}
        mixed = {layer: z for layer, (_, _, z) in recorded.items() if z.requires_grad}
        # The leaf is included, because only its gradient reaches the rules of the first block.
        inputs, one = [self._changed.streams[0], *mixed.values()], torch.ones_like(value)
        of_leaf, *gradients = torch.autograd.grad(value, inputs, one, allow_unused=True, retain_graph=True)
        _require_differentiable(value, [of_leaf])
        gradient_of = dict(zip(mixed, gradients, strict=True))
        for layer in layers:
            if gradient_of.get(layer) is None:
                name = self._lens.stack.hook_name("z", layer)
                raise UnsupportedModelError(f"hooks: no gradient came back to {name}")
        self._changed.require_gradients()
        found: dict[int, Mixing] = {}
        for layer, gradient in gradient_of.items():
            pattern, value, z = (each.detach() for each in recorded[layer])
            found[layer] = Mixing(pattern, value, z, gradient)
        if check:
            for each in found.values():
                _check(each)
        return found

    def _recorded_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pattern, the values and z of one layer."""
        pattern, value, z = (self._lens.stack.hook_name(role, layer) for role in ("pattern", "value", "z"))
        if z not in self._recorded:
            raise UnsupportedModelError(
                f"expected {pattern} to fire before hook_z; got none: this model leaves attention to "
                "transformers"
            )
        return self._recorded[pattern], self._recorded[value], self._recorded[z]


def _require_differentiable(value: Tensor, gradients: Sequence[Tensor | None] = ()) -> None:
    """Raise a ValueError if a number has no gradient, or the given gradients lack one."""
    if not value.requires_grad or any(gradient is None for gradient in gradients):
        raise ValueError(
            "target: expected a differentiable function of the output, got a value without a gradient "
            "(a detach, an argmax or a no_grad inside?)"
        )


def _gradients_of_each(
    values: Float[Tensor, " value"], inputs: Sequence[Tensor], *, at_once: bool
) -> list[Float[Tensor, "value pos d_model"]]:
    """Return the gradient of each value with respect to each input, whose batch has one prompt."""
    # A gradient of `values` that is 1 at a single one selects it.
    selections = torch.eye(len(values), dtype=values.dtype, device=values.device)
    if at_once and len(values) > 1:
        # Some operations have no vectorised gradient. Their error is raised before any result is used.
        with contextlib.suppress(RuntimeError):
            found = torch.autograd.grad(values, inputs, selections, retain_graph=True, is_grads_batched=True)
            return [of_input[:, 0] for of_input in found]
    separate = [
        torch.autograd.grad(values, inputs, each, retain_graph=True, allow_unused=True) for each in selections
    ]
    for each in separate:
        _require_differentiable(values, each)
    return [torch.cat(of_input) for of_input in zip(*separate, strict=True)]


def _check(mixing: Mixing) -> None:
    try:
        check_mixing("gradients with respect to mixed values", mixing.mixed, mixing.pattern, mixing.values)
    except RuntimeError as problem:
        raise UnsupportedModelError(str(problem)) from problem
