"""Benchmarks of traces: from which sentence or passage did a written span come?"""
