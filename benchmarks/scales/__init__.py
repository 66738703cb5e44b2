"""Measure what docs/evidence/known_truth.md says about the scales themselves."""
