"""Find the strongest token of one position, and the sinks that do not count for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap
from lens_mix.maps.words import is_special

# lens_mix/view/page/drawing.js has the same two shares of a row.
MOSTLY, NOISE = 0.9, 0.01


class Strongest(NamedTuple):
    """The largest score of one position.

    Attributes:
        layer: The index of the layer.
        key: The index of the key.
        score: The score, in the unit that was given.
    """

    layer: int
    key: int
    score: float


def find_sinks(mixing_map: MixingMap) -> list[int]:
    """Return the keys that take weight without being used: the first token of a decoder, or special tokens.

    A text of which more than half the tokens look special has none, since these are not marks of a tokenizer.
    """
    if mixing_map.causal and mixing_map.keys_are_tokens:
        return [0]
    special = [key for key, token in enumerate(mixing_map.key_labels) if is_special(token)]
    return special if 2 * len(special) <= len(mixing_map.key_labels) else []


def find_noise(scores: Float[Tensor, "layer key"], left_out: Collection[int]) -> Bool[Tensor, " layer"]:
    """Return which rows have next to nothing for the keys that are colored.

    The keys that are left out have more than 90 % of such a row, and no other key has 1 %. On a scale up to
    its largest other score, noise would be as dark as a finding, so its scale ends at the sum of the row.

    Args:
        scores: The scores of one position in each layer.
        left_out: The keys that have numbers instead of colors.
    """
    sizes = scores.abs()
    total, left = sizes.sum(-1), sizes[:, list(left_out)].sum(-1)
    others = sizes.clone()
    others[:, list(left_out)] = 0
    noise: Tensor = (left > MOSTLY * total) & (others.amax(-1) < NOISE * total)
    return noise


def find_strongest(
    scores: Float[Tensor, "layer key"], visible: Bool[Tensor, "layer key"], left_out: Collection[int] = ()
) -> Strongest | None:
    """Return the largest score of one position, by magnitude; the lowest layer of equal ones.

    Args:
        scores: The scores of the position in each layer.
        visible: The keys that the position could see.
        left_out: The keys that do not count: the sinks of `find_sinks`, and the position itself. These often
            have the largest scores and say little about where content is from.

    Returns:
        None if no other key has a score.
    """
    sizes = scores.abs().masked_fill(~visible, 0)
    sizes[:, list(left_out)] = 0
    # numpy's argmax returns the first of equal entries; that of torch may return any.
    layer, key = divmod(int(sizes.cpu().double().numpy().argmax()), sizes.shape[1])
    return Strongest(layer, key, scores[layer, key].item()) if sizes[layer, key] > 0 else None
