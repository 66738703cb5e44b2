"""Measure what docs/evidence/scales.md says about the scales themselves."""
