"""What the clean pass keeps of every pattern: which keys it gave weight, and some queries to check by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_FEW = 4


@dataclasses.dataclass(frozen=True)
class SampledPatterns:
    """The patterns of some queries of every prompt.

    Attributes:
        places: the positions of each prompt's queries.
        whole: whether these are all positions: patterns are kept as they are then, a copy of none.
        patterns: per layer, the pattern of all queries or of those at the places.
    """

    places: Int[Tensor, "batch place"]
    whole: bool
    patterns: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def at(cls, real: Bool[Tensor, "batch pos"], whole: bool) -> SampledPatterns:
        """SampledPatterns to come of all real positions, or of four of each prompt, the last among them."""
        return cls(_spread_places(real, int(real.sum(1).max()) if whole else _FEW), whole)

    def keep(self, layer: int, pattern: Float[Tensor, "batch head query key"]) -> None:
        """Keep what is wanted of a block's pattern."""
        self.patterns[layer] = pattern if self.whole else _queries(pattern, self.places)

    def pieces(self, layer: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The places, as many at a time as have this many rows in all prompts together, and their patterns.

        Args:
            layer: of which block.
            rows: how many queries of all prompts; one of each prompt at least.
        """
        step = max(1, rows // len(self.places))
        for start in range(0, self.places.shape[1], step):
            piece = slice(start, start + step)
            places, pattern = self.places[:, piece], self.patterns[layer]
            yield places, _queries(pattern, places) if self.whole else pattern[:, :, piece]


def _queries(
    pattern: Float[Tensor, "batch head query key"], places: Int[Tensor, "batch place"]
) -> Float[Tensor, "batch head place key"]:
    rows = torch.arange(len(places), device=places.device)[:, None]
    return pattern[rows, :, places].transpose(1, 2)


def _spread_places(real: Bool[Tensor, "batch pos"], count: int) -> Int[Tensor, "batch place"]:
    """As many positions of each prompt, evenly; each at least once where it has fewer."""
    own = [row.nonzero()[:, 0] for row in real]
    return torch.stack(
        [at[torch.linspace(0, len(at) - 1, count, device=at.device).round().long()] for at in own]
    )


def see_keys_of(layer: int, seen: dict[int, Tensor], sampled: SampledPatterns) -> Callable[[Tensor], None]:
    """What `watch_pattern` calls: keeps which keys got any weight, and some rows of the pattern.

    Args:
        layer: of which block.
        seen: the dict to fill.
        sampled: what keeps patterns.
    """
    batch, last = len(sampled.places), int(sampled.places.max())

    def see(pattern: Tensor) -> None:
        # A quarter of the time that `(pattern != 0).any(dim=1)` takes.
        seen[layer] = (pattern.amax(dim=1) != 0) | (pattern.amin(dim=1) != 0)
        if pattern.shape[0] == batch and pattern.shape[2] > last:
            sampled.keep(layer, pattern)

    return see
