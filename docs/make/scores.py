"""Read the scores of a method from the recorded tables of the leaderboard."""

from __future__ import annotations

import functools

import lens_mix as lm
from benchmarks import facts

# The tables of a page, and their tasks. The keys are those of `facts.TABLES`: a model and a task.
_KEYS = (
    "smollm2-importance",
    "gemma3-importance",
    "rxnfp-importance",
    "smollm2-planted",
    "gemma3-planted",
    "smollm2-cells",
)
_TASKS = {
    "importance": "rank agreement with measured token replacement, controlled for position",
    "planted": "reciprocal rank of the one token that decides; 1 is best",
    "cells": "minus the distance in nats to the whole model, if only the highest cells of the layer maps are "
    "kept; 0 is best",
}
_MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3": "Gemma 3 270M",
    "rxnfp": "rxnfp (an encoder of reactions)",
}


def write_table(name: str) -> str:
    """Return a table with the method's best row of every task; a sentence if the leaderboard has no row."""
    rows = [row for key in _KEYS for row in _find_best(key, name)]
    if not rows:
        return "The leaderboard has no row for this method."
    tasks = [
        f"- {task}: {meaning}" for task, meaning in _TASKS.items() if any(f"| {task} |" in r for r in rows)
    ]
    sentence = (
        "Each row is the method's best form or aggregation, chosen on the same cases. Higher is better, and\n"
        "a difference within the intervals is not a difference. The last column has the best method of all."
    )
    header = [
        "| task | model | form and aggregation | score [95 % interval] | cases | best method |",
        "|---|---|---|---|---|---|",
    ]
    return "\n\n".join(["\n".join([*header, *rows]), sentence, "\n".join(tasks)])


def _find_best(key: str, name: str) -> list[str]:
    """Return the best row of a method in a recorded table as a row of the page, in a list; [] without one."""
    if name not in _list_methods(key):
        return []
    fact = facts.look_up(f"{key}: best of {name}")
    value, *ends = (text.replace("-", "−") for text in fact["texts"])
    model, _, task = key.partition("-")
    row = f"| {task} | {_MODELS[model]} | `{fact['row']}` | {value} [{', '.join(ends)}] | {fact['n']} |"
    return [f"{row} {_find_leader(key)} |"]


@functools.cache
def _find_leader(key: str) -> str:
    """Return the highest score in a recorded table, and a link to the method that has it."""
    best = {name: facts.look_up(f"{key}: best of {name}")["texts"][0] for name in _list_methods(key)}
    leader = max(best, key=lambda name: float(best[name].replace("−", "-")))
    return f"{best[leader].replace('-', '−')}, [`{leader}`]({leader}.md)"


@functools.cache
def _list_methods(key: str) -> list[str]:
    """Return the names of the methods of the library that have a row in a recorded table."""
    table = facts.TABLES[key]
    methods = facts.recorded(table, "method", table.column)
    place = methods.column("method")
    # A form of the method is written with its parameters: gim(activations='ratio').
    return sorted({cells[place].partition("(")[0] for cells in methods.body} & set(lm.METHODS))
