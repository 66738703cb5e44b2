"""Prepare a model, and read what the blocks of a pass consist of."""

from lens_mix._algebra.block_parts import BlockParts, block_parts
from lens_mix._blocks.states import states_of
from lens_mix._model.layer_scale import fold_layer_scale

__all__ = ["BlockParts", "block_parts", "fold_layer_scale", "states_of"]


def __dir__() -> list[str]:
    return __all__
