"""How far to trust a map, and what to do with it: ground truth, head importance, pruning curves, triggers."""

from lens_mix.evaluation.constructed import ConstructedModel, Routes, constructed_models
from lens_mix.evaluation.ground_truth import roc_area, score_constructed
from lens_mix.evaluation.head_importance import (
    HeadImportance,
    ablation_importance,
    head_importance,
    importance_correlations,
    pruned,
)
from lens_mix.evaluation.pruning import PruningCurves, pruning_curves
from lens_mix.evaluation.triggers import (
    Example,
    Trigger,
    TriggerReport,
    extract_triggers,
    insert_trigger,
    predict_by_token,
    trigger_report,
)

__all__ = [
    "ConstructedModel",
    "Example",
    "HeadImportance",
    "PruningCurves",
    "Routes",
    "Trigger",
    "TriggerReport",
    "ablation_importance",
    "constructed_models",
    "extract_triggers",
    "head_importance",
    "importance_correlations",
    "insert_trigger",
    "predict_by_token",
    "pruned",
    "pruning_curves",
    "roc_area",
    "score_constructed",
    "trigger_report",
]
