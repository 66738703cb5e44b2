from . import corpus, evaluation, experiments, graphs, hooks, targets, testing, view
from ._algebra.block_parts import BlockParts, block_parts
from ._classes.model_classes import UnsupportedModelError
from ._model.layer_scale import fold_layer_scale
from ._model.model import Lens
from ._model.wrap import wrap
from ._verification.support import check
from .again import run_again
from .aggregation.flow import flow
from .aggregation.gradient_rollout import gradient_rollout
from .aggregation.joint import joint
from .aggregation.layer_mean import layer_mean
from .aggregation.rollout import rollout
from .aggregation.summary import table
from .aggregation.tree import attribution_tree, tree_text
from .citations import citation
from .evaluation.compare import compare
from .evaluation.leaderboard import evaluate
from .maps import MixingMap
from .method import Method
from .methods import METHODS
from .methods.alti import Alti
from .methods.alti_logit import AltiLogit
from .methods.atb_ff import AtbFf, AtbFfRes, AtbFfResLn
from .methods.attention import AttentionWeights, AttnResWeights
from .methods.attention_attribution import AttentionAttribution
from .methods.attn_res import AttnRes, AttnResLn
from .methods.attribution_patching import AttributionPatching
from .methods.context_length import ContextLength
from .methods.decompx import DecompX, DecompXLocal
from .methods.frozen_gradients import FrozenGradients
from .methods.gim import Gim
from .methods.globenc import GlobEnc
from .methods.gradient_attention import GradientAttention
from .methods.information_flow_routes import InformationFlowRoutes
from .methods.input_gradients import InputGradients
from .methods.occlusion import Occlusion
from .methods.value_norms import ValueNorms
from .methods.value_zeroing import ValueZeroing
from .recommended import input_map
from .registry import register
from .runner import run, run_many
from .supported_methods import support
from .traces.documents import Documents
from .traces.many import trace_many
from .traces.trace import Trace, trace
from .view.page import page
from .view.position_figure import show_position

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
    "AttributionPatching",
    "BlockParts",
    "ContextLength",
    "DecompX",
    "DecompXLocal",
    "Documents",
    "FrozenGradients",
    "Gim",
    "GlobEnc",
    "GradientAttention",
    "InformationFlowRoutes",
    "InputGradients",
    "Lens",
    "Method",
    "MixingMap",
    "Occlusion",
    "Trace",
    "UnsupportedModelError",
    "ValueNorms",
    "ValueZeroing",
    "attribution_tree",
    "block_parts",
    "check",
    "citation",
    "compare",
    "corpus",
    "evaluate",
    "evaluation",
    "experiments",
    "flow",
    "fold_layer_scale",
    "gradient_rollout",
    "graphs",
    "hooks",
    "input_map",
    "joint",
    "layer_mean",
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
    "tree_text",
    "view",
    "wrap",
]
