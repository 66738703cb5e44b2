"""Compute input maps from layer maps: how much of each input token reached each position."""

from lens_mix.aggregation.flow import flow
from lens_mix.aggregation.gradient_rollout import gradient_rollout
from lens_mix.aggregation.joint import joint
from lens_mix.aggregation.layer_mean import layer_mean
from lens_mix.aggregation.rollout import rollout
from lens_mix.aggregation.tree import attribution_tree, tree_text

__all__ = [
    "attribution_tree",
    "flow",
    "gradient_rollout",
    "joint",
    "layer_mean",
    "rollout",
    "tree_text",
]


def __dir__() -> list[str]:
    return __all__
