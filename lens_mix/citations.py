"""BibTeX of the papers behind the methods and aggregations."""

from __future__ import annotations

from lens_mix.methods import METHODS

_ABNAR_ZUIDEMA = """@inproceedings{abnar-zuidema-2020-quantifying,
  title = {Quantifying Attention Flow in Transformers},
  author = {Abnar, Samira and Zuidema, Willem},
  booktitle = {Proceedings of the 58th Annual Meeting of the Association for Computational Linguistics},
  year = {2020},
  pages = {4190--4197},
  url = {https://aclanthology.org/2020.acl-main.385},
}"""
_AGGREGATIONS = {"flow": _ABNAR_ZUIDEMA, "rollout": _ABNAR_ZUIDEMA}


def citation(name: str) -> str:
    """BibTeX of the paper of a method or an aggregation, by its name in strings.

    Raises:
        ValueError: no such method or aggregation.
    """
    if name in METHODS:
        return METHODS[name].citation
    if name in _AGGREGATIONS:
        return _AGGREGATIONS[name]
    raise ValueError(f"name: expected one of {sorted([*METHODS, *_AGGREGATIONS])}, got {name!r}")
