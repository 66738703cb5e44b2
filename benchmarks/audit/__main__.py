"""Audit planted cases and record what was measured.

    PYTHONPATH=.:demos python -m benchmarks.audit smollm2 choose 0 6          seeds 0 to 5, all forms
    PYTHONPATH=.:demos python -m benchmarks.audit gemma3 report 0 12 short,long

A case counts if the model itself would write the value: then the claim is one that it makes. Of two values
that contradict each other, the one that the model writes is in the answer. Records are appended to
`outputs/audit/MODEL/PART.jsonl`; a case that is there is not measured again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import demos.models as models
import lens_mix as lm
from benchmarks.audit.cases import FORMS, TRUTHS, VERDICTS, Case, make_case
from lens_mix.traces.attribution import read_written
from lens_mix.traces.auditor import Auditor, find_kept
from lens_mix.traces.claims import Rules
from lens_mix.traces.reading import add_answer, read_prompt_alone, read_prompt_text
from lens_mix.traces.removals import Passes
from lens_mix.traces.spans import find_span

# A verdict does not depend on what the model would write instead.
RULES = Rules(instead=0)


def find_value(model: Any, case: Case) -> str:
    """Return the value of a case that the model would write; "" if it writes another one."""
    for value in (case.value, case.other):
        answer = case.answer.replace(case.value, value)
        text = read_prompt_text(model, case.prompt, {})
        reading = add_answer(model, read_prompt_alone(model, case.prompt, text, None), text, answer)
        if value and reading.written_text is not None:
            start, stop = find_span(reading.written_text.text, reading.written_text.offsets, value)
            predicted = [entry.prediction for entry in read_written(model, reading).explained[start:stop]]
            if predicted == reading.tokens[reading.n_prompt + start : reading.n_prompt + stop]:
                return value
    return ""


def measure(model: Any, case: Case, value: str) -> dict[str, Any]:
    """Return what the audit of a case finds."""
    t = lm.trace(model, case.prompt, answer=case.answer.replace(case.value, value))
    kept = find_kept(t, None)
    sources = [source for source in t.sources() if source.is_content and source not in kept]
    passes = Passes(t, sources, 64)
    claim = Auditor(passes, len(sources), kept, RULES).audit(t[:])
    number = {source: index for index, source in enumerate(sources)}
    own = [index for index, source in enumerate(sources) if any(text in source.text for text in case.gold)]
    others = [
        index for index, source in enumerate(sources) if any(text in source.text for text in case.against)
    ]
    has_other = value != case.value
    truth = "supported" if case.form == "counterfactual" and has_other else case.verdict
    return {
        "truth": truth,
        "verdict": claim.verdict,
        "n": len(sources),
        "kept": len(kept),
        "gold": others if has_other else own,
        "against": own if has_other else others,
        "tokens": len(t.tokens),
        "value": [t[value].start, t[value].stop],
        "decisive": claim.decisive,
        "memory": claim.memory.loss,
        "grounds": [[[number[each] for each in ground.sources], ground.tokens] for ground in claim.grounds],
        "shares": [[round(share, 3) for share in ground.shares] for ground in claim.grounds],
        "alone": {number[each.sources[0]]: round(each.loss, 3) for each in claim.alone},
        "found_against": [
            [[number[source] for source in each.sources], each.token, each.instead, each.support, each.margin]
            for each in claim.against
        ],
        "reason": claim.reason,
        "passes": passes.count,
    }


def main(model_name: str, part: str, start: str, stop: str, forms: str = "", truths: str = "") -> None:
    """Measure the cases of some seeds."""
    torch.set_num_threads(1)
    model = getattr(models, model_name)()
    path = Path(f"outputs/audit/{model_name}/{part}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if path.exists():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            done[entry["form"], entry["planted"], entry["seed"]] = entry
    for seed in range(int(start), int(stop)):
        for form in forms.split(",") if forms else FORMS:
            for verdict in truths.split(",") if truths else VERDICTS:
                if verdict not in TRUTHS.get(form, VERDICTS) or (form, verdict, seed) in done:
                    continue
                case, began = make_case(part, verdict, form, seed), time.process_time()
                entry = {"form": form, "planted": verdict, "seed": seed, "written": find_value(model, case)}
                if entry["written"]:
                    entry |= measure(model, case, entry["written"])
                entry["seconds"] = round(time.process_time() - began, 1)
                with path.open("a") as file:
                    file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
