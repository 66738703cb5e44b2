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

    lm.check(model, prompt)       # the verification: every block rebuilt from its parts
    lm.support(model)             # which methods run on this model, and why others don't

The hooks that the methods are made of work on their own, next to your own:

    from lens_mix.hooks import zero_values
    model.run_with_hooks(tokens, fwd_hooks=[zero_values(layer=3, position=5)])
"""

import lazy_loader

from lens_mix.version import __version__ as __version__

# Names are imported when first used, so that `import lens_mix` costs next to nothing beside TransformerLens.
# `__init__.pyi` says where each of them lives, for this and for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
