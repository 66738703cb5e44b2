"""How far to trust a map, and what to do with it: head importance, pruning curves, triggers, probes."""

from lens_mix.evaluation.head_importance import (
    HeadImportance,
    ablation_importance,
    head_importance,
    importance_correlations,
    pruned,
)
from lens_mix.evaluation.probing import (
    Probing,
    ProbingAgreement,
    probe_layers,
    probing_agreement,
    residuals_at,
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
    "Example",
    "HeadImportance",
    "Probing",
    "ProbingAgreement",
    "PruningCurves",
    "Trigger",
    "TriggerReport",
    "ablation_importance",
    "extract_triggers",
    "head_importance",
    "importance_correlations",
    "insert_trigger",
    "predict_by_token",
    "probe_layers",
    "probing_agreement",
    "pruned",
    "pruning_curves",
    "residuals_at",
    "trigger_report",
]
