"""Rebuild every block of a model from its components, and compare it with what the model computed."""
