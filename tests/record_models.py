"""Record which models work: `python -m tests.record_models`, once with each release of TransformerLens.

Every model of the matrix is built tiny and random, and `lm.support` is asked about it. The result is one
release's part of `docs/make/models.json`, from which `docs.make` writes the table of models.
"""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from tests.matrix import Case, every_case, pictured_cases, wide_cases
from tests.tiny_models import wrapped_class

RESULT = Path(__file__).parents[1] / "docs" / "make" / "models.json"


def record(case: Case) -> dict[str, Any]:
    """Return what works on one model: the number of methods, or the reason why none does."""
    kind, _, name = case.label.partition(" ")
    try:
        table = lm.support(case.build(torch.float32), part=case.part)
    except lm.UnsupportedModelError as problem:
        rows, reason = [], str(problem)
    else:
        rows = [method for method, engine, _ in table if engine is not None]
        reason = "" if rows else table["attention"]
    return {
        "class": wrapped_class(name.split(" ")[0]) if kind == "bridge" else case.label,
        "part": case.part,
        "methods": len(rows),
        "value_zeroing": "value_zeroing" in rows,
        "input_maps": "gim" in rows,
        "pictures": case in pictured_cases() and case.picture_refusal is None,
        "reason": (reason or case.picture_refusal or "").replace("|", "/"),
    }


def main() -> None:
    """Record all models that the installed TransformerLens has."""
    warnings.simplefilter("ignore")
    version = importlib.metadata.version("transformer-lens")
    cases = [case for case in every_case() if case.exists] + pictured_cases()
    cases += wide_cases() if int(version.split(".")[0]) > 3 else []
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    found[version] = {case.label: record(case) for case in cases}
    RESULT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
