"""List the methods as they are recorded, so that a list takes no time: no method is imported.

`python -m tests.stub` writes `methods/listed.json` beside this file, from the classes of the methods.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import NamedTuple

from lens_mix._blocks.cost import COSTS, Cost

# The group of entry points by which installed packages provide methods.
PLUGINS = "lens_mix.methods"


class Description(NamedTuple):
    """Describe a method for a list of methods, or under the title of a figure.

    Attributes:
        group: The group in which lists have it.
        line: What a score of the map says, without a period; "" if it is unknown.
        cost: The cost in forward passes; None if it is unknown.
    """

    group: str
    line: str
    cost: Cost | None = None

    @property
    def cost_in_words(self) -> str:
        """Return the cost as lists show it."""
        return str(self.cost) if self.cost else "an unknown number of forward passes"


def read_descriptions() -> dict[str, Description]:
    """Return what lists say of `input_map` and of each built-in method, by their names, in their order."""
    file = importlib.resources.files("lens_mix") / "methods/listed.json"
    listed: list[list[str]] = json.loads(file.read_text(encoding="utf-8"))
    return {name: Description(group, line, COSTS.get(name)) for name, group, line in listed}
