"""Make the controls that a map has to beat: chance, the position, and a model with shuffled weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._model.model import Lens
from lens_mix.arguments import check_whole_number
from lens_mix.maps import MixingMap

M = TypeVar("M", bound=TransformerLensModel)


def control_rows(keys: int, seed: int, axes: Sequence[int] = ()) -> dict[str, Float[Tensor, "*axes key"]]:
    """Return rows that do not depend on the prompt: "random", and "position" (later tokens score higher).

    Args:
        keys: The number of keys.
        seed: The seed of the random row.
        axes: The sizes of leading axes.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        "random": torch.rand(*axes, keys, generator=generator, dtype=torch.float64, device="cpu"),
        "position": torch.arange(1, keys + 1, dtype=torch.float64, device="cpu").expand(*axes, keys),
    }


def control_maps(like: MixingMap, seed: int) -> dict[str, MixingMap]:
    """Return layer maps that do not depend on the prompt, with the layers and positions of another map."""
    merged = like.merge_heads()
    hidden = ~merged.visible().cpu()
    *axes, keys = merged.scores.shape
    return {
        name: merged.replace(scores=scores.masked_fill(hidden, 0), method=name)
        for name, scores in control_rows(keys, seed, axes).items()
    }


@contextlib.contextmanager
def randomised(model: M, *, seed: int = 0, part: str | None = None) -> Iterator[M]:
    """Shuffle the matrices of the model's blocks inside a `with` block (Adebayo et al., NeurIPS 2018).

        >>> with lm.evaluation.randomised(model) as other:
        ...     m = lm.run(other, "The Eiffel Tower is in the city of", "attention")

    Each weight matrix keeps its numbers in another order. Vectors (biases, weights of norms), the embeddings
    and the unembedding stay. A map that looks the same on this model does not show what the model has
    learned. Afterwards the weights are the same as before, to the bit.

    Args:
        model: The model.
        seed: The seed of the order.
        part: As in `lm.run`.

    Yields:
        The model.

    Raises:
        UnsupportedModelError: The weights are offloaded.
    """
    generator = torch.Generator().manual_seed(check_whole_number("seed", seed, 0))
    lens = Lens(model, part)
    matrices = {
        id(parameter): parameter
        for block in lens.stack.blocks
        for parameter in block.parameters()
        if parameter.ndim >= 2
    }
    if any(parameter.is_meta for parameter in matrices.values()):
        raise UnsupportedModelError(
            "randomised: expected weights that can be shuffled, got offloaded ones, which accelerate keeps "
            "elsewhere; load the model on one device"
        )
    # All matrices are copied before the first one changes, so that they can be restored after any error.
    before = [(parameter, parameter.detach().clone()) for parameter in matrices.values()]
    try:
        with torch.no_grad():
            for parameter, weights in before:
                order = torch.randperm(weights.numel(), generator=generator, device="cpu").to(weights.device)
                parameter.copy_(weights.flatten()[order].reshape(weights.shape))
        yield model
    finally:
        with torch.no_grad():
            for parameter, weights in before:
                parameter.copy_(weights)
