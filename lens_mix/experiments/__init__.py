"""Experiments and statistics with maps: heads, triggers, probes, word alignment, constructed models."""

from lens_mix.experiments.alignment import align, align_words, diagonal
from lens_mix.experiments.alignment_errors import AlignmentErrors, GoldAlignment, alignment_errors, read_gold
from lens_mix.experiments.attention import attention_statistics
from lens_mix.experiments.constructed import ConstructedModel, Routes, constructed_models
from lens_mix.experiments.ground_truth import roc_area, score_constructed
from lens_mix.experiments.head_importance import (
    HeadImportance,
    ablation_importance,
    head_importance,
    importance_correlations,
    pruned,
)
from lens_mix.experiments.head_probe import probe_heads
from lens_mix.experiments.plausibility import blimp_cases, planted_facts
from lens_mix.experiments.probing import (
    Probing,
    ProbingAgreement,
    probe_layers,
    probing_agreement,
    residuals_at,
)
from lens_mix.experiments.pruning import PruningCurves, pruning_curves
from lens_mix.experiments.triggers import (
    Example,
    Trigger,
    TriggerReport,
    extract_triggers,
    insert_trigger,
    predict_by_token,
    trigger_report,
)

__all__ = [
    "AlignmentErrors",
    "ConstructedModel",
    "Example",
    "GoldAlignment",
    "HeadImportance",
    "Probing",
    "ProbingAgreement",
    "PruningCurves",
    "Routes",
    "Trigger",
    "TriggerReport",
    "ablation_importance",
    "align",
    "align_words",
    "alignment_errors",
    "attention_statistics",
    "blimp_cases",
    "constructed_models",
    "diagonal",
    "extract_triggers",
    "head_importance",
    "importance_correlations",
    "insert_trigger",
    "planted_facts",
    "predict_by_token",
    "probe_heads",
    "probe_layers",
    "probing_agreement",
    "pruned",
    "pruning_curves",
    "read_gold",
    "residuals_at",
    "roc_area",
    "score_constructed",
    "trigger_report",
]


def __dir__() -> list[str]:
    return __all__
