"""The parts of an encoder-decoder that have maps of their own."""

from __future__ import annotations

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._model.model import Lens

PARTS = ("encoder", "decoder", "cross")


def parts_of(model: TransformerLensModel) -> tuple[str, ...]:
    """Return the parts that part="all" means.

    Raises:
        ValueError: If the model is not an encoder-decoder.
    """
    lens = Lens(model)
    if lens.encoder_decoder:
        return PARTS
    raise ValueError(
        f"part: expected None, got 'all': this {lens.model_class.value} is not an encoder-decoder; all of "
        f"its blocks are one stack ({lens.stack.name!r})"
    )
