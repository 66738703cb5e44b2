"""Provide constructed models: small transformers with known routes, made by hand or compiled from RASP.

    model = constructed_models()["induction"]
    prompt = model.prompts(seed=0, count=1)[0]
    model.routes(prompt).layers     # [layer, query, key]: the cells that the answer depends on
    m = lm.run(model.model(), prompt, "value_zeroing")

`benchmarks/constructed/README.md` describes each model, and `docs/evidence/known_truth.md` how methods score.
"""

from lens_mix.experiments.constructed.by_hand import by_hand
from lens_mix.experiments.constructed.compiled import compiled
from lens_mix.experiments.constructed.model import ConstructedModel, Routes

__all__ = ["ConstructedModel", "Routes", "constructed_models"]


def constructed_models() -> dict[str, ConstructedModel]:
    """Return all constructed models by their names.

    >>> copy = lm.experiments.constructed_models()["copy"]
    >>> copy.description
    """
    return {model.name: model for model in (*by_hand(), *compiled())}
