"""Replace, freeze or add to attention patterns, on models of every kind.

All act on `hook_z`, the values mixed by the pattern (z = pattern @ values), and never on `hook_pattern`, as
the hooks of `lens_mix.hooks.heads` do and for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks._arguments import as_patterns
from lens_mix.hooks.attention import DEFAULT_ATTENTION, AttentionHook, attention_module
from lens_mix.hooks.function import HookPair
from lens_mix.hooks.mixing import check_mixing, mix


def replace_pattern(
    layer: int,
    pattern: Float[Tensor, "*batch head query key"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Use a given attention pattern in one layer: z = pattern @ values, with the values of the running pass.

    The pattern is used as it is: it is not masked, and its rows need not sum to one. Gradients reach both the
    pattern and the values, so that a leaf put in here is differentiated on every model.

    Args:
        layer: the layer, from 0.
        pattern: [head query key] for every batch row, or [batch head query key]; one pattern per QUERY head.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

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
    replacement = _ReplacePattern(layer, attention, "pattern", pattern)
    return replacement.matches, replacement


def freeze_pattern(
    layer: int,
    source: Mapping[str, Tensor] | Tensor | Any,
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Hold one layer's attention pattern at its value of an earlier pass, while the inputs change.

    `replace_pattern` with the pattern looked up by name and cut off from its gradient: a frozen pattern is a
    constant, as the "frozen" attention of circuit analysis means it.

    Args:
        layer: the layer, from 0.
        source: where the pattern [batch head query key] is: a dict filled by `record`, a TransformerLens
            ActivationCache, or the tensor itself.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: `source` is neither a tensor nor a mapping of names.
        ValueError: `source` does not hold this layer's `hook_pattern`; further as `replace_pattern`.
        RuntimeError: as `replace_pattern`.

    Example:
        ```python
        from lens_mix.hooks import freeze_pattern

        _, cache = model.run_with_cache(tokens)
        other = tokens.roll(1, dims=-1)
        frozen = model.run_with_hooks(other, fwd_hooks=[freeze_pattern(0, cache), freeze_pattern(1, cache)])
        ```
    """
    if isinstance(source, Tensor):
        pattern = source
    elif hasattr(source, "keys") and hasattr(source, "__getitem__"):
        name = f"{attention_module(layer, attention)}.hook_pattern"
        names = sorted(map(str, source.keys()))
        if name not in names:
            held = [one for one in names if one.endswith("hook_pattern")] or names
            raise ValueError(
                f"source: expected it to hold {name}; got {', '.join(held[:8]) or 'nothing'}. Where "
                "attention is left to transformers, the pattern fires only with eager attention"
            )
        pattern = source[name]
    else:
        raise TypeError(
            "source: expected a tensor, a dict filled by record, or an ActivationCache; got "
            f"{type(source).__name__}"
        )
    frozen = _ReplacePattern(layer, attention, "source", as_patterns("source", pattern).detach())
    return frozen.matches, frozen


def add_to_pattern(
    layer: int,
    addition: Float[Tensor, "*batch head query key"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Add to one layer's attention pattern: z + addition @ values, with z and values of the running pass.

    The pattern itself need not be known, and stays a function of what lies below: with a leaf of zeros in
    every layer, one backward pass gives the total derivative by every pattern. A negative addition takes
    away; rows then no longer sum to one.

    Args:
        layer: the layer, from 0.
        addition: [head query key] for every batch row, or [batch head query key]; per QUERY head.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

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
    added = _AddToPattern(layer, attention, "addition", addition)
    return added.matches, added


class _ReplacePattern(AttentionHook):
    points = ("values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, argument: str, pattern: Tensor) -> None:
        super().__init__(layer, attention)
        self._argument = argument
        self._given = as_patterns(argument, pattern)

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        batch, query, head = mixed.shape[:3]
        expected = (head, query, values.shape[1])
        if tuple(self._given.shape[1:]) != expected or self._given.shape[0] not in (1, batch):
            raise ValueError(
                f"{self._argument}: expected [head query key] = {list(expected)}, alone or for a batch of "
                f"{batch}; got shape {list(self._given.shape)}"
            )
        if pattern is not None:
            check_mixing(self._argument, mixed, pattern, values)
        self.calls += 1
        return mix(self._given.to(values).expand(batch, -1, -1, -1), values)


class _AddToPattern(_ReplacePattern):
    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        return mixed + super().on_mixed(mixed, values, pattern).to(mixed.dtype)
