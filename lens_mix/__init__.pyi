from . import evaluation, targets
from .aggregation.flow import flow
from .aggregation.gradient_rollout import gradient_rollout
from .aggregation.rollout import rollout
from .aggregation.tree import attribution_tree, tree_text
from .citations import citation
from .lens.model import Lens
from .lens.model_classes import UnsupportedModelError
from .lens.proof.support import check
from .maps import MixingMap
from .methods import (
    METHODS,
    Alti,
    AltiLogit,
    AtbFf,
    AtbFfRes,
    AtbFfResLn,
    AttentionAttribution,
    AttentionWeights,
    AttnRes,
    AttnResLn,
    AttnResWeights,
    DecompX,
    DecompXLocal,
    GlobEnc,
    GradientAttention,
    InformationFlowRoutes,
    Method,
    ValueNorms,
    ValueZeroing,
)
from .runner import run, run_many, support

__version__: str

__all__ = [
    "METHODS",
    "Alti",
    "AltiLogit",
    "AtbFf",
    "AtbFfRes",
    "AtbFfResLn",
    "AttentionAttribution",
    "AttentionWeights",
    "AttnRes",
    "AttnResLn",
    "AttnResWeights",
    "DecompX",
    "DecompXLocal",
    "GlobEnc",
    "GradientAttention",
    "InformationFlowRoutes",
    "Lens",
    "Method",
    "MixingMap",
    "UnsupportedModelError",
    "ValueNorms",
    "ValueZeroing",
    "attribution_tree",
    "check",
    "citation",
    "evaluation",
    "flow",
    "gradient_rollout",
    "rollout",
    "run",
    "run_many",
    "support",
    "targets",
    "tree_text",
]
