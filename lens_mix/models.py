"""Prepare a model or build one, and read a prompt or what the blocks of a pass consist of."""

from typing import Any

from lens_mix._algebra.block_parts import BlockParts, block_parts
from lens_mix._algebra.feed_forward import FeedForwardShares, feed_forward_shares
from lens_mix._blocks.states import states_of
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._model.from_weights import Weights, model_from_weights
from lens_mix._model.layer_scale import fold_layer_scale
from lens_mix._passes.continuation import prompt_logits
from lens_mix._verification.support import hooks_failure
from lens_mix.maps.spans import Span
from lens_mix.maps.spans import find_positions as find_positions_in
from lens_mix.session import Session

__all__ = [
    "BlockParts",
    "FeedForwardShares",
    "TransformerLensModel",
    "Weights",
    "block_parts",
    "feed_forward_shares",
    "find_positions",
    "fold_layer_scale",
    "hooks_failure",
    "model_from_weights",
    "prompt_logits",
    "states_of",
]


def __dir__() -> list[str]:
    return __all__


def find_positions(
    model: TransformerLensModel, prompt: Any, text: Span, part: str | None = None, **options: Any
) -> list[int]:
    """Return the positions of a text of a prompt, for a hook or anything else that takes numbers.

        >>> from lens_mix.hooks import zero_values
        >>> prompt = "When in Rome, do as the Romans do"
        >>> hook = zero_values(layer=0, position=lm.models.find_positions(model, prompt, " Rome"))
        >>> logits = model.run_with_hooks(prompt, fwd_hooks=[hook])

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        text: A text of the prompt, one token or several, as `MixingMap.positions` finds it. Or a position
            (negative: from the end), a slice, or several of these.
        part: "encoder" for the source of an encoder-decoder (default), "decoder" for its target.
        options: `prepend_bos`, `attention_mask` and `inputs`, as in `lm.run`.

    Raises:
        ValueError: If the prompt does not contain the text, or more than once; the error says what to write.
    """
    session = Session(model, {}, part=part)
    return find_positions_in(session.tokens(session.read(prompt, **options)), text, "text")
