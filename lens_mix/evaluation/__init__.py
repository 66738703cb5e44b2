"""How far to trust a map: scales and the leaderboard; and what to do with it: pruning, triggers."""

from lens_mix.evaluation.controls import randomised
from lens_mix.evaluation.head_importance import (
    HeadImportance,
    ablation_importance,
    head_importance,
    importance_correlations,
    pruned,
)
from lens_mix.evaluation.leaderboard import Leaderboard, evaluate
from lens_mix.evaluation.pruning import PruningCurves, pruning_curves
from lens_mix.evaluation.tasks import Case, Cues, Importance, Task, blimp_cases, planted_facts
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
    "Case",
    "Cues",
    "Example",
    "HeadImportance",
    "Importance",
    "Leaderboard",
    "PruningCurves",
    "Task",
    "Trigger",
    "TriggerReport",
    "ablation_importance",
    "blimp_cases",
    "evaluate",
    "extract_triggers",
    "head_importance",
    "importance_correlations",
    "insert_trigger",
    "planted_facts",
    "predict_by_token",
    "pruned",
    "pruning_curves",
    "randomised",
    "trigger_report",
]
