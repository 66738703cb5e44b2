"""BibTeX of the papers behind the methods and aggregations (`references.bib`)."""

from __future__ import annotations

import re
from importlib import resources

from lens_mix.arguments import one_of
from lens_mix.registry import all_methods

_AGGREGATIONS = dict.fromkeys(("flow", "rollout"), "abnar-zuidema-2020-quantifying")


def citation(name: str) -> str:
    """BibTeX of the paper of a method or an aggregation, by its name in strings.

    Raises:
        ValueError: no such method or aggregation; a method that names no paper.
    """
    keys = {label: getattr(method, "citation", "") for label, method in all_methods().items()} | _AGGREGATIONS
    one_of("name", name, sorted(keys))
    if not keys[name]:
        raise ValueError(f"name: {name!r} names no paper; its class attribute `citation` may hold the BibTeX")
    if keys[name].startswith("@"):
        return keys[name]
    entries = re.split(r"\n\n(?=@)", resources.files("lens_mix").joinpath("references.bib").read_text())
    cited = next((entry.strip() for entry in entries if f"{{{keys[name]}," in entry), None)
    if cited is None:
        raise ValueError(
            f"name: {name!r} cites {keys[name]!r}, which references.bib does not hold; its class attribute "
            "`citation` may hold the BibTeX itself"
        )
    return cited
