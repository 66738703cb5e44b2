"""A model without some of its heads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from lens_mix.hooks import must_fire, prune_heads
from lens_mix.lens.model import Lens

Head = tuple[int, int]


@contextlib.contextmanager
def pruned(model: Any, heads: Iterable[Head], *, stack: str | None = None) -> Iterator[Any]:
    """The model without some heads, inside a `with` block: their patterns count as zero.

    Args:
        heads: (layer, head) pairs.
        stack: "encoder" or "decoder" of an encoder-decoder.

    Raises:
        ValueError: a layer or head that the model does not have.
        RuntimeError: at the end, when nothing ran the model inside.
    """
    lens = Lens(model, stack)
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        if not 0 <= layer < lens.n_layers or not 0 <= head < lens.n_heads:
            raise ValueError(
                f"heads: expected layers 0..{lens.n_layers - 1} and heads 0..{lens.n_heads - 1}, "
                f"got ({layer}, {head})"
            )
        by_layer.setdefault(layer, []).append(head)
    template = lens.stack.attention_template
    pairs = [prune_heads(layer, chosen, attention=template) for layer, chosen in by_layer.items()]
    with lens.undisturbed(), must_fire(*pairs) as hooks, lens.hooked(hooks):
        yield model
