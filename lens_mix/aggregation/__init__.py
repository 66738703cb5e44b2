"""From a stack of layer maps to input maps: how much of each input token reached each position."""

from lens_mix.aggregation.rollout import residual_weight, rollout

__all__ = ["residual_weight", "rollout"]
