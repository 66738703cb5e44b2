"""The norm that reads each block's output: the next block's first norm, or the final norm."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lens_mix._blocks.components import NEXT_NORM, measure_end
from lens_mix._blocks.ends import unembedding_from
from lens_mix._blocks.recorded import RecordedEnd
from lens_mix._care.changes import forward_hook, forward_pre_hook
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import BlockAnatomy
from lens_mix._passes.clean_pass import CleanPass, StopForward
from lens_mix._passes.continuation import Continuation

_WITHOUT = "(last_layer='before_final_norm', next_norm=False, after_final_norm=False)"


def next_norm_failures(clean: CleanPass, anatomy: Mapping[int, BlockAnatomy]) -> dict[int, str]:
    """Return, by layer, why it is unknown which norm reads the block's output; known layers are left out.

    Args:
        clean: A pass that reached the last block.
        anatomy: Layer -> the anatomy of every block that has attention.
    """
    last = clean.lens.n_layers - 1
    failures = {
        layer: f"next norm: block {layer + 1} has no attention, and its norms are not read; leave layer "
        f"{layer} out (layers=), or ask for what comes before that norm {_WITHOUT}"
        for layer in anatomy
        if layer < last and layer + 1 not in anatomy
    }
    final = _final_norm_failure(clean, last in anatomy and anatomy[last].ends_in_norm)
    return failures if final is None else {**failures, last: final}


def _final_norm_failure(clean: CleanPass, ends_in_norm: bool) -> str | None:
    """Return why it is unknown which norm reads the last residual stream; None if it is known.

    A model without a final norm is accepted if its last block ends in a norm, or if the logits can be rebuilt
    without one.
    """
    norm = clean.lens.final_norm()
    if norm is not None:
        return _find_other_input(clean, norm)
    if ends_in_norm:
        return None
    try:
        unembedding_from(clean, None)
    except UnsupportedModelError as problem:
        return (
            "final norm: expected the model's own, or logits without one; TransformerLens maps none here, "
            f"but {problem}. Leave the last layer out, or ask for what comes before that norm {_WITHOUT}"
        )
    return None


def _find_other_input(clean: CleanPass, norm: nn.Module) -> str | None:
    lens, last = clean.lens, clean.lens.n_layers - 1
    resid = clean.calls[last].resid_post
    read: list[Tensor] = []
    has_ended: list[bool] = []

    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # NanoChat also calls its norm before the first block.
        if has_ended:
            read.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            raise StopForward

    with contextlib.suppress(StopForward):
        ends = forward_hook(lens.stack.blocks[last], lambda *call: has_ended.append(True))
        ending = [ends, forward_pre_hook(norm, stop, with_kwargs=True)]
        Continuation(clean, last, changes=ending).run()
    observation = f"reads {list(read[0].shape)}" if read else "never ran"
    # A norm may be called with the positions of all prompts on one axis.
    if read and read[0].numel() == resid.numel():
        read_rows, rows = (tensor.reshape(resid.shape)[clean.real][None] for tensor in (read[0], resid))
        error = measure_end(NEXT_NORM, RecordedEnd(rows, read=read_rows))
        if error <= lens.tolerance:
            return None
        observation += f" with a relative error of {error:.1e}"
    return (
        "final norm: expected the norm that TransformerLens maps to read the last block's output, but it "
        f"{observation}. Leave the last layer out, or ask for what comes before that norm {_WITHOUT}"
    )
