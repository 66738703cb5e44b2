"""The autograd graph of a pass with changed rules, which is that of the clean pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._care.changes import Changes
from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._model.model import Lens
from lens_mix._passes.backward_rules import BackwardRules
from lens_mix._passes.changed_backward import ChangedRules
from lens_mix._passes.copies import bytes_through_block
from lens_mix._passes.replay import BlockCall, enter_with, first_tensor
from lens_mix.hooks.mixing import check_mixing
from lens_mix.hooks.recording import record_mixing

if TYPE_CHECKING:
    from lens_mix._passes.fused_attention import FusedAttention

# The graph of all blocks is kept up to this many bytes, by an estimate of at least twice its true size: of
# SmolLM2, up to about 300 tokens. With a longer prompt, running blocks again takes a third more time.
_MOST_KEPT = 1 << 30


@dataclasses.dataclass(frozen=True)
class Mixing:
    """One layer's pattern, values, pattern @ values, and the gradient with respect to that product.

    Fused attention has no whole pattern, so it is None there.
    """

    pattern: Float[Tensor, "*batch head query key"] | None
    values: Float[Tensor, "*batch key value_head d_head"]
    mixed: Float[Tensor, "*batch query head d_head"]
    gradient: Float[Tensor, "*batch query head d_head"]

    def at(self, places: Int[Tensor, " pos"]) -> Mixing:
        """Return some positions of the only prompt, without the batch axis."""
        first, count = int(places[0]), len(places)
        # Neighboring positions are a view. A copy of a long prompt's pattern would take much time.
        chosen = slice(first, first + count) if int(places[-1]) == first + count - 1 else places
        rows = (each[0, chosen] for each in (self.values, self.mixed, self.gradient))
        pattern = None if self.pattern is None else self.pattern[0][:, chosen][..., chosen]
        return Mixing(pattern, *rows)


class AutogradGraph:
    """The autograd graph from the first block's input to the last block's output, with changed rules.

    It is kept from the clean pass on. The graph of a long prompt would need much more memory than its forward
    pass. Then each block is run again in the backward pass, from its input in the clean pass, and at most the
    graph of one block exists.

    Args:
        lens: The lens of the model.
        anatomies: The anatomies of all blocks.
        rules: The rules of the backward pass.
        positions: The number of positions of the prompt.
        fused: The fused attention of its passes; None for eager attention.

    Attributes:
        rules: The rules of the backward pass.
        fused: The fused attention; None for eager attention.
        is_kept: Whether the graph of all blocks is kept.
        logits: The logits that the pass computed at its only read position, as nodes of the graph; None if it
            computed none or others.
    """

    def __init__(
        self,
        lens: Lens,
        anatomies: Sequence[BlockAnatomy],
        rules: BackwardRules,
        positions: int,
        fused: FusedAttention | None = None,
    ) -> None:
        self.rules, self.fused, self._lens = rules, fused, lens
        size = lens.n_layers * bytes_through_block(lens, positions)
        # A block that reads the keys of another one cannot be run again alone, because its gradient enters
        # that block too.
        self.is_kept = size <= _MOST_KEPT or _shares_keys(lens)
        after = range(1, lens.n_layers + 1) if self.is_kept else ()
        self._changed = ChangedRules(lens, anatomies, rules, after=after, leaf=self.is_kept, fused=fused)
        template = lens.stack.attention_template
        # Fused attention records its mixing itself.
        self._recorded: dict[str, Tensor] = {} if fused is None else fused.mixing
        layers = lens.stack.attention_layers if fused is None else ()
        self._recording = [record_mixing(layer, self._recorded, attention=template) for layer in layers]
        self._calls: dict[int, BlockCall] = {}
        self.logits: Float[Tensor, "1 1 d_vocab"] | None = None

    @property
    def resid_post(self) -> Float[Tensor, "batch pos d_model"]:
        """The last block's output in the pass, from which a target is computed."""
        return self._changed.streams[self._lens.n_layers]

    def built(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose passes follow the rules; the first pass builds the autograd graph."""
        return self._changed.applied(self._recording if self.is_kept else ())

    def read(self, calls: dict[int, BlockCall]) -> None:
        """Read the calls of the blocks in the pass, from which blocks are run again."""
        if not self.is_kept:
            self._calls = calls
            # The target is computed from this leaf. Its gradient is then handed from block to block.
            last = calls[self._lens.n_layers - 1].resid_post
            self._changed.streams[self._lens.n_layers] = last.detach().requires_grad_(True)

    def release(self) -> None:
        """Free the autograd graph. References in cycles would otherwise keep it after its use."""
        self._recorded.clear()
        self._changed.streams.clear()
        self._calls, self.logits = {}, None

    def gradients(
        self,
        values: Float[Tensor, " value"],
        numbers: Sequence[int],
        *,
        at_once: bool = False,
        reads_logits: bool = True,
    ) -> list[tuple[Float[Tensor, "1 pos d_model"], Float[Tensor, "value pos d_model"]]]:
        """Return residual streams, and the gradient of each value with respect to them; the graph is kept.

        Args:
            values: The values, of a single prompt, computed from `resid_post`.
            numbers: After how many blocks each stream is read; 0 for the input of the first block.
            at_once: Whether one vectorized backward pass may compute the gradients of all values.
            reads_logits: Whether the values are computed from the logits, and so through the final norm.

        Raises:
            ValueError: A value has no gradient.
            UnsupportedModelError: A changed rule gets no gradient, or a block that is run again gives another
                output.
        """
        _require_differentiable(values)
        if not self.is_kept:
            found: dict[int, tuple[Tensor, Tensor]] = {}

            def keep(layer: int, *stream: Tensor) -> None:
                # Of a long prompt, the gradients after all blocks take as much memory as the streams.
                if layer in numbers:
                    found[layer] = (stream[0], stream[1])

            self._run_again(values, keep, at_once=at_once, reads_logits=reads_logits)
            return [found[number] for number in numbers]
        streams = [self._changed.streams[number] for number in numbers]
        # The leaf is included, because only its gradient reaches the rules of the first block.
        inputs = [self._changed.streams[0], *streams]
        _, *gradients = _gradients_of_each(values, inputs, _select(values), at_once=at_once)
        self._changed.require_gradients(through_final_norm=reads_logits)
        return [(stream.detach(), each[:, 0]) for stream, each in zip(streams, gradients, strict=True)]

    def read_mixing(
        self, value: Float[Tensor, " 1"], read: Callable[[int, Mixing], object], *, check: bool = True
    ) -> None:
        """Read every layer's mixing with the gradient of a number; the autograd graph is kept.

        Args:
            value: The number, computed from `resid_post`.
            read: A function that is called with each layer and its mixing, from the last layer to the first.
            check: Whether to check that the mixed values of each layer are pattern @ values; fused attention,
                which has no whole pattern, checks the rows that it records.

        Raises:
            ValueError: The number has no gradient.
            UnsupportedModelError: A layer or a changed rule gets no gradient, the check fails, or a block
                that is run again gives another output.
        """
        _require_differentiable(value)
        if not self.is_kept:
            self._run_again(value, lambda layer, *stream: None, read, check=check)
            return
        layers = self._lens.stack.attention_layers
        recorded = {layer: self._recorded_of(layer) for layer in layers}
        mixed = {layer: z for layer, (_, _, z) in recorded.items() if z.requires_grad}
        # The leaf is included, because only its gradient reaches the rules of the first block.
        inputs, one = [self._changed.streams[0], *mixed.values()], torch.ones_like(value)
        of_leaf, *gradients = torch.autograd.grad(value, inputs, one, allow_unused=True, retain_graph=True)
        _require_differentiable(value, [of_leaf])
        gradient_of = dict(zip(mixed, gradients, strict=True))
        self._changed.require_gradients()
        for layer in reversed(layers):
            read(layer, self._make_mixing(layer, *recorded[layer], gradient_of.get(layer), check=check))

    def _run_again(
        self,
        values: Float[Tensor, " value"],
        read: Callable[[int, Tensor, Tensor], object],
        read_mixing: Callable[[int, Mixing], object] | None = None,
        *,
        at_once: bool = False,
        reads_logits: bool = True,
        check: bool = True,
    ) -> None:
        """Run the blocks again from the last one to the first, each with its own autograd graph.

        Args:
            values: The values, computed from `resid_post`.
            read: A function that is called with a block's number, its input, and the values' gradients with
                respect to that input.
            read_mixing: A function that is called with each layer with attention and its mixing. Then there
                is one value.
            at_once: As in `gradients`.
            reads_logits: As in `gradients`.
            check: As in `read_mixing`.
        """
        (gradients,) = _gradients_of_each(values, [self.resid_post], _select(values), at_once=at_once)
        recording = () if read_mixing is None else self._recording
        mode, fused = self._lens.evaluation_mode(gradients=True), self.fused
        with mode, self._changed.applied(recording), Changes([] if fused is None else fused.changes()):
            for layer in reversed(range(self._lens.n_layers)):
                leaf = self._calls[layer].resid_pre.detach().requires_grad_(True)
                output = self._output_again(layer, leaf)
                if read_mixing is None or layer not in self._lens.stack.attention_layers:
                    (gradients,) = _gradients_of_each(output, [leaf], gradients, at_once=at_once, keep=False)
                else:
                    recorded = self._recorded_of(layer)
                    # torch raises an error about a tensor without a gradient; `_make_mixing` has one that
                    # names the layer.
                    inputs = [leaf, *[recorded[-1]] * recorded[-1].requires_grad]
                    found = torch.autograd.grad(output, inputs, gradients[0], allow_unused=True)
                    of_z = found[1] if len(found) > 1 else None
                    read_mixing(layer, self._make_mixing(layer, *recorded, of_z, check=check))
                    gradients = found[0][None]
                self._recorded.clear()
                read(layer, leaf.detach(), gradients[:, 0])
        self._changed.require_gradients(through_final_norm=reads_logits)

    def _output_again(self, layer: int, leaf: Tensor) -> Tensor:
        """Run a block again from a leaf and return its output, which is compared with that of the pass."""
        call, block = self._calls[layer], self._lens.stack.blocks[layer]
        args, kwargs = enter_with(leaf)(block, call.args, call.kwargs)
        output = first_tensor(block(*args, **kwargs))
        error = relative_error(output.detach(), call.resid_post)
        if not error <= self._lens.tolerance:
            raise UnsupportedModelError(
                f"{self._lens.where(layer)}: run again for its gradient, the block should give its own "
                f"output (relative error <= {self._lens.tolerance:.0e}); got a relative error of {error:.1e}"
            )
        return output

    def _recorded_of(self, layer: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the pattern (None of fused attention), the values and z of one layer."""
        pattern, value, z = (self._lens.stack.hook_name(role, layer) for role in ("pattern", "value", "z"))
        if z not in self._recorded:
            raise UnsupportedModelError(
                f"expected {pattern} to fire before hook_z; got none: this model leaves attention to "
                "transformers"
            )
        return self._recorded.get(pattern), self._recorded[value], self._recorded[z]

    def _make_mixing(
        self,
        layer: int,
        pattern: Tensor | None,
        values: Tensor,
        mixed: Tensor,
        gradient: Tensor | None,
        *,
        check: bool,
    ) -> Mixing:
        """Return the mixing of one layer.

        Raises:
            UnsupportedModelError: It gets no gradient, or the mixed values are not pattern @ values.
        """
        if gradient is None:
            name = self._lens.stack.hook_name("z", layer)
            raise UnsupportedModelError(f"hooks: no gradient came back to {name}")
        pattern = None if pattern is None else pattern.detach()
        values, mixed = values.detach(), mixed.detach()
        try:
            if check and pattern is not None:
                check_mixing("gradients with respect to mixed values", mixed, pattern, values)
        except RuntimeError as problem:
            raise UnsupportedModelError(str(problem)) from problem
        return Mixing(pattern, values, mixed, gradient)


def _shares_keys(lens: Lens) -> bool:
    """Return whether a block reads keys of an earlier one, so that gradients pass between them elsewhere."""
    configs = {id(config): config for module in lens.modules if (config := vars(module).get("config"))}
    return any(getattr(config, "num_kv_shared_layers", 0) for config in configs.values())


def _require_differentiable(value: Tensor, gradients: Sequence[Tensor | None] = ()) -> None:
    """Raise a ValueError if a number has no gradient, or the given gradients lack one."""
    if not value.requires_grad or any(gradient is None for gradient in gradients):
        raise ValueError(
            "target: expected a differentiable function of the output, got a value without a gradient "
            "(a detach, an argmax or a no_grad inside?)"
        )


def _select(values: Float[Tensor, " value"]) -> Float[Tensor, "value value"]:
    """Return gradients of `values` that select one of them each."""
    return torch.eye(len(values), dtype=values.dtype, device=values.device)


def _gradients_of_each(
    output: Tensor, inputs: Sequence[Tensor], gradients: Tensor, *, at_once: bool, keep: bool = True
) -> list[Tensor]:
    """Return the gradients of several numbers with respect to inputs.

    Args:
        output: A tensor from which the numbers are computed.
        inputs: The inputs.
        gradients: The gradient of each number with respect to `output`, [value, *the shape of `output`].
        at_once: Whether one vectorized backward pass may compute all of them.
        keep: Whether the graph is kept after the last number.

    Returns:
        For each input, the gradients [value, *its shape].
    """
    if at_once and len(gradients) > 1:
        # Some operations have no vectorized gradient. Their error is raised before any result is used.
        with contextlib.suppress(RuntimeError):
            return list(
                torch.autograd.grad(output, inputs, gradients, retain_graph=True, is_grads_batched=True)
            )
    separate = []
    for left, gradient in zip(reversed(range(len(gradients))), gradients, strict=True):
        # The last backward pass may free the graph, which needs the most memory of all.
        is_kept = keep or left > 0
        found = torch.autograd.grad(output, inputs, gradient, retain_graph=is_kept, allow_unused=True)
        _require_differentiable(output, found)
        separate.append(found)
    return [torch.stack(of_input) for of_input in zip(*separate, strict=True)]
