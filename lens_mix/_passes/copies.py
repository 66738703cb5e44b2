"""What fits in memory: how many copies of a prompt run at once, and whether anything does."""

from __future__ import annotations

import math
import os

import torch

from lens_mix._model.model import Lens

# So many positions of all copies run at once: more on a GPU, because each operation takes time to start.
_CPU_POSITIONS, _GPU_POSITIONS = 2048, 65536
# A copy with an autograd graph of its own keeps the tensors of all blocks until the backward pass. So a
# fourth as many run at once: more need more memory, and hardly less time each (benchmarks/README.md).
_FEWER_WITH_GRAPHS = 4


def count_copies(
    lens: Lens,
    max_memory: int | None,
    positions: int,
    *,
    blocks: int = 1,
    logits: int = 0,
    own_graphs: bool = False,
) -> int:
    """Return how many copies of one prompt may run at once, at least 1.

    Args:
        lens: The lens of the model.
        max_memory: The number of bytes for the temporary tensors of one chunk. None: so many
            that one takes about the least time.
        positions: The length of the prompt.
        blocks: The number of blocks whose temporary tensors are in memory at the same time: those that a
            gradient passes through.
        logits: The number of positions whose logits are in memory.
        own_graphs: Whether each copy has an autograd graph of its own.

    Raises:
        ValueError: If not even one copy fits in `max_memory`.
    """
    cfg, size = lens.model.cfg, torch.finfo(lens.dtype).bits // 8
    through_one = bytes_through_block(lens, positions)
    bytes_per_copy = blocks * through_one
    bytes_per_copy += 3 * logits * int(getattr(cfg, "d_vocab", 0) or 0) * size
    most = _CPU_POSITIONS if lens.device.type == "cpu" else _GPU_POSITIONS
    copies = max(1, most // (_FEWER_WITH_GRAPHS if own_graphs else 1) // positions)
    if max_memory is None:
        return copies
    # A replay is first verified on three copies, which need less than twice the estimate of one.
    min_bytes = max(bytes_per_copy, 2 * through_one)
    if max_memory < min_bytes:
        raise ValueError(
            f"max_memory: expected at least {min_bytes} bytes "
            f"({positions} positions through {blocks} block(s)), got {max_memory}"
        )
    return min(copies, math.floor(max_memory / bytes_per_copy))


def bytes_through_block(lens: Lens, positions: int) -> int:
    """Return about how many bytes of temporary tensors one prompt needs to pass through one block."""
    cfg = lens.model.cfg
    size = torch.finfo(lens.dtype).bits // 8
    d_mlp = int(getattr(cfg, "d_mlp", None) or 4 * cfg.d_model)
    experts = int(getattr(cfg, "experts_per_token", None) or 1)
    per_position = 12 * cfg.d_model + 6 * lens.n_heads * cfg.d_head + 4 * d_mlp * experts
    # Scores, masked scores, their float32 softmax and the pattern are in memory at the same time.
    attention = lens.n_heads * positions**2 * (3 * size + 8)
    through_one: int = positions * per_position * size + attention
    return through_one


def total_memory(lens: Lens) -> int | None:
    """Return the bytes of memory of all devices that the model is on; None if one is unknown.

    For a CPU this is the memory of the machine, without what it may swap to a disk.
    """
    sizes = [_memory_of(device) for device in {weight.device for weight in lens.model.parameters()}]
    return None if not all(sizes) else sum(filter(None, sizes))


def _memory_of(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    # Where the number of pages is not known, it is -1.
    return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) or None
