"""Random maps, and recorded outputs of other libraries, for tests without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lens_mix.maps import MixingMap

REFERENCE = Path(__file__).parent / "reference"


def random_attention(
    layers: int = 4, heads: int | None = None, size: int = 6, *, causal: bool = True, seed: int = 0
) -> Tensor:
    """Return random attention weights [layer, query, key], or [layer, head, query, key], in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, size, size) if heads is None else (layers, heads, size, size)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if causal:
        logits = logits.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


def map_of(scores: Tensor | None = None, **fields: Any) -> MixingMap:
    """Return a causal map over the tokens " t0", " t1" and so on; its default is `random_attention()`."""
    scores = random_attention() if scores is None else scores
    tokens = [f" t{position}" for position in range(scores.shape[-2])]
    return MixingMap(scores=scores, **{"tokens": tokens, "method": "attention", "causal": True, **fields})


def random_map(
    size: int = 6,
    layers: int = 2,
    heads: int | None = None,
    *,
    causal: bool = True,
    seed: int = 0,
    **fields: Any,
) -> MixingMap:
    """Return a map of `random_attention`."""
    return map_of(random_attention(layers, heads, size, causal=causal, seed=seed), causal=causal, **fields)


def reference_arrays(name: str) -> dict[str, Tensor]:
    """Return the arrays of tests/reference/`name` as tensors; the README there names their sources."""
    with np.load(REFERENCE / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}
