"""Look up the BibTeX of the papers of methods and aggregations (`references.bib`)."""

from __future__ import annotations

import re
from importlib import resources

from lens_mix.arguments import check_instance
from lens_mix.registry import find_method

_AGGREGATIONS = dict.fromkeys(("flow", "rollout"), "abnar-zuidema-2020-quantifying")


def citation(name: str) -> str:
    """Return the BibTeX of the paper of a method or an aggregation.

        >>> print(lm.citation("value_zeroing"))

    Args:
        name: The name of the method, as for `lm.run`, or "flow" or "rollout".

    Raises:
        ValueError: If the method or aggregation does not exist, or if the method does not cite a paper.
    """
    check_instance("name", name, str, "the name of a method or an aggregation")
    key = _AGGREGATIONS.get(name) or getattr(find_method(name, "name"), "citation", "")
    if not key:
        raise ValueError(
            f"name: expected a method with a paper, got {name!r}, which cites none; write the BibTeX in its "
            "class attribute `citation`"
        )
    if key.startswith("@"):
        return key
    entries = re.split(r"\n\n(?=@)", resources.files("lens_mix").joinpath("references.bib").read_text())
    cited = next((entry.strip() for entry in entries if f"{{{key}," in entry), None)
    if cited is None:
        raise ValueError(
            f"name: expected a method whose paper is in references.bib, got {name!r}, which cites "
            f"{key!r}; write the BibTeX itself in its class attribute `citation`"
        )
    return cited
