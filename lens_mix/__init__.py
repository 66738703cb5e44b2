"""Measure context mixing in any TransformerLens model.

The maps of this library answer a question, layer by layer: which token's information went into which token's
representation? Load a model with TransformerLens, then:

    >>> import lens_mix as lm
    >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
    >>> m.scores                  # [layer, query, key], raw
    >>> m.normalized().top(5)     # the keys that the last position used most, in the last layer
    >>> lm.rollout(m)             # input maps: from each position down to the input tokens
    >>> lm.flow(m)                # input maps by maximum flow

One clean pass serves several methods, and many prompts run in batches:

    >>> prompts, cues = ["Anna lives in Rome", "Ben lives in Oslo"], ["Anna", "Ben"]
    >>> maps = lm.run(model, prompts[0], ["attention", lm.methods.ValueZeroing(metric="euclidean")])
    >>> many = lm.run_many(model, prompts, "value_zeroing", queries=[-1], batch_size=16)
    >>> lm.table(many, keys=cues)  # means over the prompts, with intervals

A model is verified before it is used:

    >>> lm.check(model, "The Eiffel Tower is in the city of")  # every block is rebuilt from its components
    >>> lm.support(model)         # which methods run on this model, and why others do not

The hooks of the methods can also be used alone, together with your own hooks:

    >>> from lens_mix.hooks import zero_values
    >>> model.run_with_hooks(tokens, fwd_hooks=[zero_values(layer=1, position=2)])
"""

from typing import Any

import lazy_loader

from lens_mix.version import __version__ as __version__

# A name is imported when it is first used, so that `import lens_mix` takes little time. `__init__.pyi` lists
# the module of each name, for `lazy_loader` and for type checkers.
_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Return a public name; raise an AttributeError that names the closest one if there is none."""
    try:
        return _import_name(name)
    except AttributeError:
        # `from lens_mix import runner` asks for the name first, so this must import nothing of the library.
        import difflib
        import pathlib
        import re

        known: list[str] = []
        for path in (
            "methods/__init__.pyi",
            "aggregation/__init__.py",
            "experiments/__init__.py",
            "models.py",
        ):
            text = (pathlib.Path(__file__).parent / path).read_text(encoding="utf-8")
            module = re.split(r"[/.]", path)[0]
            known += [f"{module}.{each}" for each in re.findall(r'"(\w+)"', text)]
        public = {each.rpartition(".")[2].replace("_", "").casefold(): each for each in (*known, *__all__)}
        close = difflib.get_close_matches(name.replace("_", "").casefold(), public, 1)
        suggestion = f"; did you mean lens_mix.{public[close[0]]}?" if close else ""
        suggestion += " lens_mix.METHODS lists all methods" if "methods." in suggestion else ""
        raise AttributeError(f"module 'lens_mix' has no attribute {name!r}{suggestion}", name=name) from None
