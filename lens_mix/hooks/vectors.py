"""Replace value or query vectors by zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lens_mix.hooks._arguments import (
    Chosen,
    Position,
    check_heads,
    make_position_mask,
    read_heads,
    read_position,
)
from lens_mix.hooks.base import DEFAULT_ATTENTION, AttentionHook, HookPair, HookPointLike, OneArgumentHook
from lens_mix.hooks.mixing import check_mixing, mix


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
    3.1). Queries still attend to position j, but read nothing from it.

    Args:
        layer: The layer, counted from 0.
        position: The positions (of the keys) to zero, in one of these forms:
            an `int`, the same position in every example (negative: from the end);
            a list of `int` or a `slice`, several positions, zeroed together in every example;
            an integer tensor [batch], a different position in each example;
            a bool tensor [batch key], any set of positions in each example, or [key], the same set in all.
            A text is turned into a list by `MixingMap.positions` or `lens_mix.models.find_positions`.
            With cached keys, positions count from the first new one.
        positions: An older name of `position` for a list.
        heads: The query heads, as `hook_pattern` counts them, for which the value is zeroed. Other query
            heads that share the value head keep the value. None: all heads.
        attention: The name of the attention module, with `{layer}`: `"encoder.{layer}.attn"`,
            `"decoder.{layer}.attn"` or `"decoder.{layer}.cross_attn"` on HookedEncoderDecoder;
            `"encoder_blocks.{layer}.attn"`, `"decoder_blocks.{layer}.self_attn"` or
            `"decoder_blocks.{layer}.cross_attn"` on TransformerBridge.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: Here or in the pass: a position or a head that does not exist, or a tensor for another
            batch.
        RuntimeError: In the pass, if the chosen heads share values: no pattern fired, or an error of
            `replace_pattern`.

    Example:
        ```python
        from lens_mix.hooks import zero_values

        clean = model(tokens)
        without_2 = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, 2)])
        without_span = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, slice(1, 4))])
        in_two_heads = model.run_with_hooks(tokens, fwd_hooks=[zero_values(1, 2, heads=[0, 3])])
        ```
    """
    chosen = read_position(position, positions)
    if heads is None:
        return _ZeroValues(layer, attention, chosen)._make_pair()
    return _ZeroValuesOfHeads(layer, attention, chosen, read_heads(heads))._make_pair()


def zero_queries(layer: int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Replace one layer's query vectors by zeros, so that the pattern depends on no token.

    All scores are then 0, except for a position bias (ALiBi, T5). Without such a bias the pattern is uniform
    over the keys that the mask allows. A key that has no weight in any head is a masked key.

    Args:
        layer: The layer, counted from 0.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Example:
        ```python
        from lens_mix.hooks import record, zero_queries

        store = {}
        hooks = [zero_queries(0), record(store, "blocks.0.attn.hook_pattern")]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        allowed = (store["blocks.0.attn.hook_pattern"] != 0).any(dim=1)  # [batch query key]
        ```
    """
    return _ZeroQueries(layer, attention)._make_pair()


class _ZeroQueries(AttentionHook):
    points = ("queries",)

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor:
        self.calls += 1
        return torch.zeros_like(tensor)


class _ZeroValues(OneArgumentHook):
    points: tuple[str, ...] = ("values",)

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor | None:
        changed = self._zeroed(values)
        self.calls += 1
        return changed

    def _zeroed(self, values: Tensor) -> Tensor:
        return values.masked_fill(make_position_mask(self._argument, values)[:, :, None, None], 0)


class _ZeroValuesOfHeads(_ZeroValues):
    points = ("queries", "values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, position: Chosen, heads: tuple[int, ...]) -> None:
        super().__init__(layer, attention, position)
        self._heads = heads
        self._is_done = False

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor | None:
        # If each query head has its own value head, the values can be zeroed here. If they are shared, or the
        # number of query heads is unknown, `on_mixed` computes z again from the pattern.
        self._is_done = n_heads == values.shape[2]
        if not self._is_done:
            return None
        check_heads(self._heads, values.shape[2])
        heads, changed = list(self._heads), values.clone()
        changed[:, :, heads] = self._zeroed(values[:, :, heads])
        self.calls += 1
        return changed

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if self._is_done:
            return None
        check_heads(self._heads, mixed.shape[2])
        if pattern is None or pattern.shape[1] != mixed.shape[2]:
            raise RuntimeError(
                f"heads: expected {self.module}.hook_pattern to fire before hook_z; it did not fire in this "
                "pass. Query heads share values there, and zeroing them for some heads needs the pattern"
            )
        heads = list(self._heads)
        pattern, group = pattern[:, heads], [head * values.shape[2] // mixed.shape[2] for head in heads]
        check_mixing("heads", mixed[:, :, heads], pattern, values[:, :, group])
        changed = mixed.clone()
        changed[:, :, heads] = mix(pattern, self._zeroed(values[:, :, group])).to(mixed.dtype)
        self.calls += 1
        return changed
