"""Count the nodes and edges of the graph of information-flow routes on one prompt of SmolLM2.

python -m benchmarks.routes        writes results/smollm2.md; about ten seconds
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lens_mix as lm
from benchmarks.common import describe_measurement, markdown_table, smollm2
from lens_mix.graphs import information_flow_routes

PROMPT = (
    "My grandmother was born in Italy. She left the country with her three children after the war, "
    "but all her life she cooked the food of her home and sang to us in"
)
# The second one is the default, that of the authors' tool.
THRESHOLDS = (0.02, 0.04, 0.1)
# More tokens than these are counted, and not listed.
SHOWN = 8


def main() -> None:
    """Write one row for each threshold."""
    m = lm.run(smollm2(), PROMPT, lm.methods.InformationFlowRoutes(per_head=True))
    possible = len(m.tokens) * (1 + 3 * len(m))
    rows = [count(m, threshold) for threshold in THRESHOLDS]
    page = (
        "# Information-flow routes on SmolLM2\n\nWritten by `python -m benchmarks.routes`. "
        f"SmolLM2-135M-Instruct, one prompt of {len(m.tokens)} tokens, heads apart, to the last position "
        f"({m.explanation()}); {possible} possible nodes.\n\n"
        "An edge into the last position is kept if its importance is above the threshold. The nodes at which "
        "kept edges start are treated in the same way. Each layer has three levels of nodes.\n\n"
        f"> {PROMPT}\n\n## Size of the graph\n\n"
        f"{describe_measurement()}\n\n{markdown_table(rows)}\n"
    )
    (Path(__file__).parent / "results" / "smollm2.md").write_text(page, encoding="utf-8")


def count(m: lm.MixingMap, threshold: float) -> dict[str, Any]:
    """Return one row of the table."""
    graph = information_flow_routes(m, threshold=threshold)
    reached = [m.tokens[position].strip() for level, position in sorted(graph) if level == 0]
    which = ", ".join(f"`{token}`" for token in reached) if len(reached) <= SHOWN else ""
    sizes = {"nodes": len(graph), "edges": graph.number_of_edges(), "input tokens reached": len(reached)}
    return {"threshold": f"importance above {threshold}", **sizes, "which": which}


if __name__ == "__main__":
    main()
