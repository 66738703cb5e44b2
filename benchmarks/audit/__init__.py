"""Measure how often a verdict of `lm.audit` is wrong, on planted cases whose truth is known."""
