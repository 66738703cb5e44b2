"""Read the scores of a method from the recorded tables of the leaderboard."""

from __future__ import annotations

import functools

import lens_mix as lm
from benchmarks import facts

# The keys of `facts.TABLES` are a model and a task. What the score of each task is:
_TASKS = {
    "importance": "rank agreement with measured token replacement, controlled for position, −1 to 1",
    "planted": "reciprocal rank of the token that decides, in prompts with one planted fact, up to 1",
    "removals": "how soon the target falls if tokens are removed in the map's order, 0 (worst order) to 1",
    "cells": "minus the distance in nats to the whole model's log probability, if only the highest cells of "
    "the layer maps are kept; 0 is the best",
}
_MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3": "Gemma 3 270M",
    "rxnfp": "rxnfp (an encoder of reactions)",
    "minilm": "all-MiniLM-L6-v2 (an encoder)",
}


def write_table(name: str) -> str:
    """Return a table with the method's best row of every task; a sentence if the leaderboard has no row."""
    rows, found = [], []
    for task, meaning in _TASKS.items():
        keys = [f"{model}-{task}" for model in _MODELS if f"{model}-{task}" in facts.TABLES]
        rows_of_task = [row for key in keys for row in _find_best(key, name)]
        found += [f"- {task}: {meaning}" for _ in rows_of_task[:1]]
        rows += rows_of_task
    if not rows:
        return "The leaderboard has no row for this method."
    sentence = (
        "Each row is the best form or aggregation on one task, chosen on the same cases. A higher score is "
        "better. The last column is the score of the best method on this task. Differences within the "
        "intervals are not established. The tasks are:"
    )
    header = [
        "| task | model | form and aggregation | score [95 % interval] | cases | best method |",
        "|---|---|---|---|---|---|",
    ]
    return "\n\n".join(["\n".join([*header, *rows]), sentence, "\n".join(found)])


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
