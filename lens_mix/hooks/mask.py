"""Hide keys from queries as an attention mask does: the other keys of each row get their weight.

The new weights of a row depend on its old ones, so these hooks replace the pattern itself. They then check
that z is the new pattern @ values. An error is raised if a model mixes before it shows its pattern, or
ignores the new pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.hooks._arguments import Position, make_position_mask, read_mask, read_position
from lens_mix.hooks.base import DEFAULT_ATTENTION, HookPair, OneArgumentHook
from lens_mix.hooks.mixing import check_mixing, sink, visible


def mask_attention(
    layer: int, allowed: Bool[Tensor, "*axes query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Let each query of one layer attend to its allowed keys only (attention knockout).

    The effect is that of scores of -inf before the softmax (Geva et al., EMNLP 2023, arXiv 2304.14767): the
    new weight is p_ik / Σ_j p_ij, summed over the allowed keys j. The pattern p is that of the running pass,
    so the model's own mask still applies. The weight that a row gives to no key (the share of an attention
    sink) counts as an allowed key. If it is below 1e-6 in all rows of a head (float16: 2e-3, bfloat16:
    1.6e-2), it is treated as rounding.

    Args:
        layer: The layer, counted from 0.
        allowed: True where a query may attend to a key: [query key], [head query key] or
            [batch head query key]. Heads are query heads. The axes batch and head may have size 1.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `allowed` is not a bool tensor.
        ValueError: `allowed` has a wrong number of dimensions; in the pass: its heads, positions or batch are
            not those of the model.
        RuntimeError: In the pass: a query has no weight at its allowed keys, or one of the cases of
            `mask_keys`.

    Example:
        ```python
        import torch

        from lens_mix.hooks import mask_attention

        allowed = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        allowed[-1, 2] = False  # the last position attends to all but position 2
        logits = model.run_with_hooks(tokens, fwd_hooks=[mask_attention(0, allowed)])
        ```
    """
    return _MaskAttention(layer, attention, read_mask("allowed", allowed))._make_pair()


def mask_keys(
    layer: int,
    position: Position | None = None,
    *,
    positions: Sequence[int] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Hide the chosen keys from all queries of one layer; the other keys of each row get their weight.

    This is `mask_attention` for whole keys: the new weight is p_ik / (1 - Σ_j p_ij), summed over the hidden
    keys j. The other tokens keep their positions. A row without any other key stays as it is.

    Args:
        layer: The layer, counted from 0.
        position: The keys to hide, in one of the forms of `zero_values`.
        positions: An older name of `position` for a list.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: As in `zero_values`.
        ValueError: As in `zero_values`.
        RuntimeError: In the pass: `hook_z` is not pattern @ values, or no pattern fired before `hook_z`. The
            second happens if a TransformerBridge leaves attention to transformers: give the model an
            attention mask instead.

    Example:
        ```python
        from lens_mix.hooks import mask_keys

        hidden = model.run_with_hooks(tokens, fwd_hooks=[mask_keys(0, 2), mask_keys(1, 2)])
        ```
    """
    return _MaskKeys(layer, attention, read_position(position, positions))._make_pair()


class _MaskAttention(OneArgumentHook):
    points = ("values", "scores", "pattern", "mixed")
    argument_name = "allowed"
    _scores: Tensor | None = None  # the scores of the running pass

    def on_scores(self, scores: Float[Tensor, "batch head query key"], values: Tensor) -> None:
        self._scores = scores

    def on_pattern(
        self, pattern: Float[Tensor, "batch head query key"], values: Tensor
    ) -> Float[Tensor, "batch head query key"]:
        scores, self._scores = self._scores, None
        hidden = self._find_hidden(pattern, values)
        weights, to_no_key = pattern.masked_fill(hidden, 0), sink(pattern, scores)
        # The remaining weights are summed because "1 minus the hidden weights" loses digits beside a sink.
        left = weights.sum(-1, keepdim=True, dtype=to_no_key.dtype) + to_no_key
        if scores is not None:
            weights, left = _recompute_from_scores(weights, left, scores, hidden)
        self._changed = self._normalize(pattern, weights, left).to(pattern.dtype)
        return self._changed

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> None:
        if pattern is None:
            raise RuntimeError(
                f"{self.argument_name}: expected {self.module}.hook_pattern to fire before hook_z, because "
                "its weights are rescaled; this model leaves attention to transformers: use its attention "
                "mask"
            )
        changed = self._changed
        del self._changed
        check_mixing(self.argument_name, mixed, changed, values)
        self.calls += 1

    def _find_hidden(self, pattern: Tensor, values: Tensor) -> Bool[Tensor, "#batch #head #query key"]:
        allowed: Tensor = self._argument.to(pattern.device)
        expected = tuple(pattern.shape)
        if allowed.shape[2:] != expected[2:] or any(
            got not in (1, size) for got, size in zip(allowed.shape, expected, strict=True)
        ):
            raise ValueError(
                f"allowed: expected [batch head query key] = {list(expected)}, where batch and head may also "
                f"be 1; got shape {list(allowed.shape)}"
            )
        return ~allowed

    def _normalize(self, pattern: Tensor, weights: Tensor, left: Tensor) -> Tensor:
        # A comparison with NaN is False, so rows of padding that are NaN raise no error.
        if bool((left <= 0).any()):
            raise RuntimeError(
                f"allowed: expected every query of {self.module} to have weight at a key that it is allowed; "
                f"got none in {int((left <= 0).sum())} rows of its pattern"
            )
        return weights / left


class _MaskKeys(_MaskAttention):
    argument_name = "position"

    def _find_hidden(self, pattern: Tensor, values: Tensor) -> Bool[Tensor, "#batch #head #query key"]:
        return make_position_mask(self._argument, values)[:, None, None]

    def _normalize(self, pattern: Tensor, weights: Tensor, left: Tensor) -> Tensor:
        # No division by 0 is computed, because its gradient would be NaN even in rows that are not selected.
        return torch.where(left > 0, weights / torch.where(left > 0, left, 1), pattern)


def _recompute_from_scores(
    weights: Tensor, left: Tensor, scores: Tensor, hidden: Bool[Tensor, "#batch #head #query key"]
) -> tuple[Tensor, Tensor]:
    """Recompute the rows whose remaining weights were all rounded to 0 (float16), from their scores.

    Returns:
        The weights, and their sum in each row.
    """
    if not bool((left <= 0).any()):
        return weights, left
    seen = visible(scores) & ~hidden
    rounded = (left <= 0) & seen.any(-1, keepdim=True)
    wide = torch.promote_types(scores.dtype, torch.float32)
    recomputed = torch.where(rounded, scores.masked_fill(~seen, -torch.inf), 0).softmax(-1, dtype=wide)
    return torch.where(rounded, recomputed, weights.to(wide)), torch.where(rounded, 1, left)
