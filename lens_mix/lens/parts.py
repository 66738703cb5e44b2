"""The parts of an encoder-decoder, as users name them."""

from __future__ import annotations

from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel

PARTS = ("encoder", "decoder", "cross")


def parts_of(model: TransformerLensModel) -> tuple[str, ...]:
    """The parts that "all" stands for.

    Raises:
        ValueError: the model has one part only.
    """
    lens = Lens(model)
    if lens.encoder_decoder:
        return PARTS
    raise ValueError(
        f"part: expected None, got 'all': this {lens.model_class.value} is no encoder-decoder; all of its "
        f"blocks are one part ({lens.stack.name!r})"
    )
