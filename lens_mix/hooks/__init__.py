"""Provide reusable hooks for TransformerLens models: most functions return one pair for `fwd_hooks=[...]`.

They have the same effect on HookedTransformer, HookedEncoder, HookedEncoderDecoder and TransformerBridge.
They import nothing else of lens_mix than `lens_mix.arguments`, which checks their arguments:

    >>> from lens_mix.hooks import prune_heads, scale_pattern, zero_values
    >>> model.run_with_hooks(tokens, fwd_hooks=[zero_values(0, position=2), prune_heads(1, [1, 2])])
    >>> with model.hooks(fwd_hooks=[scale_pattern(0, 0.5)]):
    ...     logits = model(tokens)

The second entry of a pair is the hook function. Its attribute `calls` counts how often it had its effect.
`AttentionHook` is the base class for an intervention of your own that needs several hook points.
"""

import lazy_loader

# A file is imported when one of its names is first used, so the library's own files import only the hooks
# that they use. `__init__.pyi` lists the file of each name, for `lazy_loader` and for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
