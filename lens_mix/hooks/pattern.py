"""Change attention patterns, or what single heads pass on, on models of every kind.

All act on `hook_z`, the values mixed by the pattern (z = pattern @ values), and never on `hook_pattern`:
where a TransformerBridge leaves attention to transformers, an edit of `hook_pattern` is discarded, and with a
fused attention kernel that point does not even fire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import instance, plain_tensor
from lens_mix.hooks._arguments import as_heads, as_patterns, check_heads
from lens_mix.hooks.base import DEFAULT_ATTENTION, GivenHook, HookPair, HookPointLike, attention_module
from lens_mix.hooks.mixing import check_mixing, mix


def scale_pattern(
    layer: int,
    factor: float | int | Float[Tensor, ""] | Float[Tensor, " head"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Multiply one layer's attention pattern by a factor; rows then no longer sum to one.

    z is linear in the pattern, so z is scaled: the same number, on every model. Twice 0.5 is 0.25.

    Args:
        layer, attention: as in `zero_values`.
        factor: a number, or one per query head [head]. A tensor that requires grad gets its gradient. For a
            factor per query and key use `replace_pattern`.

    Raises:
        TypeError: `factor` is no real number and no tensor of real numbers.
        ValueError: `factor` is not finite, or has other dimensions; in the pass: not one per query head.

    Example:
        ```python
        from lens_mix.hooks import scale_pattern

        halved = model.run_with_hooks(tokens, fwd_hooks=[scale_pattern(0, 0.5)])
        ```
    """
    if isinstance(factor, bool) or not isinstance(factor, Tensor | float | int):
        raise TypeError(f"factor: expected a number or a tensor [head]; got {factor!r}")
    if isinstance(factor, Tensor):
        if factor.dtype == torch.bool or factor.is_complex():
            raise TypeError(f"factor: expected real numbers; got a tensor of {factor.dtype}")
        if factor.ndim > 1:
            raise ValueError(
                f"factor: expected a number or a tensor [head]; got shape {tuple(factor.shape)} "
                "(for a factor per query and key use replace_pattern)"
            )
        if not bool(torch.isfinite(plain_tensor("factor", factor)).all()):
            raise ValueError("factor: expected finite numbers; got NaN or infinity")
        if factor.ndim == 1:
            return _ScalePatternPerHead(layer, attention, factor)._pair()
    elif not math.isfinite(factor):
        raise ValueError(f"factor: expected a finite number; got {factor}")
    return _ScalePattern(layer, attention, factor)._pair()


def prune_heads(layer: int, heads: Iterable[int] | int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Remove attention heads: their z is zero, so that they add nothing to the attention output but its bias.

    Args:
        layer, attention: as in `zero_values`.
        heads: the query heads to remove, from 0.

    Raises:
        TypeError, ValueError: `heads` holds no integers, or none; in the pass: one the model does not have.

    Example:
        ```python
        from lens_mix.hooks import prune_heads

        logits = model.run_with_hooks(tokens, fwd_hooks=[prune_heads(0, [1, 2]), prune_heads(1, 0)])
        ```
    """
    return _PruneHeads(layer, attention, as_heads(heads))._pair()


def replace_pattern(
    layer: int, pattern: Float[Tensor, "*batch head query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Use a given attention pattern in one layer: z = pattern @ values, with the values of the running pass.

    The pattern is used as it is: it is not masked, and its rows need not sum to one. Gradients reach both the
    pattern and the values, so that a leaf put in here is differentiated on every model.

    Args:
        layer, attention: as in `zero_values`.
        pattern: [head query key] for every batch row, or [batch head query key]; one pattern per QUERY head.

    Raises:
        TypeError: `pattern` is no tensor of real numbers.
        ValueError: here or in the pass: other dimensions, heads, positions or batch than the model's.
        RuntimeError: in the pass: the model's own `pattern @ values` is not `hook_z` (where `hook_pattern`
            fires before it; elsewhere this cannot be seen).

    Example:
        ```python
        from lens_mix.hooks import record, replace_pattern

        store = {}
        model.run_with_hooks(tokens, fwd_hooks=[record(store, "blocks.0.attn.hook_pattern")])
        leaf = store["blocks.0.attn.hook_pattern"].clone().requires_grad_()
        logits = model.run_with_hooks(tokens, fwd_hooks=[replace_pattern(0, leaf)])
        logits[:, -1].max(dim=-1).values.sum().backward()
        influence = leaf.grad * leaf
        ```
    """
    return _ReplacePattern(layer, attention, "pattern", pattern)._pair()


def freeze_pattern(
    layer: int,
    source: Mapping[str, Tensor] | Tensor | Any,
    *,
    edit: Callable[[Float[Tensor, "batch head query key"]], Tensor] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Hold one layer's attention pattern at its value of an earlier pass, while the inputs change.

    `replace_pattern` with the pattern looked up by name and cut off from its gradient: a frozen pattern is a
    constant, as the "frozen" attention of circuit analysis means it.

    Args:
        layer, attention: as in `zero_values`.
        source: where the pattern [batch head query key] is: a dict filled by `record`, a TransformerLens
            ActivationCache, or the tensor itself.
        edit: what mixes the values in its place, as a function of the frozen pattern: `lambda pattern:
            pattern * kept` keeps some cells only. It is called in the pass, so that of many layers only one
            edited pattern lives at a time. None: the pattern as it is.

    Raises:
        TypeError, ValueError: `source` is neither tensor nor mapping, or has no `hook_pattern` of this layer;
            `edit` can't be called; of the pattern and of what `edit` gives as `replace_pattern`, as is
            RuntimeError.

    Example:
        ```python
        from lens_mix.hooks import freeze_pattern

        _, cache = model.run_with_cache(tokens)
        other = tokens.roll(1, dims=-1)
        frozen = model.run_with_hooks(other, fwd_hooks=[freeze_pattern(0, cache), freeze_pattern(1, cache)])
        ```
    """
    if not isinstance(source, Tensor):
        if not (hasattr(source, "keys") and hasattr(source, "__getitem__")):
            raise TypeError(
                "source: expected a tensor, a dict filled by record, or an ActivationCache; got "
                f"{type(source).__name__}"
            )
        name = f"{attention_module(layer, attention)}.hook_pattern"
        names = sorted(map(str, source.keys()))
        if name not in names:
            held = [one for one in names if one.endswith("hook_pattern")] or names
            raise ValueError(
                f"source: expected it to hold {name}; got {', '.join(held[:8]) or 'nothing'}. Where "
                "attention is left to transformers, the pattern fires only with eager attention"
            )
        source = source[name]
    if edit is not None:
        instance("edit", edit, Callable, "a function of the pattern")
    frozen = as_patterns("source", source).detach()
    return _ReplacePattern(layer, attention, "source" if edit is None else "edit", frozen, edit)._pair()


def add_to_pattern(
    layer: int, addition: Float[Tensor, "*batch head query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Add to one layer's attention pattern: z + addition @ values, with z and values of the running pass.

    The pattern itself need not be known, and stays a function of what lies below: with a leaf of zeros in
    every layer, one backward pass gives the total derivative by every pattern. A negative addition takes
    away; rows then no longer sum to one.

    Args:
        layer, attention: as in `zero_values`.
        addition: [head query key] for every batch row, or [batch head query key]; per QUERY head.

    Raises:
        TypeError, ValueError, RuntimeError: as `replace_pattern`, of the addition.

    Example:
        ```python
        import torch

        from lens_mix.hooks import add_to_pattern

        heads, length = model.cfg.n_heads, tokens.shape[1]
        leaves = [torch.zeros(len(tokens), heads, length, length, requires_grad=True) for _ in range(2)]
        hooks = [add_to_pattern(layer, leaf) for layer, leaf in enumerate(leaves)]
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        gradients = torch.autograd.grad(logits[:, -1].max(dim=-1).values.sum(), leaves)
        ```
    """
    return _AddToPattern(layer, attention, "addition", addition)._pair()


class _ScalePattern(GivenHook):
    points = ("mixed",)

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor:
        factor = self._given
        self.calls += 1
        return tensor * (factor.to(tensor) if isinstance(factor, Tensor) else factor)


class _ScalePatternPerHead(GivenHook):
    points = ("values", "mixed")

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        n_heads, n_factors = mixed.shape[2], len(self._given)
        if n_factors != n_heads:
            raise ValueError(
                f"factor: expected one number for each of {n_heads} query heads; got {n_factors}"
            )
        self.calls += 1
        return mixed * self._given.to(mixed)[:, None]


class _PruneHeads(GivenHook):
    points = ("values", "mixed")

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        check_heads(self._given, mixed.shape[2])
        edited = mixed.clone()
        edited[:, :, list(self._given)] = 0
        self.calls += 1
        return edited


class _ReplacePattern(GivenHook):
    points = ("values", "pattern", "mixed")

    def __init__(
        self,
        layer: int,
        attention: str,
        argument: str,
        pattern: Tensor,
        edit: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(layer, attention, as_patterns(argument, pattern))
        self._name, self._edit = argument, edit

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        batch, query, head = mixed.shape[:3]
        given, expected = self._given, (head, query, values.shape[1])
        if self._edit is not None:
            # A copy: an edit in place would reach the user's cache, and add up from pass to pass.
            given = as_patterns(self._name, self._edit(given.clone()))
        if tuple(given.shape[1:]) != expected or given.shape[0] not in (1, batch):
            raise ValueError(
                f"{self._name}: expected [head query key] = {list(expected)}, alone or for a batch of "
                f"{batch}; got shape {list(given.shape)}"
            )
        if pattern is not None:
            check_mixing(self._name, mixed, pattern, values)
        self.calls += 1
        return mix(given.to(values).expand(batch, -1, -1, -1), values)


class _AddToPattern(_ReplacePattern):
    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        return mixed + super().on_mixed(mixed, values, pattern).to(mixed.dtype)
