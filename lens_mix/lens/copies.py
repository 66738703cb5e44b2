"""How many copies of a prompt a block may run at once."""

from __future__ import annotations

import math

import torch

from lens_mix.lens.model import Lens


def copies_within(
    lens: Lens, max_memory: int | None, positions: int, *, blocks: int = 1, logits: int = 0
) -> int:
    """How many copies of one prompt a block may run at once; 1 or more.

    Args:
        lens: the face of the model.
        max_memory: bytes for the temporaries of one step; None leaves only the bound that keeps a
            processor's caches useful.
        positions: the length of the prompt.
        blocks: how many blocks' temporaries live at once (those a gradient goes back through).
        logits: how many positions' logits do.

    Raises:
        ValueError: not even one copy fits.
    """
    cfg = lens.model.cfg
    size = torch.finfo(lens.dtype).bits // 8
    d_mlp = int(getattr(cfg, "d_mlp", None) or 4 * cfg.d_model)
    experts = int(getattr(cfg, "experts_per_token", None) or 1)
    per_position = 12 * cfg.d_model + 6 * lens.n_heads * cfg.d_head + 4 * d_mlp * experts
    # Scores, masked scores, their float32 softmax and the pattern live at the same time.
    attention = lens.n_heads * positions**2 * (3 * size + 8)
    through_one = positions * per_position * size + attention
    bytes_per_copy = blocks * through_one
    bytes_per_copy += 3 * logits * int(getattr(cfg, "d_vocab", 0) or 0) * size
    rows = 2048 if lens.device.type == "cpu" else 65536  # positions of all copies
    copies = max(1, rows // positions)
    if max_memory is None:
        return copies
    # A replay is first verified on three copies, which need less than twice the estimate of one.
    least = max(bytes_per_copy, 2 * through_one)
    if max_memory < least:
        raise ValueError(
            f"max_memory: expected at least {least} bytes "
            f"({positions} positions through {blocks} block(s)), got {max_memory}"
        )
    return min(copies, math.floor(max_memory / bytes_per_copy))
