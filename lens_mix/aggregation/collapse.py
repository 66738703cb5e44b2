"""Notes on input maps that have collapsed: to one token, or to the position alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_LEAST_KEYS = 8  # fewer keys may stand in order by chance
_ON_ONE = 0.99


def collapse_notes(
    rows: Float[Tensor, "query key"], visible: Bool[Tensor, "query key"], queries: Sequence[int]
) -> tuple[str, ...]:
    """What to say of rows of an input map that no longer tell tokens apart.

    Args:
        rows: of one layer, the deepest.
        visible: which keys each query could see.
        queries: positions of the rows.
    """
    visible = visible.to(rows.device)
    enough = visible.sum(-1) >= _LEAST_KEYS
    scores = rows.masked_fill(~visible, 0)
    totals = scores.sum(-1)
    on_one = enough & (totals > 0) & (scores.amax(-1) >= _ON_ONE * totals)
    steps = [row[keys].diff() for row, keys in zip(rows, visible, strict=True)]
    monotonic = torch.stack([(step > 0).all() | (step < 0).all() for step in steps])
    ordered = enough & ~on_one & monotonic
    notes = []
    for marks, says in (
        (on_one, f"put {_ON_ONE:.0%} or more on one token: so many layers of mixing carry everything there"),
        (
            ordered,
            "rise or fall with the position throughout: their order tells where tokens stand, and no more",
        ),
    ):
        if bool(marks.any()):
            places = [queries[row] for row in marks.nonzero()[:, 0].tolist()]
            shown = ", ".join(map(str, places[:5])) + ", ..." * (len(places) > 5)
            notes.append(f"{len(places)} of {int(enough.sum())} rows of the last layer ({shown}) {says}")
    return tuple(notes)
