"""Zero value vectors: what Value Zeroing intervenes with (Mohebbi et al., EACL 2023, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks._shared import (
    DEFAULT_ATTENTION,
    AttentionHook,
    HookPair,
    as_heads,
    as_index,
    check_heads,
    check_mixing,
    mix,
)

Position = int | slice | Int[Tensor, "batch"] | Bool[Tensor, "batch key"] | Bool[Tensor, "key"]


def zero_values(
    layer: int,
    position: Position | None = None,
    *,
    positions: Sequence[int] | None = None,
    heads: Iterable[int] | int | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Replace the value vectors of chosen positions by zeros in one layer; queries, keys and pattern stay.

    This is the intervention of Value Zeroing: v_j := 0 in every head (Mohebbi et al., EACL 2023, section
    3.1). Position j is then still attended to, but passes on nothing.

    Args:
        layer: the layer, from 0.
        position: which positions (of the keys) to zero, in one of these forms:
            an `int`, the same position in every batch row (negative: from the end);
            a `slice`, a span of positions, the same in every row;
            an integer tensor [batch], ANOTHER position in each row;
            a bool tensor [batch key], any set of positions in each row, or [key], the same set in every row.
            A list is refused, as it could mean one position per row or several in all rows.
        positions: instead of `position`: several positions, zeroed together in every row.
        heads: zero the value only for these QUERY heads, as `hook_pattern` numbers them; None: for all. Where
            several query heads share one value head, the others of the group keep the value.
        attention: name of the attention module, with `{layer}`: `"encoder.{layer}.attn"`,
            `"decoder.{layer}.attn"` or `"decoder.{layer}.cross_attn"` on HookedEncoderDecoder;
            `"encoder_blocks.{layer}.attn"`, `"decoder_blocks.{layer}.self_attn"` or
            `"decoder_blocks.{layer}.cross_attn"` on TransformerBridge.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: an argument of the wrong kind, here.
        ValueError: here or in the pass: a position or head there is not, a tensor of another batch.
        RuntimeError: in the pass, for chosen heads that share value heads: the pattern did not fire before
            `hook_z`, or `pattern @ values` is not `hook_z`.

    Example:
        ```python
        from lens_mix.hooks import zero_values

        clean = model(tokens)
        without_2 = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, 2)])
        without_span = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, slice(1, 4))])
        in_two_heads = model.run_with_hooks(tokens, fwd_hooks=[zero_values(1, 2, heads=[0, 3])])
        ```
    """
    chosen = _Positions(position, positions)
    if heads is None:
        everywhere = _ZeroValues(layer, attention, chosen)
        return f"{everywhere.module}.hook_v", everywhere
    in_heads = _ZeroValuesOfHeads(layer, attention, chosen, as_heads(heads))
    return in_heads.matches, in_heads


class _Positions:
    """The positions asked for, and the mask they are in one batch."""

    def __init__(self, position: Position | None, positions: Sequence[int] | None) -> None:
        if (position is None) == (positions is None):
            given = "both" if position is not None else "neither"
            raise TypeError(f"position, positions: expected exactly one of them; got {given}")
        self.chosen: int | slice | Tensor | tuple[int, ...]
        if positions is not None:
            self.chosen = self._several(positions)
        elif isinstance(position, Tensor) and position.ndim > 0:
            self.chosen = self._tensor(position)
        elif isinstance(position, slice):
            self.chosen = position
        elif isinstance(position, list | tuple | range | set):
            raise TypeError(
                "position: expected an int, a slice or a tensor; got a "
                f"{type(position).__name__}. For several positions in every row use positions=[...] or a "
                "slice, for another position in each batch row a 1-D integer tensor"
            )
        else:
            self.chosen = as_index("position", position)

    @staticmethod
    def _several(positions: Sequence[int]) -> tuple[int, ...]:
        if isinstance(positions, str | slice) or not isinstance(positions, Iterable):
            raise TypeError(f"positions: expected a sequence of integers; got {positions!r}")
        listed = positions.tolist() if isinstance(positions, Tensor) else positions
        chosen = tuple(as_index("positions", one) for one in listed)
        if not chosen:
            raise ValueError("positions: expected at least one position; got none")
        return chosen

    @staticmethod
    def _tensor(position: Tensor) -> Tensor:
        is_mask = position.dtype == torch.bool
        if position.is_floating_point() or position.is_complex() or position.ndim > (2 if is_mask else 1):
            raise TypeError(
                "position: expected an integer tensor [batch], or a bool tensor [batch key] or [key]; "
                f"got {position.dtype} of shape {tuple(position.shape)}"
            )
        return position.detach().cpu()

    def mask(self, values: Float[Tensor, "batch key head d_head"]) -> Bool[Tensor, "#batch key"]:
        """True where the value is to be zero; one row if all rows agree."""
        batch, length = values.shape[:2]
        mask = torch.zeros(1, length, dtype=torch.bool, device=values.device)
        if isinstance(self.chosen, slice):
            if not range(length)[self.chosen]:
                raise ValueError(
                    f"position: expected a slice of {length} positions; got {self.chosen}, which is empty"
                )
            mask[:, self.chosen] = True
            return mask
        if not isinstance(self.chosen, Tensor):
            several = isinstance(self.chosen, tuple)
            for one in self.chosen if isinstance(self.chosen, tuple) else (self.chosen,):
                _check_range("positions" if several else "position", one, length)
                mask[0, one] = True
            return mask
        if self.chosen.dtype == torch.bool:
            return self._given_mask(self.chosen, batch, length).to(values.device)
        return self._one_per_row(self.chosen, mask.repeat(batch, 1))

    @staticmethod
    def _one_per_row(chosen: Tensor, mask: Tensor) -> Tensor:
        batch, length = mask.shape
        if len(chosen) != batch:
            raise ValueError(
                f"position: expected one position for each of {batch} batch rows; got {len(chosen)} "
                "(for several positions in every row use positions=)"
            )
        for extreme in (chosen.min(), chosen.max()):
            _check_range("position", int(extreme), length)
        mask[torch.arange(batch, device=mask.device), chosen.to(mask.device)] = True
        return mask

    @staticmethod
    def _given_mask(mask: Tensor, batch: int, length: int) -> Tensor:
        if tuple(mask.shape) not in ((length,), (batch, length)):
            raise ValueError(
                f"position: expected a bool tensor [{batch}, {length}] or [{length}]; got shape "
                f"{tuple(mask.shape)}"
            )
        return mask if mask.ndim == 2 else mask[None]


def _check_range(argument: str, position: int, length: int) -> None:
    if not -length <= position < length:
        raise ValueError(
            f"{argument}: expected a position from {-length} to {length - 1}, as there are {length}; "
            f"got {position}"
        )


def _zeroed(values: Tensor, mask: Tensor, heads: tuple[int, ...] | None = None) -> Tensor:
    everywhere = mask[:, :, None, None]
    if heads is None:
        return values.masked_fill(everywhere, 0)
    chosen = torch.zeros(values.shape[2], dtype=torch.bool, device=values.device)
    chosen[list(heads)] = True
    return values.masked_fill(everywhere & chosen[:, None], 0)


class _ZeroValues(AttentionHook):
    points = ("values",)

    def __init__(self, layer: int, attention: str, positions: _Positions) -> None:
        super().__init__(layer, attention)
        self._chosen = positions

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor:
        edited = _zeroed(values, self._chosen.mask(values))
        self.calls += 1
        return edited


class _ZeroValuesOfHeads(AttentionHook):
    points = ("queries", "values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, positions: _Positions, heads: tuple[int, ...]) -> None:
        super().__init__(layer, attention)
        self._chosen = positions
        self._heads = heads
        self._done = False

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor | None:
        # the number of query heads tells whether each has its own value; if unknown, the pattern must help
        self._done = n_heads == values.shape[2]
        if not self._done:
            return None
        check_heads(self._heads, values.shape[2])
        edited = _zeroed(values, self._chosen.mask(values), self._heads)
        self.calls += 1
        return edited

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if self._done:
            return None
        check_heads(self._heads, mixed.shape[2])
        if pattern is None or pattern.shape[1] != mixed.shape[2]:
            raise RuntimeError(
                f"heads: {self.module} shares one value among several query heads, so zeroing it for some of "
                "them needs their patterns, and hook_pattern did not show them before hook_z in this pass"
            )
        heads = list(self._heads)
        group = [head * values.shape[2] // mixed.shape[2] for head in heads]
        check_mixing("heads", mixed[:, :, heads], pattern[:, heads], values[:, :, group])
        zeroed = _zeroed(values, self._chosen.mask(values))
        edited = mixed.clone()
        edited[:, :, heads] = mix(pattern[:, heads], zeroed[:, :, group]).to(mixed.dtype)
        self.calls += 1
        return edited
