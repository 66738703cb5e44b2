"""Measure how far to trust a map: scales, controls, and the leaderboard."""

from lens_mix.evaluation.agreement import (
    Interval,
    average_precision,
    bootstrap,
    mass_accuracy,
    partial_spearman,
    reciprocal_rank,
    spearman,
    top_k_overlap,
)
from lens_mix.evaluation.cells import CellFaithfulness, keep_cells, pool_cells
from lens_mix.evaluation.controls import randomised
from lens_mix.evaluation.curves import RemovalCurves, removal_curves
from lens_mix.evaluation.leaderboard import Leaderboard, evaluate
from lens_mix.evaluation.soft import SoftFaithfulness, soft_faithfulness
from lens_mix.evaluation.sources import SourceAblations, TopKDrop, lds, source_ablations, top_k_drop
from lens_mix.evaluation.tasks import Case, Cells, Cues, Importance, Removals, Sources, Task
from lens_mix.removal import Drop, MaskKeys, Removal, ReplaceTokens, SampleTokens, ZeroValues

__all__ = [
    "Case",
    "CellFaithfulness",
    "Cells",
    "Cues",
    "Drop",
    "Importance",
    "Interval",
    "Leaderboard",
    "MaskKeys",
    "Removal",
    "RemovalCurves",
    "Removals",
    "ReplaceTokens",
    "SampleTokens",
    "SoftFaithfulness",
    "SourceAblations",
    "Sources",
    "Task",
    "TopKDrop",
    "ZeroValues",
    "average_precision",
    "bootstrap",
    "evaluate",
    "keep_cells",
    "lds",
    "mass_accuracy",
    "partial_spearman",
    "pool_cells",
    "randomised",
    "reciprocal_rank",
    "removal_curves",
    "soft_faithfulness",
    "source_ablations",
    "spearman",
    "top_k_drop",
    "top_k_overlap",
]


def __dir__() -> list[str]:
    return __all__
