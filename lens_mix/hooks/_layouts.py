"""The layouts in which TransformerLens's classes show queries, values and mixed values.

Nothing here knows a TransformerLens release: where classes differ in a layout, all are accepted.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor


def _heads_come_first(hook: Any) -> bool:
    # latent attention (DeepSeek) shows [batch head position d_head], and says so
    return getattr(hook, "pos_dim", None) == 2 and getattr(hook, "hook_conversion", None) is None


def _hides_heads_first(tensor: Tensor, hook: Any) -> bool:
    # TransformerLens 3 shows this layout without saying so: a slice of a wider, transposed tensor
    return (
        not hasattr(hook, "pos_dim")
        and getattr(hook, "hook_conversion", None) is None
        and tensor.storage_offset() > 0
        and tensor.shape[3] < tensor.stride(1) < tensor.stride(2)
    )


def positions_first(tensor: Tensor, hook: Any) -> Float[Tensor, "batch position head d_head"]:
    """Queries or values as [batch position head d_head], whatever the hook point shows."""
    if tensor.ndim != 4:
        raise ValueError(
            f"{hook.name}: expected a tensor [batch position head d_head]; got shape {tuple(tensor.shape)} "
            "(remove_batch_dim=True is not supported)"
        )
    if _hides_heads_first(tensor, hook):
        raise ValueError(
            f"{hook.name}: expected [batch position head d_head]; got [batch head position d_head], the "
            "layout of latent attention, which needs TransformerLens 4 or later"
        )
    return tensor.transpose(1, 2) if _heads_come_first(hook) else tensor


def restore_layout(edited: Tensor, original: Tensor, hook: Any) -> Tensor:
    """The inverse of `positions_first`, in the dtype the model uses."""
    return (edited.transpose(1, 2) if _heads_come_first(hook) else edited).to(original.dtype)


def split_heads(mixed: Tensor, values: Tensor) -> Float[Tensor, "batch query head d_head"]:
    """The mixed values per query head: TransformerBridge may show them flat, or split by another size."""
    if mixed.ndim not in (3, 4) or mixed.shape[0] != values.shape[0]:
        raise ValueError(
            f"hook_z: expected [batch query head d_head] or [batch query features], batch {values.shape[0]}; "
            f"got shape {tuple(mixed.shape)}"
        )
    flat = mixed.flatten(2)
    d_head = values.shape[3]
    if flat.shape[2] % (d_head * values.shape[2]):
        raise ValueError(
            f"hook_z: expected a multiple of {values.shape[2]} heads of {d_head} numbers, as in hook_v; "
            f"got {flat.shape[2]} numbers"
        )
    return flat.unflatten(2, (-1, d_head))
