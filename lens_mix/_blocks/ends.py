"""The end of a model, verified on a pass: its final norm and its unembedding."""

from __future__ import annotations

from lens_mix._blocks.components import LOGITS, measure_end
from lens_mix._blocks.recorded import RecordedEnd
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import Norm
from lens_mix._model.unembedding import Unembedding, read_unembedding
from lens_mix._passes.clean_pass import CleanPass
from lens_mix._passes.continuation import Continuation


def unembedding_from(clean: CleanPass, norm: Norm | None) -> Unembedding:
    """Return the model's unembedding, verified on a pass that reached the last block.

    Raises:
        UnsupportedModelError: The logits are not the unembedding of the last residual stream after `norm`.
    """
    lens, last = clean.lens, clean.lens.n_layers - 1
    if lens.stack.name == "encoder":
        raise UnsupportedModelError(
            "unembedding: expected logits, got the encoder of an encoder-decoder, which has none"
        )
    logits = Continuation(clean, last).logits()
    if logits.ndim != 3:
        raise UnsupportedModelError(
            f"unembedding: expected logits of every position, got {list(logits.shape)}"
        )
    resid, logits = (
        tensor[clean.real][None].to(lens.wide_dtype) for tensor in (clean.calls[last].resid_post, logits)
    )
    unembedding = read_unembedding(lens.model, norm, resid.shape[-1], logits.shape[-1])
    rebuilt = unembedding(resid)
    scale = float((rebuilt * logits).sum() / rebuilt.square().sum())  # This is the least-squares solution.
    if abs(scale - 1) > lens.tolerance:
        # Cohere and Granite multiply the logits by a constant.
        unembedding = unembedding.scaled(scale)
    error = measure_end(LOGITS, RecordedEnd(resid, unembedding=unembedding, logits=logits))
    if not error <= lens.tolerance:  # This is also true for NaN.
        raise UnsupportedModelError(
            "unembedding: expected logits = final norm, then unembedding; rebuilt logits have a relative "
            f"error of {error:.1e} (a dense layer or a cap between the two can't be split by token)"
        )
    return unembedding
