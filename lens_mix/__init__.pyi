from . import (
    aggregation,
    corpus,
    evaluation,
    experiments,
    graphs,
    hooks,
    methods,
    models,
    targets,
    testing,
    view,
)
from ._classes.model_classes import UnsupportedModelError
from ._model.model import Lens
from ._model.wrap import wrap
from ._verification.support import check
from .again import run_again
from .aggregation.flow import flow
from .aggregation.gradient_rollout import gradient_rollout
from .aggregation.layer_mean import layer_mean
from .aggregation.rollout import rollout
from .aggregation.tree import attribution_tree
from .citations import citation
from .evaluation.compare import compare
from .evaluation.leaderboard import evaluate
from .maps import Maps, MixingMap
from .maps.summary import table
from .method import Method
from .methods import METHODS
from .recommended import input_map
from .registry import register
from .runner import run, run_many
from .supported_methods import support
from .traces.audit import Audit
from .traces.audit_answer import audit
from .traces.documents import Documents
from .traces.many import trace_many
from .traces.trace import Trace, trace
from .view.page import page
from .view.position_figure import show_position

__version__: str

__all__ = [
    "METHODS",
    "Audit",
    "Documents",
    "Lens",
    "Maps",
    "Method",
    "MixingMap",
    "Trace",
    "UnsupportedModelError",
    "aggregation",
    "attribution_tree",
    "audit",
    "check",
    "citation",
    "compare",
    "corpus",
    "evaluate",
    "evaluation",
    "experiments",
    "flow",
    "gradient_rollout",
    "graphs",
    "hooks",
    "input_map",
    "layer_mean",
    "methods",
    "models",
    "page",
    "register",
    "rollout",
    "run",
    "run_again",
    "run_many",
    "show_position",
    "support",
    "table",
    "targets",
    "testing",
    "trace",
    "trace_many",
    "view",
    "wrap",
]
