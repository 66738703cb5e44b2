"""The residual stream of a decoder's block before its cross-attention, recorded in a clean pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.clean_pass import CleanPass
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import ModelClass


def names_before_cross(lens: Lens, layers: Sequence[int]) -> list[str]:
    """Return the hook points of self-attention's output in each layer; none unless the part is "cross"."""
    stack = lens.stack
    if stack.before is None:
        return []
    inside = f"{stack.before}.o.hook_out" if lens.model_class is ModelClass.BRIDGE else "hook_attn_out"
    return [f"{lens.where(layer)}.{inside}" for layer in layers]


def streams_before_cross(clean: CleanPass, anatomy: Mapping[int, BlockAnatomy]) -> dict[int, Tensor]:
    """Return by layer the residual stream that the cross-attention's output is added to.

    Args:
        clean: A clean pass that recorded `names_before_cross`.
        anatomy: The anatomy of each block, read by its cross-attention.

    Returns:
        Streams [batch, query, d_model] by layer. The dict is empty unless the part is "cross".
    """
    streams = {}
    for layer in anatomy if clean.lens.stack.is_cross else ():
        (name,) = names_before_cross(clean.lens, [layer])
        if name in clean.recorded:
            x = clean.calls[layer].resid_pre
            streams[layer] = anatomy[layer].entered(x, clean.recorded[name].to(x.dtype))
    return streams
