from lens_mix.method import Method

from .alti import Alti
from .alti_logit import AltiLogit
from .atb_ff import AtbFf, AtbFfRes, AtbFfResLn
from .attention import AttentionWeights, AttnResWeights
from .attention_attribution import AttentionAttribution
from .attn_res import AttnRes, AttnResLn
from .context_length import ContextLength
from .decompx import DecompX, DecompXLocal
from .frozen_gradients import FrozenGradients
from .gim import Gim
from .globenc import GlobEnc
from .gradient_attention import GradientAttention
from .information_flow_routes import InformationFlowRoutes
from .input_gradients import InputGradients
from .occlusion import Occlusion
from .token_patching import TokenPatching
from .value_norms import ValueNorms
from .value_zeroing import ValueZeroing

METHODS: dict[str, type[Method]]

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
    "ContextLength",
    "DecompX",
    "DecompXLocal",
    "FrozenGradients",
    "Gim",
    "GlobEnc",
    "GradientAttention",
    "InformationFlowRoutes",
    "InputGradients",
    "Occlusion",
    "TokenPatching",
    "ValueNorms",
    "ValueZeroing",
]
