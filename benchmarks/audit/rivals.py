"""Measure which source other ways would name first on planted cases, and how many forward passes each takes.

    PYTHONPATH=.:demos python -m benchmarks.audit.rivals collect smollm2 choose 0 4
    PYTHONPATH=.:demos python -m benchmarks.audit.rivals collect smollm2 report 0 10
    PYTHONPATH=.:demos python -m benchmarks.audit.rivals table

"collect" appends what the regressions and tables need to `outputs/audit/rivals_MODEL.jsonl`. A case that is
there is not measured again. A case counts if the model itself would write the value. The strongest head and
the learned weights are chosen on the part "choose", and all scores are of the part "report".

The sources are those that the audit may remove: the sentences besides the question. All ways rank the same
sources. Their passes are those of the audited model: one for the whole prompt, and one for each removal.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata as metadata
import json
import math
import operator
import random
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import demos.models as models
import lens_mix as lm
from benchmarks.audit.__main__ import find_value
from benchmarks.audit.cases import Case, make_case
from benchmarks.common import markdown_table
from benchmarks.traces import learned
from benchmarks.traces.table import NAMES, cell, difference, versions
from lens_mix.traces.attribution import run_reading
from lens_mix.traces.auditor import Auditor, find_kept
from lens_mix.traces.claims import Rules
from lens_mix.traces.removals import Passes
from lens_mix.traces.sources import TextSource
from lens_mix.traces.trace import Trace

# Long prompts would take hundreds of passes: leave-one-out has one for each sentence.
FORMS = ("short", "paraphrased", "distractors", "documents")
TRUTHS = ("supported", "redundant")
# The budget of the audit, as in `benchmarks.audit`, and the numbers of random removals of ContextCite.
BUDGET = 64
ABLATIONS = {"choose": 16, "report": 64}
# A backward pass takes about as long as two forward passes.
PASSES_OF_GIM = 3
_QUERIES = ("answer", "question and answer")
WITHOUT_MODEL = tuple(f"{way}, {query}" for way in ("BM25", "embedding") for query in _QUERIES)
RESULTS = Path(__file__).parent / "results"


# ------------------------------------------------------------------ without the audited model


def score_words(texts: Sequence[str], query: str) -> list[float]:
    """Return the BM25 score of each text for a query, by the package bm25s with its default parameters."""
    import bm25s

    split = functools.partial(bm25s.tokenize, return_ids=False, show_progress=False)
    index = bm25s.BM25()
    index.index(split(list(texts)), show_progress=False)
    scores: list[float] = index.get_scores(split(query)[0]).tolist()
    return scores


@functools.cache
def _load_encoder() -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertModel

    folder = models.minilm_folder()
    return AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()


def embed(text: str) -> torch.Tensor:
    """Return the mean of the final states of a text's tokens in all-MiniLM-L6-v2, with the length 1."""
    tokenizer, encoder = _load_encoder()
    with torch.no_grad():
        states = encoder(**tokenizer(text, return_tensors="pt", truncation=True)).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


def score_embeddings(texts: Sequence[str], query: str) -> list[float]:
    """Return the cosine of each text's embedding with that of a query."""
    found = embed(query)
    return [float(embed(text) @ found) for text in texts]


# ------------------------------------------------------------------ with the audited model


def read_question(case: Case) -> str:
    """Return the question of a case."""
    if isinstance(case.prompt, lm.Documents):
        return case.prompt.question
    return case.prompt.rpartition("Question: ")[2].partition("\n")[0]


def read_attention(trace: Trace, sources: Sequence[TextSource]) -> list[list[float]]:
    """Return the attention of each head to each source [layer * head, source], summed over all tokens.

    The rows are those that predict the answer's tokens.
    """
    reading = trace.reading
    rows = [reading.row(each) for each in range(reading.n_written)]
    method = lm.methods.AttentionWeights(per_head=True)
    found = run_reading(trace.require_model(), reading, method, queries=rows, progress=False)
    of_heads = found.scores.sum(2).flatten(0, 1).double()
    columns = [of_heads[:, list(source.positions)].sum(1) for source in sources]
    return [[round(value, 6) for value in row] for row in torch.stack(columns, 1).tolist()]


def draw_masks(seed: str, n: int, count: int) -> list[str]:
    """Return random sets of kept sources, each with probability 1/2: "1" is kept."""
    draw = random.Random(seed)
    return ["".join(draw.choice("01") for _ in range(n)) for _ in range(count)]


def read_sources(model: Any, case: Case, value: str) -> tuple[Trace, list[TextSource]]:
    """Return the trace of a case and the sources that its audit may remove."""
    trace = lm.trace(model, case.prompt, answer=case.answer.replace(case.value, value))
    kept = find_kept(trace, None)
    return trace, [source for source in trace.sources() if source.is_content and source not in kept]


def measure_audit(passes: Passes) -> dict[str, Any]:
    """Return which sources the audit of the whole answer names, its verdict and its passes."""
    rules = dataclasses.replace(Rules(), instead=0)
    auditor = Auditor(passes, len(passes.sources), find_kept(passes.trace, None), rules)
    claim = auditor.audit(passes.trace[:])
    named = [passes.sources.index(source) for ground in claim.grounds for source in ground.sources]
    return {
        "audit": list(dict.fromkeys(named)),
        "audit_verdict": claim.verdict,
        "audit_passes": passes.count,
    }


def measure(model: Any, case: Case, value: str, seed: str) -> dict[str, Any]:
    """Return what each way needs to name sources of a case.

    Args:
        model: The model.
        case: The case.
        value: The value that the model would write.
        seed: The seed of the random removals.
    """
    answer = case.answer.replace(case.value, value)
    trace, sources = read_sources(model, case, value)
    texts, n = [source.text for source in sources], len(sources)
    scores = trace[:].scores
    found: dict[str, Any] = {
        "n": n,
        "gold": [i for i, text in enumerate(texts) if any(gold in text for gold in case.gold)],
        "tokens": len(trace.tokens),
        "written_tokens": trace.reading.n_written,
        "attention": read_attention(trace, sources),
        "gim": [abs(float(scores[list(source.positions)].sum())) for source in sources],
    }
    passes = Passes(trace, sources, BUDGET)
    if case.part == "report":
        queries = (answer, f"{read_question(case)} {answer}")
        for name, query in zip(_QUERIES, queries, strict=True):
            found[f"BM25, {name}"] = score_words(texts, query)
            found[f"embedding, {name}"] = score_embeddings(texts, query)
        found |= measure_audit(passes)
    # What the audit measured is not measured again, and the others have no budget.
    passes.budget = sys.maxsize

    def log_probability(removed: Sequence[int]) -> float:
        return float(passes.of_written(removed).sum())

    found["whole"] = log_probability([])
    found["alone"] = [log_probability([number]) for number in range(n)]
    found["masks"] = draw_masks(seed, n, ABLATIONS[case.part])
    found["random"] = [
        log_probability([number for number in range(n) if mask[number] == "0"]) for mask in found["masks"]
    ]
    return found


def path_of(model_name: str) -> Path:
    """Return the file of a model's cases."""
    return Path(f"outputs/audit/rivals_{model_name}.jsonl")


def read_entries(model_name: str) -> list[dict[str, Any]]:
    """Return the measured cases."""
    path = path_of(model_name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def collect(model_name: str, part: str, start: str, stop: str, forms: str = "") -> None:
    """Measure the cases of some seeds."""
    torch.set_num_threads(1)
    names = ("part", "form", "planted", "seed")
    done = {tuple(entry[name] for name in names) for entry in read_entries(model_name)}
    model = getattr(models, model_name)()
    path = path_of(model_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(int(start), int(stop)):
        for form in forms.split(",") if forms else FORMS:
            for truth in TRUTHS:
                key = (part, form, truth, seed)
                if key in done:
                    continue
                case = make_case(part, truth, form, seed)
                entry = dict(zip(names, key, strict=True)) | {"written": find_value(model, case)}
                if entry["written"]:
                    entry |= measure(model, case, entry["written"], " ".join(map(str, key)))
                with path.open("a") as file:
                    file.write(json.dumps(entry) + "\n")


# ------------------------------------------------------------------ scores of each way

Entry = dict[str, Any]


def find_logit(log_probability: float) -> float:
    """Return log(p / (1 - p)) of a probability that is given by its logarithm."""
    return log_probability - math.log(-math.expm1(min(log_probability, -1e-9)))


def score_by_lasso(entry: Entry, count: int) -> list[float]:
    """Return ContextCite's scores from the first random removals (arXiv:2409.00729).

    They are the weights of a sparse linear regression of the answer's logit on which sources are kept. As in
    the authors' code, the logit is divided by the number of the answer's tokens, the sources are
    standardized, and the Lasso has alpha 0.01.
    """
    from sklearn.linear_model import Lasso

    kept = np.array([[mask == "1" for mask in masks] for masks in entry["masks"][:count]], dtype=float)
    logits = np.array([find_logit(value) for value in entry["random"][:count]]) / entry["written_tokens"]
    spread = kept.std(0)
    # A source that every draw keeps, or none does, has no weight.
    spread[spread == 0] = np.inf
    fitted = Lasso(alpha=0.01, random_state=0).fit((kept - kept.mean(0)) / spread, logits)
    weights: list[float] = (fitted.coef_ / spread).tolist()
    return weights


def make_example(entry: Entry) -> learned.Example:
    """Return a case as `benchmarks.traces.learned` reads it: attention, and removals with their drops."""
    removed = [[mask == "0" for mask in masks] for masks in entry["masks"]]
    removals = np.concatenate([np.eye(entry["n"], dtype=bool), np.array(removed)])
    drops = entry["whole"] - np.array([*entry["alone"], *entry["random"]])
    features = {"attention": np.array(entry["attention"]).T}
    return learned.Example(None, features, {}, removals, drops)  # type: ignore[arg-type]


def learn_weights(chosen: Sequence[Entry]) -> np.ndarray:
    """Return the weights of the heads, learned from removals in the cases to choose on."""
    examples = [make_example(entry) for entry in chosen]
    return learned.fit(examples, "attention", learned.choose_strength(examples, "attention"))


def choose_head(chosen: Sequence[Entry]) -> int:
    """Return the head that names a gold source first most often; of several, the one with most on gold."""
    maps = [np.array(entry["attention"]) for entry in chosen]

    def rate(head: int) -> tuple[float, float]:
        right = [
            is_first(map_[head].tolist(), entry["gold"]) for map_, entry in zip(maps, chosen, strict=True)
        ]
        on_gold = [
            map_[head, entry["gold"]].sum() / map_[head].sum()
            for map_, entry in zip(maps, chosen, strict=True)
        ]
        return float(np.mean(right)), float(np.mean(on_gold))

    return max(range(len(maps[0])), key=rate)


def rank(scores: Sequence[float], gold: Collection[int]) -> list[int]:
    """Return the sources, the strongest first. Ties are broken against the way."""
    return sorted(range(len(scores)), key=lambda number: (-scores[number], number in gold))


def is_first(scores: Sequence[float], gold: Collection[int]) -> bool:
    """Return whether the strongest source is a gold one."""
    return rank(scores, gold)[0] in gold


def name_sources(chosen: Sequence[Entry], entries: Sequence[Entry]) -> dict[str, list[tuple[list[int], int]]]:
    """Return for each way and case the sources that it names, the first one first, and its passes.

    Args:
        chosen: The cases of the part "choose".
        entries: The cases to score.
    """
    head, weights = choose_head(chosen), learn_weights(chosen)
    scores: dict[str, Callable[[Entry], list[float]]] = {
        **{name: operator.itemgetter(name) for name in WITHOUT_MODEL},
        "attention, mean": lambda entry: np.mean(entry["attention"], 0).tolist(),
        "attention, chosen head": lambda entry: entry["attention"][head],
        "learned weights of heads": lambda entry: (weights @ np.array(entry["attention"])).tolist(),
        "gim": operator.itemgetter("gim"),
        "ContextCite, 32": lambda entry: score_by_lasso(entry, 32),
        "ContextCite, 64": lambda entry: score_by_lasso(entry, 64),
        "leave-one-out": lambda entry: [-value for value in entry["alone"]],
    }
    fixed = {"gim": PASSES_OF_GIM, "ContextCite, 32": 33, "ContextCite, 64": 65}
    found: dict[str, list[tuple[list[int], int]]] = {
        "audit": [(entry["audit"], entry["audit_passes"] + PASSES_OF_GIM) for entry in entries]
    }
    for name, score in scores.items():
        found[name] = []
        for entry in entries:
            passes = 0 if name in WITHOUT_MODEL else fixed.get(name, 1)
            passes = entry["n"] + 1 if name == "leave-one-out" else passes
            found[name].append((rank(score(entry), entry["gold"]), passes))
    return found


# ------------------------------------------------------------------ the table

_METRICS = {
    "first source": lambda named, gold: float(bool(named) and named[0] in gold),
    "recall": lambda named, gold: len(set(named[: len(gold)]) & set(gold)) / len(gold),
}


def make_rows(
    entries: Sequence[Entry], named: dict[str, list[tuple[list[int], int]]]
) -> list[dict[str, str]]:
    """Return one row for each way: its passes, how often its first source is right, and its recall."""
    values = {
        (metric, name): [rate(each, entry["gold"]) for (each, _), entry in zip(found, entries, strict=True)]
        for metric, rate in _METRICS.items()
        for name, found in named.items()
    }
    rows = []
    for name, found in named.items():
        passes, first = [count for _, count in found], values["first source", name]
        is_same = min(passes) == max(passes)
        middle = f"{passes[0]}" if is_same else f"{np.mean(passes):.1f} ({min(passes)} to {max(passes)})"
        row = {"way": name, "n": str(len(entries)), "passes": middle, "first source, 95 %": cell(first)}
        row["audit less this, 95 %"] = (
            "" if name == "audit" else compare(values["first source", "audit"], first)
        )
        row["recall, 95 %"] = cell(values["recall", name])
        rows.append(row)
    chance = [len(entry["gold"]) / entry["n"] for entry in entries]
    by_chance = f"{np.mean(chance):.2f}"
    rows.append({**dict.fromkeys(rows[0], ""), "way": "random order", "n": str(len(entries)), "passes": "0"})
    rows[-1] |= {"first source, 95 %": by_chance, "recall, 95 %": by_chance}
    return sorted(rows, key=lambda row: -float(row["first source, 95 %"].split()[0]))


def compare(better: Sequence[float], other: Sequence[float]) -> str:
    """Return the mean of paired differences with its bootstrap interval."""
    return difference(*({("", "", str(i)): v for i, v in enumerate(each)} for each in (better, other)))


def make_form_rows(
    entries: Sequence[Entry], named: dict[str, list[tuple[list[int], int]]]
) -> list[dict[str, str]]:
    """Return how often the first source is right, by form."""
    rows = []
    for name, found in named.items():
        row = {"way": name}
        for form in dict.fromkeys(entry["form"] for entry in entries):
            own = [
                _METRICS["first source"](each, entry["gold"])
                for (each, _), entry in zip(found, entries, strict=True)
                if entry["form"] == form
            ]
            row |= {f"n, {form}": str(len(own)), form: cell(own)}
        rows.append(row)
    return rows


def make_page(model_name: str) -> str:
    """Return the page of one model."""
    tried = read_entries(model_name)
    written = [entry for entry in tried if entry["written"]]
    chosen = [entry for entry in written if entry["part"] == "choose"]
    reported = [entry for entry in written if entry["part"] == "report"]
    tried_reported = sum(entry["part"] == "report" for entry in tried)
    rivals = ", ".join(f"{name} {metadata.version(name)}" for name in ("bm25s", "scikit-learn"))
    silent = sum(not entry["audit"] for entry in reported)
    lines = [
        "# Which source would be named first, and at which cost",
        "",
        "Written by `PYTHONPATH=.:demos python -m benchmarks.audit.rivals table`. Planted cases of the part "
        f'"report", supported and redundant, which {NAMES[model_name]} would write itself: {len(reported)} '
        f"of {tried_reported} that were tried. The head and the learned weights are chosen on {len(chosen)} "
        'cases of the part "choose".',
        "",
        "The sources are the sentences besides the question. First source: the share of cases whose first "
        "named source is a gold one. Recall: the share of gold sources among as many first ones as there are "
        "gold ones. Intervals are 95 %, over cases: Wilson's for shares, else percentiles of the bootstrap. "
        f"Ties are broken against the way. The audit named no source in {silent} of the cases. It may also "
        "name fewer than there are gold ones, or more. All others rank all sources of every case.",
        "",
        "A planted sentence has words of the answer that no other sentence has, so words and embeddings find "
        "it easily. They would name a source in the same way for an answer from memory.",
        "",
        "Passes: forward passes of the audited model, the one of the whole prompt among them; the mean, and "
        "the least and most. `gim` takes a forward and a backward pass, which count as 3. The audit takes "
        "those 3 and its removals. BM25 and the embeddings need no pass of it.",
        "",
        f"Measured {date.today().isoformat()} with {versions()}, {rivals}.",
    ]
    groups = {
        "First source, all cases": reported,
        "First source, supported": [each for each in reported if each["planted"] == "supported"],
        "First source, redundant": [each for each in reported if each["planted"] == "redundant"],
    }
    for heading, entries in groups.items():
        rows = make_rows(entries, name_sources(chosen, entries))
        lines += ["", f"## {heading}", "", markdown_table(rows)]
    rows = make_form_rows(reported, name_sources(chosen, reported))
    lines += ["", "## Right first source, by form", "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def table(model_name: str = "smollm2") -> None:
    """Write the page of one model."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rivals.md").write_text(make_page(model_name), encoding="utf-8")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    {"collect": collect, "table": table}[command](*arguments)
