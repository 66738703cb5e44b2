"""Measure how large the graph of information-flow routes is on a real model."""
