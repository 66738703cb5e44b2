"""Compare attention roll-out with the loop that one would write: 12 layers of 1024 tokens, random maps.

python -m benchmarks.rollout
"""

from __future__ import annotations

from typing import Any

import torch

import lens_mix as lm
from benchmarks import common
from benchmarks.flow import random_map


def plain_loop(maps: torch.Tensor, residual: float = 0.5) -> torch.Tensor:
    """Return the roll-out of maps [layer, query, key] whose rows sum to 1, without checks and notes."""
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype)
    rolled = [identity]
    for scores in maps:
        rolled.append(((1 - residual) * scores + residual * identity) @ rolled[-1])
    return torch.stack(rolled[1:])


def against_plain_loop(layers: int, tokens: int, causal: bool, repeats: int) -> dict[str, Any]:
    """Compare both in float64, and measure the roll-out that is normalised by the receptive field."""
    mixing_map = random_map(layers, tokens, causal)
    error = float((lm.rollout(mixing_map).scores - plain_loop(mixing_map.scores)).abs().max())
    seconds = common.interleaved(
        {
            "loop": lambda: plain_loop(mixing_map.scores),
            "rollout": lambda: lm.rollout(mixing_map),
            "field": lambda: lm.rollout(mixing_map, receptive_field=True),
        },
        repeats,
    )
    return {
        "layers": layers,
        "tokens": tokens,
        "mask": "causal" if causal else "all",
        "plain loop, s": seconds["loop"],
        "rollout ÷ loop": seconds["rollout"] / seconds["loop"],
        "with receptive field ÷ loop": seconds["field"] / seconds["loop"],
        "largest difference": error,
    }


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(common.markdown_table([against_plain_loop(12, 1024, causal, 5) for causal in (True, False)]))


if __name__ == "__main__":
    main()
