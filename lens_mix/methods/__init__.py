"""One paper, one file: each method is a small frozen dataclass with one call."""

from lens_mix.method import Method
from lens_mix.methods.alti import Alti
from lens_mix.methods.alti_logit import AltiLogit
from lens_mix.methods.atb_ff import AtbFf, AtbFfRes, AtbFfResLn
from lens_mix.methods.attention import AttentionWeights, AttnResWeights
from lens_mix.methods.attention_attribution import AttentionAttribution
from lens_mix.methods.attn_res import AttnRes, AttnResLn
from lens_mix.methods.attribution_patching import AttributionPatching
from lens_mix.methods.context_length import ContextLength
from lens_mix.methods.decompx import DecompX, DecompXLocal
from lens_mix.methods.frozen_gradients import FrozenGradients
from lens_mix.methods.gim import Gim
from lens_mix.methods.globenc import GlobEnc
from lens_mix.methods.gradient_attention import GradientAttention
from lens_mix.methods.information_flow_routes import InformationFlowRoutes
from lens_mix.methods.input_gradients import InputGradients
from lens_mix.methods.occlusion import Occlusion
from lens_mix.methods.value_norms import ValueNorms
from lens_mix.methods.value_zeroing import ValueZeroing

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        AttentionWeights,
        ValueZeroing,
        ValueNorms,
        AttnRes,
        AttnResLn,
        AttnResWeights,
        AtbFf,
        AtbFfRes,
        AtbFfResLn,
        AttentionAttribution,
        GradientAttention,
        GlobEnc,
        Alti,
        InformationFlowRoutes,
        DecompX,
        DecompXLocal,
        AltiLogit,
        InputGradients,
        Occlusion,
        ContextLength,
        FrozenGradients,
        Gim,
        AttributionPatching,
    )
}
