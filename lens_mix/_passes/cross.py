"""The residual stream of a decoder's block before its cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lens_mix._classes.model_classes import ModelClass
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._model.model import Lens
from lens_mix._passes.clean_pass import CleanPass


def names_before_cross(lens: Lens, layers: Sequence[int]) -> list[str]:
    """Return the hook points of self-attention's output in each layer; none unless the part is "cross"."""
    stack = lens.stack
    if stack.before is None:
        # Any other part begins with the input of its block, which the pass records anyway.
        return []
    inside = f"{stack.before}.o.hook_out" if lens.model_class is ModelClass.BRIDGE else "hook_attn_out"
    return [f"{lens.where(layer)}.{inside}" for layer in layers]


def find_name_of_cross(lens: Lens, layer: int) -> str | None:
    """Return the hook point of a block's cross-attention, before any norm; None if there is none."""
    where = lens.where(layer)
    # The Bridge's name, and that of HookedEncoderDecoder.
    names = (f"{where}.cross_attn.o.hook_out", f"{where}.hook_cross_attn_out")
    return next((name for name in names if name in lens.hook_points), None)


def keep_stream_before_cross(clean: CleanPass, anatomy: Mapping[int, BlockAnatomy], layer: int) -> None:
    """Keep in `clean.entering` the residual stream that the cross-attention's output is added to.

    Args:
        clean: A clean pass that recorded `names_before_cross`. Without them, and unless the part is "cross",
            nothing is kept.
        anatomy: The anatomy of each block, read by its cross-attention.
        layer: A layer whose block has run.
    """
    for name in names_before_cross(clean.lens, [layer]):
        if layer in anatomy and name in clean.recorded:
            x = clean.calls[layer].resid_pre
            clean.entering[layer] = anatomy[layer].entered(x, clean.recorded[name].to(x.dtype))
