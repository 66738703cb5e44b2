"""Compare the two operators of `keep_cells`, and maps as they are with rows that sum to 1, on SmolLM2.

python -m benchmarks.scales.cells                writes results/cells.md; about ten minutes; resumes
"""

from __future__ import annotations

from pathlib import Path

import lens_mix as lm
from benchmarks.common import describe_measurement, smollm2
from benchmarks.leaderboard import short_prompts
from lens_mix import evaluation

METHODS = ["attention", "value_zeroing", "alti", "attn_res_ln", "gradient_attention"]
PROMPTS = 12
FOLDER = Path("outputs") / "scales"


def main() -> None:
    """Write one table for each operator."""
    model = smollm2()
    FOLDER.mkdir(parents=True, exist_ok=True)
    page = (
        "# Cells kept\n\nWritten by `python -m benchmarks.scales.cells`. SmolLM2-135M-Instruct, "
        f"{PROMPTS} short prompts; mean [95 % interval over the prompts], in nats.\n"
    )
    for operator in ("zero", "mean"):
        board = lm.evaluate(
            model,
            evaluation.Cells(short_prompts(PROMPTS, 70), operator),
            METHODS,
            resume=FOLDER / f"cells-{operator}.jsonl",
            progress=True,
        )
        page += (
            f"\n## Removed cells by {operator}\n\n{describe_measurement()}\n\n{board.to_markdown('random')}\n"
        )
    (Path(__file__).parent / "results" / "cells.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
