"""Measure how far to trust a map (scales, the leaderboard), and use maps to prune heads and find triggers."""

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
from lens_mix.evaluation.alignment import align, align_words, diagonal
from lens_mix.evaluation.alignment_errors import AlignmentErrors, GoldAlignment, alignment_errors, read_gold
from lens_mix.evaluation.cells import CellFaithfulness, keep_cells, pool_cells
from lens_mix.evaluation.constructed import ConstructedModel, Routes, constructed_models
from lens_mix.evaluation.controls import randomised
from lens_mix.evaluation.curves import RemovalCurves, removal_curves
from lens_mix.evaluation.ground_truth import roc_area, score_constructed
from lens_mix.evaluation.head_importance import (
    HeadImportance,
    ablation_importance,
    head_importance,
    importance_correlations,
    pruned,
)
from lens_mix.evaluation.leaderboard import Leaderboard, evaluate
from lens_mix.evaluation.plausibility import blimp_cases, planted_facts
from lens_mix.evaluation.probing import (
    Probing,
    ProbingAgreement,
    probe_layers,
    probing_agreement,
    residuals_at,
)
from lens_mix.evaluation.pruning import PruningCurves, pruning_curves
from lens_mix.evaluation.soft import SoftFaithfulness, soft_faithfulness
from lens_mix.evaluation.sources import SourceAblations, TopKDrop, lds, source_ablations, top_k_drop
from lens_mix.evaluation.tasks import Case, Cells, Cues, Importance, Removals, Sources, Task
from lens_mix.evaluation.triggers import (
    Example,
    Trigger,
    TriggerReport,
    extract_triggers,
    insert_trigger,
    predict_by_token,
    trigger_report,
)
from lens_mix.removal import Drop, MaskKeys, Removal, ReplaceTokens, SampleTokens, ZeroValues

__all__ = [
    "AlignmentErrors",
    "Case",
    "CellFaithfulness",
    "Cells",
    "ConstructedModel",
    "Cues",
    "Drop",
    "Example",
    "GoldAlignment",
    "HeadImportance",
    "Importance",
    "Interval",
    "Leaderboard",
    "MaskKeys",
    "Probing",
    "ProbingAgreement",
    "PruningCurves",
    "Removal",
    "RemovalCurves",
    "Removals",
    "ReplaceTokens",
    "Routes",
    "SampleTokens",
    "SoftFaithfulness",
    "SourceAblations",
    "Sources",
    "Task",
    "TopKDrop",
    "Trigger",
    "TriggerReport",
    "ZeroValues",
    "ablation_importance",
    "align",
    "align_words",
    "alignment_errors",
    "average_precision",
    "blimp_cases",
    "bootstrap",
    "constructed_models",
    "diagonal",
    "evaluate",
    "extract_triggers",
    "head_importance",
    "importance_correlations",
    "insert_trigger",
    "keep_cells",
    "lds",
    "mass_accuracy",
    "partial_spearman",
    "planted_facts",
    "pool_cells",
    "predict_by_token",
    "probe_layers",
    "probing_agreement",
    "pruned",
    "pruning_curves",
    "randomised",
    "read_gold",
    "reciprocal_rank",
    "removal_curves",
    "residuals_at",
    "roc_area",
    "score_constructed",
    "soft_faithfulness",
    "source_ablations",
    "spearman",
    "top_k_drop",
    "top_k_overlap",
    "trigger_report",
]


def __dir__() -> list[str]:
    return __all__
