"""Write notes about input maps whose rows have collapsed to one token, or to an order of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# The scores of fewer keys may rise or fall with the position by chance.
_MIN_KEYS = 8
# From this share on one token, a note says that the row has collapsed.
_COLLAPSED_SHARE = 0.99


def collapse_notes(
    rows: Float[Tensor, "query key"], visible: Bool[Tensor, "query key"], queries: Sequence[int]
) -> tuple[str, ...]:
    """Return notes about rows of an input map that no longer distinguish tokens.

    Args:
        rows: The rows of the deepest layer.
        visible: The keys that each query could see.
        queries: The positions of the rows.
    """
    visible = visible.to(rows.device)
    has_enough_keys = visible.sum(-1) >= _MIN_KEYS
    scores = rows.masked_fill(~visible, 0)
    totals = scores.sum(-1)
    is_on_one = has_enough_keys & (totals > 0) & (scores.amax(-1) >= _COLLAPSED_SHARE * totals)
    steps = [row[keys].diff() for row, keys in zip(rows, visible, strict=True)]
    is_monotonic = torch.stack([(step > 0).all() | (step < 0).all() for step in steps])
    is_ordered = has_enough_keys & ~is_on_one & is_monotonic
    on_one = (
        f"have {_COLLAPSED_SHARE:.0%} or more of their sum on one token, an effect of many layers of mixing"
    )
    ordered = "rise or fall with the position throughout, so the order of their scores shows nothing else"
    notes = []
    for collapsed, text in ((is_on_one, on_one), (is_ordered, ordered)):
        if bool(collapsed.any()):
            positions = [queries[row] for row in collapsed.nonzero()[:, 0].tolist()]
            names = ", ".join(map(str, positions[:5])) + ", ..." * (len(positions) > 5)
            count = int(has_enough_keys.sum())
            notes.append(f"{len(positions)} of {count} rows of the last layer ({names}) {text}")
    return tuple(notes)
