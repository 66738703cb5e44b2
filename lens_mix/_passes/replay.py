"""The replay: one block is run again with hooks, in one or more copies, with the arguments of the clean pass.

The residual stream alone is not enough: without rotary angles and mask, many Bridge blocks compute something
else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_mix._care.changes import Change, forward_hook
from lens_mix._care.precision import relative_error
from lens_mix._care.tracebacks import is_out_of_memory
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.model import Lens
from lens_mix.hooks.base import HookPair

_RESIDUAL_KEYWORDS = ("hidden_states", "resid_pre")  # Hugging Face's blocks, and TransformerLens's

_Key = TypeVar("_Key")

# Repeats the examples of one captured argument: (tensor, rows, batch size, heads) -> tensor.
_Expansion = Callable[[Tensor, Tensor, int, int], Tensor]


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """The arguments and the output of one block in the clean pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def resid_pre(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that entered the block."""
        for value in (*self.args[:1], *(self.kwargs.get(name) for name in _RESIDUAL_KEYWORDS)):
            if isinstance(value, Tensor):
                return value
        self._require_kept()
        raise UnsupportedModelError(
            f"block arguments: expected the residual stream first or as one of {_RESIDUAL_KEYWORDS}, "
            f"got {[type(a).__name__ for a in self.args]} and {sorted(self.kwargs)}"
        )

    @property
    def resid_post(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that left the block."""
        self._require_kept()
        return first_tensor(self.output)

    def _require_kept(self) -> None:
        """Raise a ValueError if the tensors of the call were freed (`PassPlan.free`)."""
        if self.output is None and not self.args and not self.kwargs:
            raise ValueError(
                "block: expected a method that reads its own block, got one that reads a block that was "
                "freed; write reads = 'below' with the maps in of_blocks"
            )


def first_tensor(output: Any) -> Tensor:
    """Return the residual stream of a block's output, which may be the first item of a tuple or list."""
    residual: Tensor = output[0] if isinstance(output, tuple | list) else output
    return residual


def with_first(output: Any, tensor: Tensor) -> Any:
    """Return the output of a block or module with its first tensor replaced."""
    return type(output)((tensor, *output[1:])) if isinstance(output, tuple | list) else tensor


def enter_with(residual: Float[Tensor, "batch pos d_model"], span: slice = slice(None)) -> Callable[..., Any]:
    """Return a forward pre-hook (with keyword arguments) that replaces a block's input.

    Positions are selected when the block is called, because gradients may be off before that.

    Args:
        residual: The new input.
        span: The positions of `residual` that enter the block.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and torch.is_tensor(args[0]):
            return (residual[:, span], *args[1:]), kwargs
        name = next(name for name in _RESIDUAL_KEYWORDS if torch.is_tensor(kwargs.get(name)))
        return args, {**kwargs, name: residual[:, span]}

    return enter


def _follow_batch(tensor: Tensor, rows: Tensor, batch: int, heads: int) -> Tensor:
    """Repeat along the first axis if it has the batch's size; else return the tensor as it is."""
    return tensor.index_select(0, rows) if tensor.ndim and tensor.shape[0] == batch else tensor


def _follow_batch_and_heads(tensor: Tensor, rows: Tensor, batch: int, heads: int) -> Tensor:
    """Repeat as `_follow_batch` does, and also along a first axis of batch * heads (BLOOM's alibi)."""
    if tensor.ndim and tensor.shape[0] == batch * heads and heads > 1:
        by_head: Tensor = tensor.unflatten(0, (batch, heads))
        return by_head.index_select(0, rows).flatten(0, 1)
    return _follow_batch(tensor, rows, batch, heads)


def _share_head_axis(tensor: Tensor, rows: Tensor, batch: int, heads: int) -> Tensor:
    """Repeat as `_follow_batch` does, but not along a first axis of heads (MPT's bias if batch = heads)."""
    is_bias = tensor.ndim == 3 and tensor.shape[:2] == (heads, 1)
    return tensor if is_bias else _follow_batch(tensor, rows, batch, heads)


_EXPANSIONS: tuple[_Expansion, ...] = (_follow_batch_and_heads, _follow_batch, _share_head_axis)


@dataclasses.dataclass(eq=False)
class BlockReplay:
    """One block of one clean pass, which can be run again.

    It is unknown which axes of the captured arguments are the batch. The possible readings are tried, and the
    first that reproduces the block's own output is used. If none does, the replay raises an error.

    Attributes:
        lens: The lens of the model.
        layer: The block's number.
        call: Its arguments and output in the clean pass.
        real: The mask of the positions that are the prompts' own.
    """

    lens: Lens
    layer: int
    call: BlockCall
    real: Bool[Tensor, "batch pos"]
    _expansion: _Expansion | None = dataclasses.field(default=None, init=False)

    def run(
        self, fwd_hooks: Sequence[HookPair] = (), rows: Int[Tensor, " copy"] | None = None
    ) -> Float[Tensor, "copy pos d_model"]:
        """Run the block again with hooks and return its output.

        Args:
            fwd_hooks: TransformerLens hooks, which get `[copy, ...]` tensors.
            rows: The example of the clean batch that each copy is made from; None for the batch itself, with
                the arguments of the clean pass.

        Raises:
            UnsupportedModelError: Copies are requested, and the block does not reproduce its output in
                copies.
        """
        expansion = None if rows is None else self.prepare()
        with self.lens.evaluation_mode(), self.lens.hooked(fwd_hooks):
            return self._run(rows, expansion)

    def prepare(self) -> _Expansion:
        """Verify once that the block, when it is run again, reproduces its output. No hook may be on it.

        Raises:
            UnsupportedModelError: The block does not reproduce its output.
        """
        if self._expansion is None:
            with self.lens.evaluation_mode():
                self._expansion = self._verified()
        return self._expansion

    def _verified(self) -> _Expansion:
        failures: list[str] = []
        for expansion in _EXPANSIONS:
            try:
                error = self._error(expansion)
            # A wrong reading of the axes makes tensors whose shapes do not fit each other.
            except (RuntimeError, ValueError, IndexError) as problem:
                if is_out_of_memory(problem):  # This is a RuntimeError on a GPU.
                    raise
                failures.append(f"{type(problem).__name__}: {str(problem)[:120]}")
                continue
            if error <= self.lens.tolerance:
                return expansion
            failures.append(f"relative error {error:.1e}")
        raise UnsupportedModelError(
            f"{self.lens.where(self.layer)}: run again from its captured arguments, the block should give "
            f"its own output (relative error <= {self.lens.tolerance:.0e}); got {'; '.join(failures)}"
        )

    def expand(self, value: Any, rows: Int[Tensor, " copy"]) -> Any:
        """Return tensors of the clean pass (alone, or in tuples and lists) for the given examples."""
        return self._expand(value, rows, self.prepare())

    def _expand(self, value: Any, rows: Tensor, expansion: _Expansion) -> Any:
        if torch.is_tensor(value):
            return expansion(value, rows, self.call.resid_pre.shape[0], self.lens.n_heads)
        if not isinstance(value, tuple | list):
            return value
        items = [self._expand(item, rows, expansion) for item in value]
        return items if isinstance(value, list) else tuple(items)

    def _run(self, rows: Tensor | None, expansion: _Expansion | None) -> Tensor:
        args, kwargs = self.call.args, self.call.kwargs
        if rows is not None and expansion is not None:
            args = self._expand(args, rows, expansion)
            kwargs = {name: self._expand(value, rows, expansion) for name, value in kwargs.items()}
        return first_tensor(self.lens.stack.blocks[self.layer](*args, **kwargs))

    def _error(self, expansion: _Expansion) -> float:
        batch = self.call.resid_pre.shape[0]
        # A changed number and order of prompts, one of them twice, reveals a wrong axis.
        rows = torch.tensor([batch - 1, 0, batch - 1], device=self.call.resid_pre.device, dtype=torch.long)
        clean = self.call.resid_post.index_select(0, rows)
        return relative_error(self._run(rows, expansion), clean, self.real.index_select(0, rows))


def captured_calls(modules: Mapping[_Key, nn.Module], calls: dict[_Key, BlockCall]) -> list[Change]:
    """Return hooks that record the arguments and the output of blocks or other modules into `calls`."""

    def record_call(key: _Key, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls[key] = BlockCall(args, dict(kwargs), output)

    return [
        forward_hook(module, functools.partial(record_call, key), with_kwargs=True)
        for key, module in modules.items()
    ]
