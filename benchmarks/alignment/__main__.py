"""Measure cross-attention as a word aligner (Kobayashi et al., EMNLP 2020, section 5), and write results/.

python -m benchmarks.alignment                     both experiments; continues an interrupted run
python -m benchmarks.alignment --only known        a small translator with a known alignment, trained here
python -m benchmarks.alignment --only hansards     flan-t5 on English–French pairs with gold alignments
python -m benchmarks.alignment --pairs 20          fewer pairs
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.alignment import hansards, known
from benchmarks.common import describe_machine

PARTS = {"known": known.tables, "hansards": hansards.tables}


def main() -> None:
    """Write the pages that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS), help="one experiment; default: both")
    parser.add_argument("--pairs", type=int, help="how many; default: 200 of known, all of hansards")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for name in [options.only] if options.only else PARTS:
        page = make(name, options.pairs)
        (options.out / f"{name}.md").write_text(page, encoding="utf-8")


def make(name: str, pairs: int | None) -> str:
    """Return a page of results, with its date and machine."""
    start = time.perf_counter()
    texts = list(PARTS[name](pairs))
    took = f"{time.perf_counter() - start:.0f} s, without what was measured or trained before"
    heading = (
        f"# Word alignment: {name}\n\nWritten by `python -m benchmarks.alignment --only {name}`; see "
        "[the page](../../../docs/evidence/alignment.md).\n\n"
        f"Machine: {describe_machine()}; {took}."
    )
    return "\n\n".join([heading, *texts]) + "\n"


if __name__ == "__main__":
    main()
