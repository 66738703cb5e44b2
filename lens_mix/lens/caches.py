"""Give the attention of a TransformerBridge its cache of keys and values under the name that it reads."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from lens_mix.lens.changes import Change, replace_method


def renamed_caches(modules: Iterable[nn.Module]) -> list[Change]:
    """Return changes with which a TransformerBridge may generate with the cache.

    From transformers 5.24 on, a model passes its cache as `cache`. TransformerLens 4.3 and older read
    `past_key_values` only, so a written token would not see the tokens before it.
    """
    return [
        replace_method(module, "_update_kv_cache", functools.partial(_update, module._update_kv_cache))
        for module in modules
        if hasattr(module, "_update_kv_cache")
    ]


def _update(update: Any, keys: Any, values: Any, **arguments: Any) -> Any:
    cache = arguments.pop("cache", None)
    return update(keys, values, **(arguments if cache is None else {**arguments, "past_key_values": cache}))
