"""Linear layers whose large products, and their gradients, are computed by the faster of two libraries."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lens_mix.lens.changes import Change, replace_method
from lens_mix.lens.large_product import by_onednn, is_large, multiply
from lens_mix.lens.model import Lens


def faster_products(lens: Lens, positions: int) -> list[Change]:
    """Return changes to the linear layers of a model, for passes that are not the clean pass.

    Their products are the same except for rounding, and have no gradients with respect to weights. Layers of
    other classes (quantised, offloaded, or with adapters) stay as they are.

    Args:
        lens: The lens of the model.
        positions: The number of positions of all copies of the pass.
    """
    layers: list[Any] = [
        module
        for module in lens.modules
        if type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module)
    ]
    layers = [layer for layer in layers if is_large(positions, layer.weight)]
    if not layers or not by_onednn(layers[0].weight):
        return []
    return [replace_method(layer, "forward", functools.partial(_run_linear, layer)) for layer in layers]


def _run_linear(layer: nn.Linear | Conv1D, x: Float[Tensor, "*axes inner"]) -> Float[Tensor, "*axes column"]:
    """Return the output of a linear layer. GPT-2's `Conv1D` has the transposed weight of a `Linear`."""
    product = multiply(x, layer.weight.T if isinstance(layer, nn.Linear) else layer.weight)
    return product if layer.bias is None else product + layer.bias
