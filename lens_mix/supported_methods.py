"""Find out which methods run on a model."""

from __future__ import annotations

import dataclasses

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._verification.support import Support, any_tokens, support_table
from lens_mix.registry import all_methods
from lens_mix.runner import run


def support(model: TransformerLensModel, *, part: str | None = None) -> Support:
    """Return a table of all methods: the engine that "auto" uses on this model, or the reason for an error.

        >>> print(lm.support(model))
        >>> lm.support(model)["decompx"]

    Args:
        model: Any TransformerLens model.
        part: The part of an encoder-decoder: "encoder" (default), "decoder", "cross" or "joint".
    """
    methods = all_methods()
    table = support_table(model, [method() for method in methods.values()], part)
    rows = []
    for name, engine, reason in table:
        if engine is not None and "position_ids" in methods[name].needs:
            # Whether such a method works on the model is known only from a run.
            try:
                run(model, any_tokens(model), name, part=part, queries=[-1], progress=None)
            except UnsupportedModelError as problem:
                engine, reason = None, str(problem)
        rows.append((name, engine, reason))
    return dataclasses.replace(table, rows=tuple(rows))
