"""Zero value or query vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lens_mix.hooks._arguments import Chosen, Position, as_heads, as_position, check_heads, position_mask
from lens_mix.hooks.base import DEFAULT_ATTENTION, AttentionHook, GivenHook, HookPair, HookPointLike
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

    Raises:
        TypeError: an argument of the wrong kind, here.
        ValueError: here or in the pass: a position or head there is not, a tensor of another batch.
        RuntimeError: in the pass, for heads that share values: as `replace_pattern`, or no pattern fired.

    Example:
        ```python
        from lens_mix.hooks import zero_values

        clean = model(tokens)
        without_2 = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, 2)])
        without_span = model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, slice(1, 4))])
        in_two_heads = model.run_with_hooks(tokens, fwd_hooks=[zero_values(1, 2, heads=[0, 3])])
        ```
    """
    chosen = as_position(position, positions)
    if heads is None:
        return _ZeroValues(layer, attention, chosen)._pair()
    return _ZeroValuesOfHeads(layer, attention, chosen, as_heads(heads))._pair()


def zero_queries(layer: int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Replace one layer's query vectors by zeros: all scores are then 0, but for a bias of the position.

    The pattern that is left depends on no token: uniform over the keys that the mask allows, or what a bias
    by position (ALiBi, T5) makes of it. A key without any weight in any head is then masked.

    Example:
        ```python
        from lens_mix.hooks import record, zero_queries

        store = {}
        hooks = [zero_queries(0), record(store, "blocks.0.attn.hook_pattern")]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        allowed = (store["blocks.0.attn.hook_pattern"] != 0).any(dim=1)  # [batch query key]
        ```
    """
    return _ZeroQueries(layer, attention)._pair()


class _ZeroQueries(AttentionHook):
    points = ("queries",)

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor:
        self.calls += 1
        return torch.zeros_like(tensor)


class _ZeroValues(GivenHook):
    points: tuple[str, ...] = ("values",)

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor | None:
        edited = self._zeroed(values)
        self.calls += 1
        return edited

    def _zeroed(self, values: Tensor) -> Tensor:
        return values.masked_fill(position_mask(self._given, values)[:, :, None, None], 0)


class _ZeroValuesOfHeads(_ZeroValues):
    points = ("queries", "values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, position: Chosen, heads: tuple[int, ...]) -> None:
        super().__init__(layer, attention, position)
        self._heads = heads
        self._done = False

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor | None:
        # the number of query heads tells whether each has its own value; if unknown, the pattern must help
        self._done = n_heads == values.shape[2]
        if not self._done:
            return None
        check_heads(self._heads, values.shape[2])
        heads, edited = list(self._heads), values.clone()
        edited[:, :, heads] = self._zeroed(values[:, :, heads])
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
        pattern, group = pattern[:, heads], [head * values.shape[2] // mixed.shape[2] for head in heads]
        check_mixing("heads", mixed[:, :, heads], pattern, values[:, :, group])
        edited = mixed.clone()
        edited[:, :, heads] = mix(pattern, self._zeroed(values[:, :, group])).to(mixed.dtype)
        self.calls += 1
        return edited
