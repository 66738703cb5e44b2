"""Change attention patterns, or the outputs of single heads, on every model class.

All hooks here change `hook_z`, the values mixed by the pattern (z = pattern @ values), and never
`hook_pattern`. A TransformerBridge that leaves attention to transformers discards a new `hook_pattern`, and
with a fused attention kernel that hook point does not fire at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_dense_tensor, check_instance
from lens_mix.hooks._arguments import check_heads, read_heads, read_pattern
from lens_mix.hooks.base import DEFAULT_ATTENTION, HookPair, HookPointLike, OneArgumentHook, attention_module
from lens_mix.hooks.mixing import check_mixing, mix


def scale_pattern(
    layer: int,
    factor: float | int | Float[Tensor, ""] | Float[Tensor, " head"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Multiply one layer's attention pattern by a factor; its rows then no longer sum to one.

    z is linear in the pattern, so the hook multiplies z, which has the same effect on every model. Several
    such hooks on one layer multiply their factors.

    Args:
        layer: The layer, counted from 0.
        factor: A number, or one per query head [head]. A tensor that requires grad gets its gradient. For a
            factor per query and key use `replace_pattern`.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `factor` is neither a real number nor a tensor of real numbers.
        ValueError: `factor` is not finite, or has more than one dimension; in the pass: its length is not the
            number of query heads.

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
        if not bool(torch.isfinite(check_dense_tensor("factor", factor)).all()):
            raise ValueError("factor: expected finite numbers; got NaN or infinity")
        if factor.ndim == 1:
            return _ScalePatternPerHead(layer, attention, factor)._make_pair()
    elif not math.isfinite(factor):
        raise ValueError(f"factor: expected a finite number; got {factor}")
    return _ScalePattern(layer, attention, factor)._make_pair()


def prune_heads(layer: int, heads: Iterable[int] | int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Zero the z of some attention heads, so that they add nothing to the attention output.

    The bias of the attention output remains.

    Args:
        layer: The layer, counted from 0.
        heads: The query heads to remove, counted from 0.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `heads` contains something else than integers.
        ValueError: `heads` is empty; in the pass: the model does not have one of the heads.

    Example:
        ```python
        from lens_mix.hooks import prune_heads

        logits = model.run_with_hooks(tokens, fwd_hooks=[prune_heads(0, [1, 2]), prune_heads(1, 0)])
        ```
    """
    return _PruneHeads(layer, attention, read_heads(heads))._make_pair()


def replace_pattern(
    layer: int, pattern: Float[Tensor, "*batch head query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Use a given attention pattern in one layer: z = pattern @ values, with the values of the running pass.

    The pattern is not masked, and its rows need not sum to one. Gradients reach both the pattern and the
    values. A leaf tensor that is used as the pattern gets its gradient on every model.

    Args:
        layer: The layer, counted from 0.
        pattern: [head query key] for every example, or [batch head query key]; one pattern per query head.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `pattern` is not a tensor of real numbers.
        ValueError: `pattern` has a wrong number of dimensions; in the pass: its heads, positions or batch are
            not those of the model.
        RuntimeError: In the pass: `hook_z` is not the model's own `pattern @ values`. This is found only if
            `hook_pattern` fires before `hook_z`.

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
    return _ReplacePattern(layer, attention, "pattern", pattern)._make_pair()


def freeze_pattern(
    layer: int,
    source: Mapping[str, Tensor] | Tensor | Any,
    *,
    edit: Callable[[Float[Tensor, "batch head query key"]], Tensor] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Use one layer's attention pattern of an earlier pass, while the inputs change.

    This is `replace_pattern` with a pattern that is looked up by name and detached from its gradient. A
    frozen pattern is a constant, like the "frozen" attention of circuit analysis.

    Args:
        layer: The layer, counted from 0.
        source: What contains the pattern [batch head query key]: a dict filled by `record`, a TransformerLens
            ActivationCache, or the tensor itself.
        edit: A function of the frozen pattern that returns the pattern to use instead. For example,
            `lambda pattern: pattern * kept` keeps some cells only. It is called in the pass, so that only one
            layer's new pattern is in memory at a time. None: the frozen pattern is used.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `source` is neither a tensor nor a mapping, or `edit` cannot be called.
        ValueError: `source` has no `hook_pattern` of this layer. The pattern, and the result of `edit`, raise
            the errors of `replace_pattern`.
        RuntimeError: As in `replace_pattern`.

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
            patterns = [recorded for recorded in names if recorded.endswith("hook_pattern")] or names
            raise ValueError(
                f"source: expected it to contain {name}; got {', '.join(patterns[:8]) or 'nothing'}. If "
                "attention is left to transformers, the pattern fires only with eager attention"
            )
        source = source[name]
    if edit is not None:
        check_instance("edit", edit, Callable, "a function of the pattern")
    frozen = read_pattern("source", source).detach()
    return _ReplacePattern(layer, attention, "source" if edit is None else "edit", frozen, edit)._make_pair()


def add_to_pattern(
    layer: int, addition: Float[Tensor, "*batch head query key"], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Add to one layer's attention pattern: z + addition @ values, with z and values of the running pass.

    The pattern itself need not be known, and it remains a function of the layers below. With a leaf tensor
    of zeros in every layer, one backward pass computes the total derivative with respect to every pattern.
    The rows of the new pattern need not sum to one.

    Args:
        layer: The layer, counted from 0.
        addition: [head query key] for every example, or [batch head query key]; one per query head.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `addition` is not a tensor of real numbers.
        ValueError: `addition` has wrong dimensions, as in `replace_pattern`.
        RuntimeError: As in `replace_pattern`.

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
    return _AddToPattern(layer, attention, "addition", addition)._make_pair()


class _ScalePattern(OneArgumentHook):
    points = ("mixed",)

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor:
        factor = self._argument
        self.calls += 1
        return tensor * (factor.to(tensor) if isinstance(factor, Tensor) else factor)


class _ScalePatternPerHead(OneArgumentHook):
    points = ("values", "mixed")

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        factors: Tensor = self._argument
        n_heads, n_factors = mixed.shape[2], len(factors)
        if n_factors != n_heads:
            raise ValueError(
                f"factor: expected one number for each of {n_heads} query heads; got {n_factors}"
            )
        self.calls += 1
        return mixed * factors.to(mixed)[:, None]


class _PruneHeads(OneArgumentHook):
    points = ("values", "mixed")

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        check_heads(self._argument, mixed.shape[2])
        changed = mixed.clone()
        changed[:, :, list(self._argument)] = 0
        self.calls += 1
        return changed


class _ReplacePattern(OneArgumentHook):
    points = ("values", "pattern", "mixed")

    def __init__(
        self,
        layer: int,
        attention: str,
        argument: str,
        pattern: Tensor,
        edit: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(layer, attention, read_pattern(argument, pattern))
        self._argument_name, self._edit = argument, edit

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        batch, query, head = mixed.shape[:3]
        used, expected = self._argument, (head, query, values.shape[1])
        if self._edit is not None:
            # The function gets a copy, because a change in place would alter the user's cache.
            used = read_pattern(self._argument_name, self._edit(used.clone()))
        if tuple(used.shape[1:]) != expected or used.shape[0] not in (1, batch):
            raise ValueError(
                f"{self._argument_name}: expected [head query key] = {list(expected)}, alone or for a batch "
                f"of {batch}; got shape {list(used.shape)}"
            )
        if pattern is not None:
            check_mixing(self._argument_name, mixed, pattern, values)
        self.calls += 1
        return mix(used.to(values).expand(batch, -1, -1, -1), values)


class _AddToPattern(_ReplacePattern):
    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        return mixed + super().on_mixed(mixed, values, pattern).to(mixed.dtype)
