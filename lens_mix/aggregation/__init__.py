"""Compute input maps from layer maps: how much of each input token reached each position."""

from lens_mix.aggregation.flow import flow
from lens_mix.aggregation.rollout import residual_weight, rollout

__all__ = ["flow", "residual_weight", "rollout"]
