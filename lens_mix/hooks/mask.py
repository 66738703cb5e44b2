"""Hide keys from queries, as an attention mask would: their weight is shared out among the other keys.

What is left of a row depends on the row, so the pattern itself is edited, and z has to be what it then makes:
where a model mixes before its pattern shows, or ignores the edit, that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.hooks._arguments import Position, as_mask, as_position, position_mask
from lens_mix.hooks.base import DEFAULT_ATTENTION, GivenHook, HookPair
from lens_mix.hooks.mixing import check_mixing, sink, visible


def mask_attention(
    layer: int, allowed: Bool[Tensor, "*axes query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Each query attends only to the keys that it is allowed in one layer (attention knockout).

    What scores of -inf before the softmax do (Geva et al., EMNLP 2023, arXiv 2304.14767): p_ik / Σ_j p_ij
    over the allowed keys j, with the pattern of the running pass, whose own mask stays. The weight that a row
    gives to no key (the share of an attention sink) counts as a key that stays. If it is below 1e-6 in all
    rows of a head (float16: 2e-3, bfloat16: 1.6e-2), it is taken for rounding.

    Args:
        layer, attention: as in `zero_values`.
        allowed: True where a query may attend to a key: [query key], [head query key] or
            [batch head query key], each axis but the last two the model's or 1; per QUERY head.

    Raises:
        TypeError: `allowed` is no bool tensor.
        ValueError: here or in the pass: other dimensions, heads, positions or batch than the model's.
        RuntimeError: in the pass: a query has no weight left; as `mask_keys`.

    Example:
        ```python
        import torch

        from lens_mix.hooks import mask_attention

        allowed = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        allowed[-1, 2] = False  # the last position attends to all but position 2
        logits = model.run_with_hooks(tokens, fwd_hooks=[mask_attention(0, allowed)])
        ```
    """
    return _MaskAttention(layer, attention, as_mask("allowed", allowed))._pair()


def mask_keys(
    layer: int,
    position: Position | None = None,
    *,
    positions: Sequence[int] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """No position attends to the chosen ones in one layer: their weight goes to the other keys.

    `mask_attention` for whole keys, p_ik / (1 - Σ_j p_ij) for the keys k that stay; positions do not move up.
    A row that has no other key goes on seeing what it saw.

    Args:
        layer, position, positions, attention: as in `zero_values`.

    Raises:
        TypeError, ValueError: as `zero_values`.
        RuntimeError: in the pass: no pattern fired before `hook_z` (where a TransformerBridge leaves
            attention to transformers: give the model an attention mask instead), or `hook_z` is not
            pattern @ values.

    Example:
        ```python
        from lens_mix.hooks import mask_keys

        hidden = model.run_with_hooks(tokens, fwd_hooks=[mask_keys(0, 2), mask_keys(1, 2)])
        ```
    """
    return _MaskKeys(layer, attention, as_position(position, positions))._pair()


class _MaskAttention(GivenHook):
    points = ("values", "scores", "pattern", "mixed")
    argument = "allowed"
    _scores: Tensor | None = None  # of this pass

    def on_scores(self, scores: Float[Tensor, "batch head query key"], values: Tensor) -> None:
        self._scores = scores

    def on_pattern(
        self, pattern: Float[Tensor, "batch head query key"], values: Tensor
    ) -> Float[Tensor, "batch head query key"]:
        scores, self._scores = self._scores, None
        hidden = self._hidden(pattern, values)
        weights, to_no_key = pattern.masked_fill(hidden, 0), sink(pattern, scores)
        # Summed, not 1 minus what is hidden, which has few digits left beside a sink.
        left = weights.sum(-1, keepdim=True, dtype=to_no_key.dtype) + to_no_key
        if scores is not None:
            weights, left = _from_scores(weights, left, scores, hidden)
        self._edited = self._shared_out(pattern, weights, left).to(pattern.dtype)
        return self._edited

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> None:
        if pattern is None:
            raise RuntimeError(
                f"{self.argument}: expected {self.module}.hook_pattern to fire before hook_z, as its weights "
                "are to be shared out anew; this model leaves attention to transformers: use its attention "
                "mask"
            )
        edited = self._edited
        del self._edited
        check_mixing(self.argument, mixed, edited, values)
        self.calls += 1

    def _hidden(self, pattern: Tensor, values: Tensor) -> Bool[Tensor, "#batch #head #query key"]:
        allowed, expected = self._given.to(pattern.device), tuple(pattern.shape)
        if allowed.shape[2:] != expected[2:] or any(
            got not in (1, size) for got, size in zip(allowed.shape, expected, strict=True)
        ):
            raise ValueError(
                f"allowed: expected [batch head query key] = {list(expected)}, batch and head alone or 1; "
                f"got shape {list(allowed.shape)}"
            )
        return ~allowed

    def _shared_out(self, pattern: Tensor, weights: Tensor, left: Tensor) -> Tensor:
        if bool((left <= 0).any()):  # rows of padding that a model makes NaN stay so
            raise RuntimeError(
                f"allowed: expected every query of {self.module} to have weight at a key that it is allowed; "
                f"got none in {int((left <= 0).sum())} rows of its pattern"
            )
        return weights / left


class _MaskKeys(_MaskAttention):
    argument = "position"

    def _hidden(self, pattern: Tensor, values: Tensor) -> Bool[Tensor, "#batch #head #query key"]:
        return position_mask(self._given, values)[:, None, None]

    def _shared_out(self, pattern: Tensor, weights: Tensor, left: Tensor) -> Tensor:
        # Nowhere a division by 0: its gradient would be NaN in rows that are not taken either.
        return torch.where(left > 0, weights / torch.where(left > 0, left, 1), pattern)


def _from_scores(
    weights: Tensor, left: Tensor, scores: Tensor, hidden: Bool[Tensor, "#batch #head #query key"]
) -> tuple[Tensor, Tensor]:
    """Recompute rows that rounding has left no weight although they see another key (float16)."""
    if not bool((left <= 0).any()):
        return weights, left
    seen = visible(scores) & ~hidden
    rounded = (left <= 0) & seen.any(-1, keepdim=True)
    wide = torch.promote_types(scores.dtype, torch.float32)
    others = torch.where(rounded, scores.masked_fill(~seen, -torch.inf), 0).softmax(-1, dtype=wide)
    return torch.where(rounded, others, weights.to(wide)), torch.where(rounded, 1, left)
