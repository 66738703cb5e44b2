"""Measure what docs/evidence/information_flow_routes.md says about a real model."""
