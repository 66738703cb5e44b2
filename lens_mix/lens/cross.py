"""The residual stream of a decoder's block before its cross-attention, and what the cross-attention adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks.recording import record
from lens_mix.lens.anatomy import BlockAnatomy
from lens_mix.lens.clean_pass import CleanPass
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import ModelClass, UnsupportedModelError

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def names_before_cross(lens: Lens, layers: Sequence[int]) -> list[str]:
    """Return the hook points of self-attention's output in each layer; none unless the part is "cross"."""
    stack = lens.stack
    if stack.before is None:
        return []
    inside = f"{stack.before}.o.hook_out" if lens.model_class is ModelClass.BRIDGE else "hook_attn_out"
    return [f"{lens.where(layer)}.{inside}" for layer in layers]


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


def cross_output(block: Block) -> Float[Tensor, "batch query d_model"] | None:
    """Return the output of a decoder's cross-attention before any norm, at the asked rows.

    The block is replayed for it.

    Args:
        block: A block, whose self-attention is mapped.

    Returns:
        The output. None: the block has no cross-attention.

    Raises:
        UnsupportedModelError: No hook point shows it, or the replay does not give the block's own output.
    """
    if not block.anatomy.cross:
        return None
    outputs: dict[str, Tensor] = {}
    lens = block.clean.lens
    where = lens.where(block.layer)
    # The Bridge's name, and that of HookedEncoderDecoder.
    names = (f"{where}.cross_attn.o.hook_out", f"{where}.hook_cross_attn_out")
    name = next((name for name in names if name in lens.hook_points), None)
    if name is None:
        raise UnsupportedModelError(f"{where}: no hook point shows what its cross-attention gives")
    prompts = torch.arange(len(block.batch), device=block.real.device)
    block.replay(prompts, [record(outputs, name)])
    return block.rows_of(outputs[name])
