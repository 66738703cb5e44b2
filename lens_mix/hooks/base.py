"""Define the base classes of hooks, the pair for `fwd_hooks=`, and the check that hooks had an effect.

Subclass `AttentionHook` for an intervention of your own; `docs/guides/hooks.md` has an example.
Nothing in this file depends on a TransformerLens release: every layout that a model class uses is accepted.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_whole_number, describe_value

DEFAULT_ATTENTION = "blocks.{layer}.attn"
"""The name of the attention module in models with one stack, with `{layer}`."""

# TransformerBridge calls a hook with its own name of the hook point. The other classes, and the bridge in
# compatibility mode, use HookedTransformer's name.
_SUFFIXES = {
    "queries": ("hook_q", "q.hook_out"),
    "values": ("hook_v", "v.hook_out"),
    "scores": ("hook_attn_scores",),
    "pattern": ("hook_pattern",),
    "mixed": ("hook_z", "o.hook_in"),
}


class HookPointLike(Protocol):
    """Describe the attribute that hooks read from the hook point that calls them."""

    name: str


class HookFunction(abc.ABC):
    """Act on one forward pass; TransformerLens calls the object as `function(tensor, hook=hook_point)`.

        >>> name, hook = lm.hooks.zero_values(0, position=2)
        >>> model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])
        >>> hook.calls

    Attributes:
        calls: How often the intervention or the recording was done; 0 if the hook had no effect.
    """

    calls: int = 0

    @abc.abstractmethod
    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        """Return the tensor that the pass continues with, or None to leave it unchanged."""


HookName = str | Callable[[str], bool]
"""The name of a hook point, or a function that returns whether a name is meant."""
HookPair = tuple[HookName, HookFunction]
"""One entry of `fwd_hooks=`: a name and a hook function."""


@contextmanager
def must_fire(*pairs: HookPair) -> Iterator[list[HookPair]]:
    """Yield the pairs as a list for `fwd_hooks=`; raise an error if one had no effect in the `with` block.

    Without this check, a hook point that does not exist may go unnoticed. Some TransformerLens releases
    ignore unknown names, and all of them accept a filter that matches nothing.

    Args:
        *pairs: Pairs that functions of `lens_mix.hooks` return.

    Raises:
        RuntimeError: At the end of the block, with the names of the hooks whose `calls` did not grow.
        TypeError: An argument is not such a pair.

    Example:
        ```python
        from lens_mix.hooks import must_fire, zero_values

        with must_fire(zero_values(0, 3)) as hooks:
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        ```
    """
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not hasattr(pair[1], "calls"):
            raise TypeError(
                f"pairs: expected pairs that functions of lens_mix.hooks return; got {describe_value(pair)}"
            )
    before = [function.calls for _, function in pairs]
    yield list(pairs)
    idle = [function for (_, function), calls in zip(pairs, before, strict=True) if function.calls == calls]
    if idle:
        raise RuntimeError(
            f"expected every hook to fire; got no call of {', '.join(map(repr, idle))}. Does the model have "
            "these hook points (see model.hook_dict), and did the pass reach them?"
        )


class AttentionHook(HookFunction):
    """Change one attention module at several of its hook points.

        >>> class HalveValues(lm.hooks.AttentionHook):
        ...     points = ("values",)
        ...
        ...     def on_values(self, values, n_heads):
        ...         return values / 2
        >>> hook = HalveValues(layer=0)
        >>> model.run_with_hooks(tokens, fwd_hooks=[(hook.matches, hook)])

    A pass reaches queries, values, scores, pattern and the mixed values (`hook_z`), in this order. At the
    last of them the hook drops the tensors of this pass, so that one hook can be used in many passes.

    A subclass names the hook points that it needs in `points`. It overrides any of `on_values`, `on_scores`,
    `on_pattern` and `on_mixed`. The pair for `fwd_hooks=` is `(hook.matches, hook)`.

    Attributes:
        points: Some of "queries", "values", "scores", "pattern" and "mixed".
        module: The name of the attention module, as "blocks.0.attn".
    """

    points: tuple[str, ...] = ()

    def __init__(self, layer: int, attention: str = DEFAULT_ATTENTION) -> None:
        self.module = attention_module(layer, attention)
        self._roles = {
            f"{self.module}.{suffix}": point for point in self.points for suffix in _SUFFIXES[point]
        }
        self._n_heads: int | None = None
        self._values: Tensor | None = None
        self._pattern: Tensor | None = None

    def __repr__(self) -> str:
        # TransformerLens stores this as the hook's name, and the repr of a tensor takes longer than the hook.
        return f"{type(self).__name__}({self.module})"

    @property
    def names(self) -> Sequence[str]:
        """Return the names that `matches` accepts, in the order of a pass; a model has only some of them."""
        return tuple(self._roles)

    def matches(self, name: str) -> bool:
        """Return whether the name belongs to one of the hook's points; the filter for `fwd_hooks=`."""
        return name in self._roles

    def _make_pair(self) -> HookPair:
        # A name is better than a filter if one is enough: TransformerLens raises an error for unknown names.
        return (next(iter(self._roles)) if len(self.points) == 1 else self.matches), self

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        """Call the `on_...` method of the hook point, and return its result in the layout of the point."""
        point = self._roles.get(hook.name)
        if point is None:
            raise ValueError(f"hook: expected one of {', '.join(self._roles)}; got {hook.name}")
        if point == "queries":
            self._n_heads = _move_positions_first(tensor, hook).shape[2]
            return None
        if point in ("scores", "pattern"):
            # Models that leave attention to transformers show both after the mixing, or never.
            if self._values is None:
                return None
            if point == "scores":
                return self.on_scores(tensor, self._values)
            self._pattern = tensor
            return self.on_pattern(tensor, self._values)
        n_heads, values, pattern = self._n_heads, self._values, self._pattern
        self._n_heads = self._values = self._pattern = None
        if point == "values":
            return self._call_values(tensor, hook, n_heads)
        if values is None:
            raise RuntimeError(
                f"{self!r}: expected {self.module}.hook_v before {hook.name} in each pass; it did not fire, "
                "or fwd_hooks has the same pair twice"
            )
        changed = self.on_mixed(_split_heads(tensor, values), values, pattern)
        return None if changed is None else changed.to(tensor.dtype).reshape(tensor.shape)

    def _call_values(self, tensor: Tensor, hook: HookPointLike, n_heads: int | None) -> Tensor | None:
        values = _move_positions_first(tensor, hook)
        changed = self.on_values(values, n_heads)
        if "mixed" in self.points:
            self._values = values
        if changed is None:
            return None
        return (changed.transpose(1, 2) if _has_heads_first(hook) else changed).to(tensor.dtype)

    def on_values(
        self, values: Float[Tensor, "batch key value_head d_head"], n_heads: int | None
    ) -> Tensor | None:
        """Return new values, or None to leave them unchanged.

        Args:
            values: The values, one per value head.
            n_heads: The number of query heads; None if the queries did not fire.
        """
        return None

    def on_scores(
        self,
        scores: Float[Tensor, "batch head query key"],
        values: Float[Tensor, "batch key value_head d_head"],
    ) -> Tensor | None:
        """Return new scores, or None to leave them unchanged; some models never show them before the mixing.

        Args:
            scores: The attention scores before their softmax.
            values: The values of the same pass.
        """
        return None

    def on_pattern(
        self,
        pattern: Float[Tensor, "batch head query key"],
        values: Float[Tensor, "batch key value_head d_head"],
    ) -> Tensor | None:
        """Return a new pattern, or None to leave it unchanged.

        Args:
            pattern: The pattern before it mixes the values; `on_mixed` gets this one, not the new one.
            values: The values of the same pass.
        """
        return None

    def on_mixed(
        self,
        mixed: Float[Tensor, "batch query head d_head"],
        values: Float[Tensor, "batch key value_head d_head"],
        pattern: Float[Tensor, "batch head query key"] | None,
    ) -> Tensor | None:
        """Return new mixed values, or None to leave them unchanged.

        Args:
            mixed: The mixed values z of all query heads.
            values: The values of the same pass.
            pattern: The pattern of the same pass; None if it did not fire.
        """
        return None


class OneArgumentHook(AttentionHook):
    """Change one attention module by one argument, which has been checked."""

    def __init__(self, layer: int, attention: str, argument: Any) -> None:
        super().__init__(layer, attention)
        self._argument = argument


def attention_module(layer: int, attention: str) -> str:
    """Return the name of one attention module, from the template and the number of the layer."""
    if not isinstance(attention, str):
        raise TypeError(
            f"attention: expected the name of a module, as {DEFAULT_ATTENTION!r}; got {attention!r}"
        )
    index = check_whole_number("layer", layer, 0, what="an integer")
    try:
        return attention.format(layer=index)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"attention: expected a name whose only placeholder is {{layer}}, as {DEFAULT_ATTENTION!r}; "
            f"got {attention!r}"
        ) from error


def _has_heads_first(hook: HookPointLike) -> bool:
    # Latent attention (DeepSeek) shows [batch head position d_head], and marks it by `pos_dim`.
    return getattr(hook, "pos_dim", None) == 2 and getattr(hook, "hook_conversion", None) is None


def _move_positions_first(tensor: Tensor, hook: HookPointLike) -> Float[Tensor, "batch position head d_head"]:
    """Return queries or values as [batch position head d_head], from any layout of the hook point."""
    if tensor.ndim != 4:
        raise ValueError(
            f"{hook.name}: expected a tensor [batch position head d_head]; got shape {tuple(tensor.shape)} "
            "(remove_batch_dim=True is not supported)"
        )
    # TransformerLens 3 shows the layout of latent attention without marking it. It can be recognized by its
    # strides: it is a slice of a wider, transposed tensor.
    is_slice = tensor.storage_offset() > 0 and tensor.shape[3] < tensor.stride(1) < tensor.stride(2)
    if is_slice and not hasattr(hook, "pos_dim") and getattr(hook, "hook_conversion", None) is None:
        raise ValueError(
            f"{hook.name}: expected [batch position head d_head]; got [batch head position d_head], the "
            "layout of latent attention, which needs TransformerLens 4 or later"
        )
    return tensor.transpose(1, 2) if _has_heads_first(hook) else tensor


def _split_heads(mixed: Tensor, values: Tensor) -> Float[Tensor, "batch query head d_head"]:
    """Return the mixed values per query head; TransformerBridge may show them flat, or split differently."""
    if mixed.ndim not in (3, 4) or mixed.shape[0] != values.shape[0]:
        raise ValueError(
            f"hook_z: expected [batch query head d_head] or [batch query features], batch {values.shape[0]}; "
            f"got shape {tuple(mixed.shape)}"
        )
    flat, d_head = mixed.flatten(2), values.shape[3]
    if flat.shape[2] % (d_head * values.shape[2]):
        raise ValueError(
            f"hook_z: expected a multiple of {values.shape[2]} heads of {d_head} numbers, as in hook_v; "
            f"got {flat.shape[2]} numbers"
        )
    by_head: Tensor = flat.unflatten(2, (-1, d_head))
    return by_head
