"""Make a random map of information flow routes, with the shares of the feed-forwards."""

from __future__ import annotations

import torch

import lens_mix as lm
from tests.random_maps import random_attention


def routes_map(layers: int = 3, size: int = 6, heads: int | None = None) -> lm.MixingMap:
    """Return a map of layers 2, 3, ...: rows sum to 1, and the diagonal has the share of the residual."""
    generator = torch.Generator().manual_seed(5)
    resid_pre = 0.7 * torch.rand(layers, size, generator=generator, dtype=torch.float64)
    mlp_out = torch.rand(layers, size, generator=generator, dtype=torch.float64)
    scores = random_attention(layers, heads, size, seed=6)
    own = resid_pre if heads is None else (resid_pre[:, None] / heads)
    scale = 1 - resid_pre[..., None] if heads is None else (1 - resid_pre[:, None, :, None]) / heads
    return lm.MixingMap(
        scores=scores * scale + torch.diag_embed(own.expand(scores.shape[:-1])),
        tokens=[f" t{position}" for position in range(size)],
        method="information_flow_routes",
        causal=True,
        residual=0.0,
        layers=list(range(2, 2 + layers)),
        provenance={"details": {"parts": _make_details(resid_pre, mlp_out)}},
    )


def _make_details(resid_pre: torch.Tensor, mlp_out: torch.Tensor) -> list[dict]:
    queries = list(range(resid_pre.shape[1]))
    return [
        {"layer": 2 + place, "tokens": len(queries), "queries": queries, "parallel": False}
        | {"resid_pre": pre.tolist(), "mlp_out": mlp.tolist(), "resid_mid": (1 - mlp).tolist()}
        for place, (pre, mlp) in enumerate(zip(resid_pre, mlp_out, strict=True))
    ]
