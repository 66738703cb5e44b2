"""Record exactly the named activations of a pass, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor

from lens_mix.hooks._shared import HookFunction, HookPair


def record(store: MutableMapping[str, Tensor], name: str, *, detach: bool = True) -> HookPair:
    """Keep one activation of a pass in a dict, under the name it was asked by.

    Names are those of TransformerLens's `run_with_cache`; which of them holds what on which class is in
    docs/hooks.md. A name may be an alias (`hook_resid_pre`): the store keeps the alias. The tensor is not
    copied, as in TransformerLens's own cache: a hook that edits it in place edits what was recorded.

    Args:
        store: the dict to fill; each pass overwrites what the last one kept.
        name: the hook point, as `"blocks.0.hook_resid_pre"`.
        detach: cut the tensor off from its gradient; False keeps the graph, to differentiate by it.

    Returns:
        `(name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the recordings; it stays 0
        where a TransformerBridge of TransformerLens 3 ignores an unknown name, or no pattern is computed.

    Raises:
        TypeError: `store` is no dict, or `name` no string; in the pass: the activation is no tensor.

    Example:
        ```python
        from lens_mix.hooks import record

        store = {}
        hooks = [record(store, "blocks.0.hook_resid_pre"), record(store, "blocks.0.attn.hook_v")]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        values = store["blocks.0.attn.hook_v"]  # [batch position head d_head]
        ```
    """
    if not isinstance(store, MutableMapping):
        raise TypeError(f"store: expected a dict to fill; got {type(store).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of one hook point; got {name!r}")
    return name, _Record(store, name, detach)


def record_all(
    store: MutableMapping[str, Tensor], names: Iterable[str], *, detach: bool = True
) -> list[HookPair]:
    """`record` for several names, in their order.

    Args:
        store: the dict to fill.
        names: the hook points; a single string is refused, as it would be read letter by letter.
        detach: as in `record`.

    Returns:
        one pair per name.

    Raises:
        TypeError: as `record`, or `names` is a string.

    Example:
        ```python
        from lens_mix.hooks import record_all

        store = {}
        names = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
        model.run_with_hooks(tokens, fwd_hooks=record_all(store, names))
        ```
    """
    if isinstance(names, str):
        raise TypeError(f"names: expected several names; got the string {names!r} (use record for one)")
    return [record(store, name, detach=detach) for name in names]


class _Record(HookFunction):
    def __init__(self, store: MutableMapping[str, Tensor], name: str, detach: bool) -> None:
        self._store = store
        self._name = name
        self._detach = detach

    def __repr__(self) -> str:
        return f"record({self._name})"

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self._name}: expected a tensor to record; got {type(tensor).__name__}")
        self._store[self._name] = tensor.detach() if self._detach else tensor
        self.calls += 1
        # where TransformerBridge shows a rearranged copy, the pass must go on from it to give it a gradient
        shows_copy = getattr(hook, "hook_conversion", None) is not None
        return tensor if shows_copy and not self._detach else None
