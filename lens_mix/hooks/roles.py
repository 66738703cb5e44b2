"""Record what a method reads of an attention module: queries, values, pattern, mixed values."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from jaxtyping import Int
from torch import Tensor

from lens_mix.hooks.attention import DEFAULT_ATTENTION, attention_module
from lens_mix.hooks.function import HookPair
from lens_mix.hooks.record import record

# role -> TransformerLens's hook point inside the attention module
ATTENTION_ROLES = {"query": "hook_q", "value": "hook_v", "pattern": "hook_pattern", "z": "hook_z"}
# Where these tensors have the axis of the query positions; values stand for keys.
_QUERY_AXIS = {"query": 1, "pattern": 2, "z": 1}


def record_attention(
    layer: int,
    store: MutableMapping[str, Tensor],
    roles: Iterable[str],
    *,
    queries: Int[Tensor, "batch query"] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> list[HookPair]:
    """Record tensors of one attention module in a pass.

    Args:
        layer: the layer, from 0.
        store: the dict to fill, by TransformerLens's names.
        roles: some of "query", "value", "pattern", "z".
        queries: positions of the rows to keep of each prompt; values are kept for all positions. None: all.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        One `(hook_name, hook_function)` per role, for `fwd_hooks=`.

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
    for role in roles:
        if role not in ATTENTION_ROLES:
            raise ValueError(f"roles: expected some of {sorted(ATTENTION_ROLES)}; got {role!r}")
        name = f"{attention_module(layer, attention)}.{ATTENTION_ROLES[role]}"
        if queries is None or role not in _QUERY_AXIS:
            pairs.append(record(store, name))
        else:
            pairs.append(record(store, name, select=_Rows(queries, _QUERY_AXIS[role])))
    return pairs


class _Rows:
    """Selects rows of each prompt; an object, so that a hook's name does not print the tensor."""

    def __init__(self, queries: Int[Tensor, "batch query"], axis: int) -> None:
        self._queries, self._axis = queries, axis

    def __call__(self, tensor: Tensor) -> Tensor:
        rows = torch.arange(len(tensor), device=tensor.device)[:, None]
        return tensor.movedim(self._axis, 1)[rows, self._queries].movedim(1, self._axis)
