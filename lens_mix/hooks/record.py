"""Record exactly the named activations of a pass, and nothing more; or look at a pattern as it passes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import flags, instance, one_of, several, shown
from lens_mix.hooks.base import (
    DEFAULT_ATTENTION,
    AttentionHook,
    HookFunction,
    HookPair,
    HookPointLike,
    attention_module,
)

# role -> TransformerLens's hook point inside the attention module
ATTENTION_ROLES = {"query": "hook_q", "value": "hook_v", "pattern": "hook_pattern", "z": "hook_z"}
RESID_PRE = "resid_pre"  # outside of it: the residual stream that enters the block
# Where these tensors have the axis of the query positions; values stand for keys.
_QUERY_AXIS = {"query": 1, "pattern": 2, "z": 1, RESID_PRE: 1}


def record(
    store: MutableMapping[str, Tensor],
    name: str,
    *,
    detach: bool = True,
    select: Callable[[Tensor], Tensor] | None = None,
) -> HookPair:
    """Keep one activation of a pass in a dict, under the name it was asked by.

    Names are those of TransformerLens's `run_with_cache`; which of them holds what on which class is in
    hooks/README.md. A name may be an alias (`hook_resid_pre`): the store keeps the alias. The tensor is not
    copied, as in TransformerLens's own cache: a hook that edits it in place edits what was recorded. `calls`
    stays 0 where a TransformerBridge of TransformerLens 3 ignores an unknown name, or computes no pattern.

    Args:
        store: the dict to fill; each pass overwrites what the last one kept.
        name: the hook point, as `"blocks.0.hook_resid_pre"`.
        detach: cut the tensor off from its gradient; False keeps the graph, to differentiate by it.
        select: what is kept of the tensor, as `lambda pattern: pattern[:, :, -1]` for the last query's row.
            A view is copied, so that the whole tensor can be freed. The pass does not go on from the part: to
            differentiate BY an activation, record all of it. None: the whole tensor.

    Raises:
        TypeError: `store` is no dict, or `name` no string; in the pass: the activation (or what is selected
            of it) is no tensor.

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
    flags(detach=detach)
    if select is not None:
        instance("select", select, Callable, "a function of the activation")
    return name, _Record(store, name, detach, select)


def record_all(
    store: MutableMapping[str, Tensor], names: Iterable[str], *, detach: bool = True
) -> list[HookPair]:
    """`record` for several names: one pair each, in their order.

    Raises:
        TypeError: as `record`, or `names` is a string, which would be read letter by letter.

    Example:
        ```python
        from lens_mix.hooks import record_all

        store = {}
        names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
        model.run_with_hooks(tokens, fwd_hooks=record_all(store, names))
        ```
    """
    listed = several("names", names, "several names (use record for one)")
    return [record(store, name, detach=detach) for name in listed]


def record_attention(
    layer: int,
    store: MutableMapping[str, Tensor],
    roles: Iterable[str],
    *,
    queries: Int[Tensor, "batch query"] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> list[HookPair]:
    """`record` for what one layer's attention reads and makes, by what it is: one pair per role.

    Args:
        layer, attention: as in `zero_values`.
        store: the dict to fill, by TransformerLens's names.
        roles: some of "query", "value", "pattern", "z" and "resid_pre", the stream that enters the block.
        queries: positions of the rows to keep of each prompt; values are kept for all positions. None: all.

    Raises:
        ValueError: an unknown role.

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
        whole = (
            isinstance(queries, Tensor) and queries.ndim == 2 and queries.dtype in (torch.int64, torch.int32)
        )
        if not whole:
            raise TypeError(f"queries: expected an integer tensor [batch query]; got {shown(queries)}")
    points, module = {**ATTENTION_ROLES, RESID_PRE: "hook_resid_pre"}, attention_module(layer, attention)
    for role in several("roles", roles, f"some of {sorted(points)}"):
        one_of("roles", role, points)
        select = None
        if queries is not None and role in _QUERY_AXIS:
            select = functools.partial(_rows, queries=queries, axis=_QUERY_AXIS[role])
        name = f"{module.rpartition('.')[0] if role == RESID_PRE else module}.{points[role]}"
        pairs.append(record(store, name, select=select))
    return pairs


def record_mixing(
    layer: int, store: MutableMapping[str, Tensor], *, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Keep what one layer's attention mixed, z = pattern @ values, in the graph and the same on every class.

    The store then holds `hook_pattern` [batch head query key], `hook_v` [batch key value_head d_head] and
    `hook_z` [batch query head d_head] of the module, where `record` keeps the layout that a class shows. The
    pass goes on from this z, to differentiate by it. `calls` stays 0 where a TransformerBridge leaves
    attention to transformers, which show the pattern after the mixing, or never.

    Args:
        layer, attention: as in `zero_values`.
        store: the dict to fill; each pass overwrites what the last one kept.

    Raises:
        TypeError: `store` is no dict.

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
    return _RecordMixing(layer, attention, store)._pair()


def watch_pattern(
    layer: int,
    watch: Callable[[Float[Tensor, "batch head query key"]], object],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Call a function with one layer's attention pattern, to take from it what is wanted; nothing is edited.

    Where `record` would keep every pattern of a long prompt, a function that reduces each one as it passes
    keeps a number or a row. `calls` stays 0 where a TransformerBridge leaves attention to a kernel that
    computes no pattern.

    Args:
        layer, attention: as in `zero_values`.
        watch: called in each pass with the pattern [batch head query key], cut off from its gradient. What it
            returns is ignored.

    Raises:
        TypeError: `watch` can't be called.

    Example:
        ```python
        from lens_mix.hooks import watch_pattern

        first_token = []  # how much each head attends to the first token, on average
        hook = watch_pattern(0, lambda pattern: first_token.append(pattern[:, :, 1:, 0].mean(dim=2)))
        model.run_with_hooks(tokens, fwd_hooks=[hook])
        ```
    """
    instance("watch", watch, Callable, "a function of the pattern")
    name = f"{attention_module(layer, attention)}.hook_pattern"
    return name, _Watch(name, watch)


def _check_store(store: object) -> None:
    if not isinstance(store, MutableMapping):
        raise TypeError(f"store: expected a dict to fill; got {type(store).__name__}")


def _rows(tensor: Tensor, *, queries: Int[Tensor, "batch query"], axis: int) -> Tensor:
    batch = torch.arange(len(tensor), device=tensor.device)[:, None]
    return tensor.movedim(axis, 1)[batch, queries].movedim(1, axis)


@dataclasses.dataclass(repr=False, eq=False)
class _Record(HookFunction):
    store: MutableMapping[str, Tensor]
    name: str
    detach: bool
    select: Callable[[Tensor], Tensor] | None

    def __repr__(self) -> str:
        return f"record({self.name})"

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        kept = self._checked("a tensor to record", tensor)
        kept = kept.detach() if self.detach else kept
        if self.select is not None:
            part = self._checked("select to give a tensor", self.select(kept))
            # a view of some rows would hold on to the memory of all of them
            is_view = part.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
            kept = part.clone() if is_view else part
        self.store[self.name] = kept
        self.calls += 1
        # where TransformerBridge shows a rearranged copy, the pass must go on from it to give it a gradient
        shows_copy = getattr(hook, "hook_conversion", None) is not None
        return tensor if shows_copy and not self.detach else None

    def _checked(self, expected: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}: expected {expected}; got {type(value).__name__}")
        return value


class _RecordMixing(AttentionHook):
    points = ("values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, store: MutableMapping[str, Tensor]) -> None:
        super().__init__(layer, attention)
        self._store = store

    def on_values(self, values: Tensor, n_heads: int | None) -> Tensor:
        # a bridge shows a rearranged copy, which gets a gradient only where the pass goes on from it
        return values

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor | None:
        if pattern is None:
            return None
        for name, tensor in (("hook_pattern", pattern), ("hook_v", values), ("hook_z", mixed)):
            self._store[f"{self.module}.{name}"] = tensor
        self.calls += 1
        # z with its heads apart may be a view; by a view that nothing reads there is no gradient
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
