"""Follow the shares of written tokens through the text that was written before, down to the prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def sum_paths(
    rows: Float[Tensor, "written key"], n_prompt: int, hops: int | None
) -> Float[Tensor, "written key"]:
    """Return each written token's shares in the prompt, through the written tokens before it.

    Args:
        rows: The scores of each written token for all tokens; written token r is key n_prompt + r.
        n_prompt: The number of tokens of the prompt.
        hops: As in `Trace.through`.
    """
    shares = normalize(rows)
    from_prompt, from_written = shares[:, :n_prompt], shares[:, n_prompt:]
    if hops is None:
        total = torch.linalg.solve_triangular(
            torch.eye(len(rows), dtype=shares.dtype, device=shares.device) - from_written,
            from_prompt,
            upper=False,
        )
    else:
        total, term = from_prompt.clone(), from_prompt
        for _ in range(hops):
            term = from_written @ term
            total += term
    return torch.nn.functional.pad(total, (0, rows.shape[1] - n_prompt))


def normalize(rows: Float[Tensor, "written key"]) -> Float[Tensor, "written key"]:
    """Return magnitudes in float64 whose rows sum to 1; a row of zeros stays."""
    sizes = rows.double().abs()
    total = sizes.sum(-1, keepdim=True)
    return sizes / torch.where(total > 0, total, 1)
