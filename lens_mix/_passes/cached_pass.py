"""Read a clean pass from TransformerLens's ActivationCache, instead of running the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lens_mix._care.changes import Changes, forward_pre_hook
from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Batch
from lens_mix._model.model import Lens
from lens_mix._model.stacks import Stack, stacks_of
from lens_mix._passes.clean_pass import CleanPass, StopForward
from lens_mix._passes.replay import BlockCall
from lens_mix.arguments import describe_value
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.mixing import tolerance

# The hook points of a block's input and output; the first that a model has is the block's own. The output of
# a HookedEncoder's block is normalized after its `hook_resid_post`.
_INPUTS = ("hook_resid_pre", "hook_in")
_OUTPUTS = ("hook_normalized_resid_post", "hook_resid_post", "hook_out")


class CachedPass:
    """The activations of a pass that the user has run.

    Args:
        lens: The lens of the model.
        cache: An `ActivationCache`, or a dict of tensors by the names of hook points.

    Raises:
        TypeError: If the cache is something else.
    """

    def __init__(self, lens: Lens, cache: Any) -> None:
        tensors = getattr(cache, "cache_dict", cache)
        if not isinstance(tensors, Mapping):
            raise TypeError(
                "cache: expected the ActivationCache of model.run_with_cache(tokens), got "
                f"{describe_value(cache)}"
            )
        self._lens = lens
        # A hook point of a Bridge may have several names, and the cache has those that the filter accepted.
        self._by_point = {
            id(lens.hook_points[name]): tensor
            for name, tensor in tensors.items()
            if name in lens.hook_points and isinstance(tensor, Tensor)
        }
        first = self._by_point.get(id(lens.hook_points.get(self._input_name(self._stacks()[-1], 0))))
        self._has_batch = first is None or first.ndim == 3
        # A cache that was cast as a whole, to save memory, is cast back.
        self._dtype = None if first is None or first.dtype == lens.dtype else lens.dtype
        self._tolerance = lens.tolerance if first is None else max(lens.tolerance, tolerance(first.dtype))

    @property
    def likely_change(self) -> str:
        """Return why a cached block may not be what its components give."""
        if self._dtype is not None:
            return f"its tensors were rounded when they were cast from {self._dtype}"
        return "a hook changed the block in the cached pass, or the model had other weights"

    def find(self, name: str) -> Tensor | None:
        """Return the tensor of a hook point as the model has it, detached; None if the cache has none."""
        tensor = self._by_point.get(id(self._lens.hook_points.get(name)))
        if tensor is None:
            return None
        dtype = self._dtype if tensor.dtype.is_floating_point else None
        tensor = tensor.detach().to(device=self._lens.device, dtype=dtype or tensor.dtype)
        return tensor if self._has_batch else tensor[None]

    def check(self, batch: Batch) -> None:
        """Raise a ValueError unless the cache is of this model's pass on the prompt.

        The model runs as far as the first block, whose input is compared with the cache. For the decoder of
        an encoder-decoder, that includes the encoder.

        Args:
            batch: A batch of the prompt alone.
        """
        entering: dict[str, Tensor] = {}
        stacks = self._stacks()

        def enter(stack: Stack, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            entering[stack.name] = BlockCall(args, kwargs, None).resid_pre
            if stack is stacks[-1]:
                raise StopForward

        hooks = [
            forward_pre_hook(stack.blocks[0], functools.partial(enter, stack), with_kwargs=True)
            for stack in stacks
        ]
        with Changes(hooks), contextlib.suppress(StopForward):
            self._lens.forward(batch)
        for stack in stacks:
            if stack.name not in entering:
                raise UnsupportedModelError(f"block 0 of {stack.name!r} never ran in a forward pass")
            self._compare(self._input_name(stack, 0), entering[stack.name])

    def _compare(self, name: str, expected: Float[Tensor, "1 pos d_model"]) -> None:
        cached = self.find(name)
        if cached is None:
            raise ValueError(_describe_missing([name]))
        shape = list(cached.shape)
        if len(shape) == 3 and shape[0] > 1:
            raise ValueError(
                f"cache: expected the activations of one prompt, got those of {shape[0]}; write "
                "cache=cache.apply_slice_to_batch_dim(0), with the tokens of that prompt alone"
            )
        if shape != list(expected.shape):
            raise ValueError(
                f"cache: expected {name} of shape {list(expected.shape)} for this model and prompt, got "
                f"{shape}; give the prompt that the cache was recorded on"
            )
        wrong = [
            position
            for position in range(shape[1])
            if not relative_error(cached[:, position], expected[:, position]) <= self._tolerance
        ]
        if wrong:
            raise ValueError(
                f"cache: expected {name} to be what this model computes for the prompt, got other vectors at "
                f"{len(wrong)} of {shape[1]} positions, the first of them {wrong[0]}; give the prompt, and "
                "the model with the weights, that the cache was recorded on"
            )

    def require(self, names: Iterable[str], layers: Iterable[int]) -> None:
        """Raise a ValueError if the cache lacks some hook points.

        Args:
            names: Names of hook points.
            layers: The layers whose block's input and output are also needed.
        """
        missing = [name for name in names if self.find(name) is None]
        stack = self._lens.stack
        for layer in layers:
            missing += [self._input_name(stack, layer)] * (self._input(layer) is None)
            missing += [self._name(stack, layer, _OUTPUTS)] * (self._output(layer) is None)
        if missing:
            raise ValueError(_describe_missing(list(dict.fromkeys(missing))))

    def feed(
        self,
        clean: CleanPass,
        fwd_hooks: Sequence[HookPair],
        layers: Sequence[int],
        end: Callable[[int], None],
    ) -> None:
        """Fill a clean pass as a forward pass of the model would do it, block by block.

        Args:
            clean: The pass.
            fwd_hooks: The hooks that record, by the names of hook points. Those that the cache lacks are left
                out.
            layers: The layers whose blocks are read, in ascending order.
            end: The function to call with the number of each block, when it has been read. It raises
                `StopForward` to end the pass.
        """
        with contextlib.suppress(StopForward):
            for layer in layers:
                for name, hook in fwd_hooks:
                    of_block = isinstance(name, str) and name.startswith(f"{self._lens.where(layer)}.")
                    tensor = self.find(str(name)) if of_block else None
                    if tensor is not None:
                        hook(tensor, hook=self._lens.hook_points[str(name)])
                entered, left = self._input(layer), self._output(layer)
                if entered is not None and left is not None:
                    clean.calls[layer] = BlockCall((entered,), {}, left)
                end(layer)

    def _stacks(self) -> list[Stack]:
        """Return the stacks whose inputs are compared: the mapped one comes last."""
        stack = self._lens.stack
        return [stacks_of(self._lens.model)["encoder"], stack] if stack.reads_target else [stack]

    def _input(self, layer: int) -> Tensor | None:
        return self.find(self._input_name(self._lens.stack, layer))

    def _output(self, layer: int) -> Tensor | None:
        """Return the output of a block, which is also the input of the next one."""
        output = self.find(self._name(self._lens.stack, layer, _OUTPUTS))
        return output if output is not None or layer + 1 == self._lens.n_layers else self._input(layer + 1)

    def _input_name(self, stack: Stack, layer: int) -> str:
        return self._name(stack, layer, _INPUTS)

    def _name(self, stack: Stack, layer: int, points: Sequence[str]) -> str:
        names = [f"{stack.template.format(layer=layer)}.{point}" for point in points]
        return next((name for name in names if name in self._lens.hook_points), names[0])


def _describe_missing(names: Sequence[str]) -> str:
    """Return the error about hook points that a cache lacks."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    # The kernel that many a Bridge leaves attention to computes no weights.
    eager = 'after model.original_model.set_attn_implementation("eager"), if it is a TransformerBridge: '
    return (
        f"cache: expected the activations that the methods read, got none of {', '.join(names[:4])}{more}; "
        f"record them: {eager * ('hook_pattern' in ends)}model.run_with_cache(tokens), or with names_filter="
        f"lambda name: name.endswith({tuple(ends)!r}) beside what the cache has"
    )
