"""Context mixing for every TransformerLens model.

Which token's information went into which token's representation, layer by layer, and how far can that
answer be trusted? Load a model with TransformerLens as always, then:

    import lens_mix as lm

    m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
    m.scores                      # [layer, query, key], raw
    m.normalized().top(5)         # what the last position used most in the last layer
    lm.rollout(m)                 # input maps: through all layers down to the tokens
    lm.flow(m)                    # the same by maximum flow

    maps = lm.run(model, tokens, ["attention", lm.ValueZeroing(metric="euclidean")])   # one clean pass
    for m in lm.run_many(model, prompts, "value_zeroing", batch_size=16): ...          # streams

    lm.check(model, prompt)       # the proof: every block rebuilt from its parts
    lm.support(model)             # which methods run on this model, and why others don't

The hooks that the methods are made of work on their own, next to your own:

    from lens_mix.hooks import zero_values
    model.run_with_hooks(tokens, fwd_hooks=[zero_values(layer=3, position=5)])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lens_mix import evaluation, targets
    from lens_mix.aggregation.flow import flow
    from lens_mix.aggregation.gradient_rollout import gradient_rollout
    from lens_mix.aggregation.rollout import rollout
    from lens_mix.aggregation.tree import attribution_tree, tree_text
    from lens_mix.citations import citation
    from lens_mix.lens.model import Lens
    from lens_mix.lens.model_classes import UnsupportedModelError
    from lens_mix.lens.proof.support import check
    from lens_mix.maps import MixingMap
    from lens_mix.methods import (
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
        Method,
        ValueNorms,
        ValueZeroing,
    )
    from lens_mix.runner import run, run_many, support

# Imported when first used, so that `import lens_mix` costs next to nothing beside TransformerLens.
_HOME = {
    "METHODS": "lens_mix.methods",
    "Alti": "lens_mix.methods",
    "AltiLogit": "lens_mix.methods",
    "AtbFf": "lens_mix.methods",
    "AtbFfRes": "lens_mix.methods",
    "AtbFfResLn": "lens_mix.methods",
    "AttentionAttribution": "lens_mix.methods",
    "AttentionWeights": "lens_mix.methods",
    "AttnRes": "lens_mix.methods",
    "AttnResLn": "lens_mix.methods",
    "AttnResWeights": "lens_mix.methods",
    "DecompX": "lens_mix.methods",
    "DecompXLocal": "lens_mix.methods",
    "GlobEnc": "lens_mix.methods",
    "GradientAttention": "lens_mix.methods",
    "Lens": "lens_mix.lens.model",
    "Method": "lens_mix.methods",
    "MixingMap": "lens_mix.maps",
    "UnsupportedModelError": "lens_mix.lens.model_classes",
    "ValueNorms": "lens_mix.methods",
    "ValueZeroing": "lens_mix.methods",
    "attribution_tree": "lens_mix.aggregation.tree",
    "check": "lens_mix.lens.proof.support",
    "citation": "lens_mix.citations",
    "flow": "lens_mix.aggregation.flow",
    "gradient_rollout": "lens_mix.aggregation.gradient_rollout",
    "rollout": "lens_mix.aggregation.rollout",
    "run": "lens_mix.runner",
    "run_many": "lens_mix.runner",
    "support": "lens_mix.runner",
    "tree_text": "lens_mix.aggregation.tree",
}

# Parts of the library that are used as modules: `lm.targets.token(" Paris")`.
_MODULES = ("evaluation", "targets")

__version__ = "0.1.0"

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


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"lens_mix.{name}")
    raise AttributeError(f"module 'lens_mix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
