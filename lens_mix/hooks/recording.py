"""Record the named activations of a pass, and no others; or call a function with each pattern."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import check_choice, check_flags, check_instance, check_items, describe_value
from lens_mix.hooks.base import (
    DEFAULT_ATTENTION,
    AttentionHook,
    HookFunction,
    HookPair,
    HookPointLike,
    attention_module,
)

# Role -> name of the hook point inside the attention module.
ATTENTION_ROLES = {"query": "hook_q", "value": "hook_v", "pattern": "hook_pattern", "z": "hook_z"}
RESID_PRE = "resid_pre"  # the residual stream that enters the block; its hook point is outside of attention
# The axis of the query positions in each tensor. Values have none, because their positions are keys.
_QUERY_AXIS = {"query": 1, "pattern": 2, "z": 1, RESID_PRE: 1}


def record(
    store: MutableMapping[str, Tensor],
    name: str,
    *,
    detach: bool = True,
    select: Callable[[Tensor], Tensor] | None = None,
) -> HookPair:
    """Store one activation of a pass in a dict, under the given name.

    Names are those of TransformerLens's `run_with_cache`. The guide on hooks lists which tensor each name
    means on which model class. A name may be an alias (`hook_resid_pre`), and is then the key in the dict
    too. The tensor is not copied, as in TransformerLens's own cache, so a hook that changes it in place
    changes the recorded tensor. `calls` stays 0 if a TransformerBridge of TransformerLens 3 ignores an
    unknown name, or computes no pattern.

    Args:
        store: The dict to fill; each pass overwrites the tensors of the last one.
        name: The hook point, as `"blocks.0.hook_resid_pre"`.
        detach: Whether to detach the tensor from the autograd graph. Use False to differentiate with respect
            to it.
        select: A function that returns the piece of the tensor to store, as `lambda pattern:
            pattern[:, :, -1]` for the last query's row. A view is copied, so that the whole tensor can be
            freed. The pass does not continue with the piece: to differentiate with respect to an activation,
            record all of it. None: the whole tensor.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `store` is not a dict, or `name` is not a string; in the pass: the activation, or the
            result of `select`, is not a tensor.

    Example:
        ```python
        from lens_mix.hooks import record

        store = {}
        hooks = [record(store, "blocks.0.hook_resid_pre"), record(store, "blocks.0.attn.hook_v")]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        values = store["blocks.0.attn.hook_v"]  # [batch position head d_head]
        ```
    """
    _check_store(store)
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of one hook point; got {name!r}")
    check_flags(detach=detach)
    if select is not None:
        check_instance("select", select, Callable, "a function of the activation")
    return name, _Recorder(store, name, detach, select)


def record_all(
    store: MutableMapping[str, Tensor], names: Iterable[str], *, detach: bool = True
) -> list[HookPair]:
    """Store several activations of a pass in a dict, each under its name.

    Args:
        store: The dict to fill, as in `record`.
        names: The hook points, as in `record`.
        detach: Whether to detach the tensors from the autograd graph.

    Returns:
        One pair per name, in their order.

    Raises:
        TypeError: As in `record`, or `names` is one string instead of several.

    Example:
        ```python
        from lens_mix.hooks import record_all

        store = {}
        names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
        model.run_with_hooks(tokens, fwd_hooks=record_all(store, names))
        ```
    """
    listed = check_items("names", names, "several names (use record for one)")
    return [record(store, name, detach=detach) for name in listed]


def record_attention(
    layer: int,
    store: MutableMapping[str, Tensor],
    roles: Iterable[str],
    *,
    queries: Int[Tensor, "batch query"] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> list[HookPair]:
    """Store some of the tensors that one layer's attention reads or computes.

    Args:
        layer: The layer, counted from 0.
        store: The dict to fill; its keys are TransformerLens's names.
        roles: Some of "query", "value", "pattern", "z", and "resid_pre" for the stream that enters the block.
        queries: The query positions to keep in each example; values are kept for all positions. None: all.
        attention: The module's name, as in `zero_values`.

    Returns:
        One pair per role, in their order.

    Raises:
        TypeError: `queries` is not an integer tensor [batch query].
        ValueError: An unknown role.

    Example:
        ```python
        from lens_mix.hooks import record_attention

        store = {}
        hooks = record_attention(0, store, ["pattern", "value"])
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        pattern = store["blocks.0.attn.hook_pattern"]  # [batch head query key]
        ```
    """
    pairs = []
    if queries is not None:
        is_index = (
            isinstance(queries, Tensor) and queries.ndim == 2 and queries.dtype in (torch.int64, torch.int32)
        )
        if not is_index:
            raise TypeError(
                f"queries: expected an integer tensor [batch query]; got {describe_value(queries)}"
            )
    points, module = {**ATTENTION_ROLES, RESID_PRE: "hook_resid_pre"}, attention_module(layer, attention)
    for role in check_items("roles", roles, f"some of {sorted(points)}"):
        check_choice("roles", role, points)
        select = None
        if queries is not None and role in _QUERY_AXIS:
            select = functools.partial(_select_queries, queries=queries, axis=_QUERY_AXIS[role])
        name = f"{module.rpartition('.')[0] if role == RESID_PRE else module}.{points[role]}"
        pairs.append(record(store, name, select=select))
    return pairs


def record_mixing(
    layer: int, store: MutableMapping[str, Tensor], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Store one layer's pattern, values and z, with their gradients and in the same layout on every class.

    The store then has `hook_pattern` [batch head query key], `hook_v` [batch key value_head d_head] and
    `hook_z` [batch query head d_head] of the module. (`record` stores the layout of the model class.) The
    tensors stay in the autograd graph, and the pass continues with this z, so that the logits can be
    differentiated with respect to it. `calls` stays 0 if a TransformerBridge leaves attention to
    transformers, which shows the pattern after the mixing, or never.

    Args:
        layer: The layer, counted from 0.
        store: The dict to fill; each pass overwrites the tensors of the last one.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `store` is not a dict.

    Example:
        ```python
        import torch

        from lens_mix.hooks import record_mixing

        store = {}
        logits = model.run_with_hooks(tokens, fwd_hooks=[record_mixing(0, store)])
        z = store["blocks.0.attn.hook_z"]  # [batch query head d_head]
        (gradient,) = torch.autograd.grad(logits[:, -1].max(dim=-1).values.sum(), z)
        ```
    """
    _check_store(store)
    return _RecordMixing(layer, attention, store)._make_pair()


def watch_pattern(
    layer: int,
    watch: Callable[[Float[Tensor, "batch head query key"]], object],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Call a function with one layer's attention pattern, and change nothing.

    `record` keeps the whole pattern in memory; a function can keep a number or a row of it instead, which
    matters for long prompts. `calls` stays 0 if a TransformerBridge leaves attention to a kernel that
    computes no pattern.

    Args:
        layer: The layer, counted from 0.
        watch: A function that is called in each pass with the pattern [batch head query key], detached from
            its gradient. Its result is ignored.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `watch` cannot be called.

    Example:
        ```python
        from lens_mix.hooks import watch_pattern

        first_token = []  # how much each head attends to the first token, on average
        hook = watch_pattern(0, lambda pattern: first_token.append(pattern[:, :, 1:, 0].mean(dim=2)))
        model.run_with_hooks(tokens, fwd_hooks=[hook])
        ```
    """
    check_instance("watch", watch, Callable, "a function of the pattern")
    name = f"{attention_module(layer, attention)}.hook_pattern"
    return name, _Watch(name, watch)


def _check_store(store: object) -> None:
    if not isinstance(store, MutableMapping):
        raise TypeError(f"store: expected a dict to fill; got {type(store).__name__}")


def _select_queries(tensor: Tensor, *, queries: Int[Tensor, "batch query"], axis: int) -> Tensor:
    batch = torch.arange(len(tensor), device=tensor.device)[:, None]
    return tensor.movedim(axis, 1)[batch, queries].movedim(1, axis)


@dataclasses.dataclass(repr=False, eq=False)
class _Recorder(HookFunction):
    store: MutableMapping[str, Tensor]
    name: str
    detach: bool
    select: Callable[[Tensor], Tensor] | None

    def __repr__(self) -> str:
        return f"record({self.name})"

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        stored = self._check_tensor("a tensor to record", tensor)
        stored = stored.detach() if self.detach else stored
        if self.select is not None:
            selected = self._check_tensor("select to return a tensor", self.select(stored))
            # A view of some rows would keep the memory of all rows.
            is_view = selected.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            stored = selected.clone() if is_view else selected
        self.store[self.name] = stored
        self.calls += 1
        # TransformerBridge may show a rearranged copy. It gets a gradient only if the pass continues with it.
        shows_copy = getattr(hook, "hook_conversion", None) is not None
        return tensor if shows_copy and not self.detach else None

    def _check_tensor(self, expected: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}: expected {expected}; got {type(value).__name__}")
        return value


class _RecordMixing(AttentionHook):
    points = ("values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, store: MutableMapping[str, Tensor]) -> None:
        super().__init__(layer, attention)
        self._store = store

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor:
        # TransformerBridge shows a rearranged copy. It gets a gradient only if the pass continues with it.
        return values

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if pattern is None:
            return None
        for name, tensor in (("hook_pattern", pattern), ("hook_v", values), ("hook_z", mixed)):
            self._store[f"{self.module}.{name}"] = tensor
        self.calls += 1
        # z with its heads split may be a view, which gets a gradient only if the pass continues with it.
        return mixed


@dataclasses.dataclass(repr=False, eq=False)
class _Watch(HookFunction):
    name: str
    watch: Callable[[Tensor], object]

    def __repr__(self) -> str:
        return f"watch({self.name})"

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> None:
        self.watch(tensor.detach())
        self.calls += 1
