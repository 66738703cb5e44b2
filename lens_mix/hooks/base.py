"""What hooks are made of: a function that counts its calls, its pair for `fwd_hooks=`, edits of attention.

Subclass `AttentionHook` for an edit of your own; docs and examples are in the cookbook, `hooks/README.md`.
Nothing here knows a TransformerLens release: where classes differ in a layout, all are accepted.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import shown, whole_number

DEFAULT_ATTENTION = "blocks.{layer}.attn"

# TransformerBridge hands a hook its own name for the point, the other classes (and its compatibility mode)
# the name of HookedTransformer.
_SUFFIXES = {
    "queries": ("hook_q", "q.hook_out"),
    "values": ("hook_v", "v.hook_out"),
    "scores": ("hook_attn_scores",),
    "pattern": ("hook_pattern",),
    "mixed": ("hook_z", "o.hook_in"),
}


class HookPointLike(Protocol):
    """What hooks read of the point that calls them."""

    name: str


class HookFunction(abc.ABC):
    """A hook for a forward pass, called by TransformerLens as `function(tensor, hook=hook_point)`.

    `calls` counts how often the edit (or the recording) was done; it stays 0 while the hook has no effect.
    """

    calls: int = 0

    @abc.abstractmethod
    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        """The edited tensor; None where nothing is changed."""


HookName = str | Callable[[str], bool]
HookPair = tuple[HookName, HookFunction]  # one entry of `fwd_hooks=`


@contextmanager
def must_fire(*pairs: HookPair) -> Iterator[list[HookPair]]:
    """Yield the pairs as a list for `fwd_hooks=`, and raise if one did nothing inside the `with` block.

    A hook point that a model does not have, or never reaches, is no error everywhere: some TransformerLens
    releases ignore unknown names, and a filter that matches nothing is always legal.

    Raises:
        RuntimeError: at the end of the block, naming the hooks whose `calls` did not grow.

    Example:
        ```python
        from lens_mix.hooks import must_fire, zero_values

        with must_fire(zero_values(0, 3)) as hooks:
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        ```
    """
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not hasattr(pair[1], "calls"):
            raise TypeError(f"pairs: expected pairs that functions of lens_mix.hooks give; got {shown(pair)}")
    before = [function.calls for _, function in pairs]
    yield list(pairs)
    idle = [function for (_, function), calls in zip(pairs, before, strict=True) if function.calls == calls]
    if idle:
        raise RuntimeError(
            f"expected every hook to fire; got no call of {', '.join(map(repr, idle))}. Does the model have "
            "these hook points (see model.hook_dict), and did the pass reach them?"
        )


class AttentionHook(HookFunction):
    """Edits inside one attention module, spread over the hook points one pass goes through.

    A pass visits queries, values, scores, pattern, and the mixed values (`hook_z`), in this order. What is
    kept on the way is dropped at the last of them, so that one hook serves many passes.

    Subclasses name the points they need in `points` and implement `on_values`, `on_scores`, `on_pattern` and
    `on_mixed`.
    The pair for `fwd_hooks=` is `(hook.matches, hook)`.
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
        # TransformerLens keeps this as the hook's name; the repr of a tensor would cost more than the hook
        return f"{type(self).__name__}({self.module})"

    @property
    def names(self) -> Sequence[str]:
        """The names that its filter takes, in the order of a pass, whichever of them a model has."""
        return tuple(self._roles)

    def matches(self, name: str) -> bool:
        """The filter of hook names that goes with this hook."""
        return name in self._roles

    def _pair(self) -> HookPair:
        # a name, where one is enough: TransformerLens refuses a name that the model does not have
        return (next(iter(self._roles)) if len(self.points) == 1 else self.matches), self

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        point = self._roles.get(hook.name)
        if point is None:
            raise ValueError(f"hook: expected one of {', '.join(self._roles)}; got {hook.name}")
        if point == "queries":
            self._n_heads = _positions_first(tensor, hook).shape[2]
            return None
        if point in ("scores", "pattern"):
            # models that leave attention to transformers show both after the mixing, or never
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
                "or fwd_hooks holds the same pair twice"
            )
        edited = self.on_mixed(_split_heads(tensor, values), values, pattern)
        return None if edited is None else edited.to(tensor.dtype).reshape(tensor.shape)

    def _call_values(self, tensor: Tensor, hook: HookPointLike, n_heads: int | None) -> Tensor | None:
        values = _positions_first(tensor, hook)
        edited = self.on_values(values, n_heads)
        if "mixed" in self.points:
            self._values = values
        if edited is None:
            return None
        return (edited.transpose(1, 2) if _heads_come_first(hook) else edited).to(tensor.dtype)

    def on_values(
        self, values: Float[Tensor, "batch key value_head d_head"], n_heads: int | None
    ) -> Tensor | None:
        """Edit the values (one per value head), or return None; `n_heads` is None if queries did not fire."""
        return None

    def on_scores(
        self,
        scores: Float[Tensor, "batch head query key"],
        values: Float[Tensor, "batch key value_head d_head"],
    ) -> Tensor | None:
        """Edit the scores before their softmax, or return None; some models never show them before mixing."""
        return None

    def on_pattern(
        self,
        pattern: Float[Tensor, "batch head query key"],
        values: Float[Tensor, "batch key value_head d_head"],
    ) -> Tensor | None:
        """Edit the pattern before it mixes the values, or return None; `on_mixed` gets it unedited."""
        return None

    def on_mixed(
        self,
        mixed: Float[Tensor, "batch query head d_head"],
        values: Float[Tensor, "batch key value_head d_head"],
        pattern: Float[Tensor, "batch head query key"] | None,
    ) -> Tensor | None:
        """Edit the mixed values of all query heads, or return None; `pattern` is None if it did not fire."""
        return None


class GivenHook(AttentionHook):
    """An edit by one argument, as it was checked."""

    def __init__(self, layer: int, attention: str, given: Any) -> None:
        super().__init__(layer, attention)
        self._given = given


def attention_module(layer: int, attention: str) -> str:
    """The name of one attention module, from the template and the number of the layer."""
    if not isinstance(attention, str):
        raise TypeError(
            f"attention: expected the name of a module, as {DEFAULT_ATTENTION!r}; got {attention!r}"
        )
    index = whole_number("layer", layer, 0, what="an integer")
    try:
        return attention.format(layer=index)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"attention: expected a name whose only placeholder is {{layer}}, as {DEFAULT_ATTENTION!r}; "
            f"got {attention!r}"
        ) from error


def _heads_come_first(hook: HookPointLike) -> bool:
    # latent attention (DeepSeek) shows [batch head position d_head], and says so
    return getattr(hook, "pos_dim", None) == 2 and getattr(hook, "hook_conversion", None) is None


def _positions_first(tensor: Tensor, hook: HookPointLike) -> Float[Tensor, "batch position head d_head"]:
    """Queries or values as [batch position head d_head], whatever the hook point shows."""
    if tensor.ndim != 4:
        raise ValueError(
            f"{hook.name}: expected a tensor [batch position head d_head]; got shape {tuple(tensor.shape)} "
            "(remove_batch_dim=True is not supported)"
        )
    # TransformerLens 3 shows this layout without saying so: a slice of a wider, transposed tensor
    is_slice = tensor.storage_offset() > 0 and tensor.shape[3] < tensor.stride(1) < tensor.stride(2)
    if is_slice and not hasattr(hook, "pos_dim") and getattr(hook, "hook_conversion", None) is None:
        raise ValueError(
            f"{hook.name}: expected [batch position head d_head]; got [batch head position d_head], the "
            "layout of latent attention, which needs TransformerLens 4 or later"
        )
    return tensor.transpose(1, 2) if _heads_come_first(hook) else tensor


def _split_heads(mixed: Tensor, values: Tensor) -> Float[Tensor, "batch query head d_head"]:
    """The mixed values per query head: TransformerBridge may show them flat, or split by another size."""
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
    return flat.unflatten(2, (-1, d_head))
