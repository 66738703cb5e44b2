"""Context mixing for every TransformerLens model.

Which token's information went into which token's representation, layer by layer, and how far can that
answer be trusted? Load a model with TransformerLens as always, then:

    import lens_mix as lm

    m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
    m.scores                      # [layer, query, key], raw
    m.normalized().top(5)         # what the last position used most in the last layer
    lm.rollout(m)                 # input maps: through all layers down to the tokens

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
    from lens_mix.aggregation.rollout import rollout
    from lens_mix.citations import citation
    from lens_mix.lens.kinds import UnsupportedModelError
    from lens_mix.lens.model import Lens
    from lens_mix.lens.support import check
    from lens_mix.maps import MixingMap
    from lens_mix.methods import (
        METHODS,
        AttentionWeights,
        AttnRes,
        AttnResLn,
        AttnResWeights,
        Method,
        ValueNorms,
        ValueZeroing,
    )
    from lens_mix.runner import run, run_many, support

# Imported when first used, so that `import lens_mix` costs next to nothing beside TransformerLens.
_HOME = {
    "METHODS": "lens_mix.methods",
    "AttentionWeights": "lens_mix.methods",
    "AttnRes": "lens_mix.methods",
    "AttnResLn": "lens_mix.methods",
    "AttnResWeights": "lens_mix.methods",
    "Lens": "lens_mix.lens.model",
    "Method": "lens_mix.methods",
    "MixingMap": "lens_mix.maps",
    "UnsupportedModelError": "lens_mix.lens.kinds",
    "ValueNorms": "lens_mix.methods",
    "ValueZeroing": "lens_mix.methods",
    "check": "lens_mix.lens.support",
    "citation": "lens_mix.citations",
    "rollout": "lens_mix.aggregation.rollout",
    "run": "lens_mix.runner",
    "run_many": "lens_mix.runner",
    "support": "lens_mix.runner",
}

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AttentionWeights",
    "AttnRes",
    "AttnResLn",
    "AttnResWeights",
    "Lens",
    "Method",
    "MixingMap",
    "UnsupportedModelError",
    "ValueNorms",
    "ValueZeroing",
    "check",
    "citation",
    "rollout",
    "run",
    "run_many",
    "support",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'lens_mix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
