"""Prepare a model or build one, and read what the blocks of a pass consist of."""

from lens_mix._algebra.block_parts import BlockParts, block_parts
from lens_mix._algebra.feed_forward import FeedForwardShares, feed_forward_shares
from lens_mix._blocks.states import states_of
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._model.from_weights import Weights, model_from_weights
from lens_mix._model.layer_scale import fold_layer_scale
from lens_mix._passes.continuation import prompt_logits
from lens_mix._verification.support import hooks_failure

__all__ = [
    "BlockParts",
    "FeedForwardShares",
    "TransformerLensModel",
    "Weights",
    "block_parts",
    "feed_forward_shares",
    "fold_layer_scale",
    "hooks_failure",
    "model_from_weights",
    "prompt_logits",
    "states_of",
]


def __dir__() -> list[str]:
    return __all__
