"""Read the scores of a method from the recorded tables of the leaderboard."""

from __future__ import annotations

import functools
import textwrap

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
    "importance": "rank correlation with how much the answer changes when each token is replaced, "
    "controlled for position (a guess by position has 0)",
    "planted": "one of four sentences has the answer: the mean reciprocal rank of its deciding token "
    "(1: always first)",
    "cells": "minus the absolute change of the answer's log probability, in nats, if only the strongest "
    "scores (layer, query, key) stay in effect (0 is best)",
}
_MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3": "Gemma 3 270M",
    "rxnfp": "rxnfp (chemical reactions)",
}


def write_table(name: str) -> str:
    """Return the tasks, and a table with the method's best row of each; a sentence if it has no row."""
    rows = [row for key in _KEYS for row in _find_best(key, name)]
    if not rows:
        return "The [table of all scores](../../benchmarks/LEADERBOARD.md) has no row for this method."
    tasks = [
        textwrap.fill(f"- *{task}*: {meaning}", 120, subsequent_indent="  ", break_on_hyphens=False)
        for task, meaning in _TASKS.items()
        if any(f"| {task} |" in r for r in rows)
    ]
    header = [
        "| task | model | form | score [95 % interval] | prompts | best method |",
        "|---|---|---|---|---|---|",
    ]
    sentence = (
        "Higher is better. Each row is the method's best form on these prompts. "
        "Differences within intervals may be chance."
    )
    if any("`mean`" in row or "rollout" in row for row in rows):
        sentence += " `mean` and [`rollout`](../evidence/aggregation.md) make one map of all layers."
    sentence = textwrap.fill(sentence, 120, break_on_hyphens=False)
    return "\n\n".join(["\n".join(tasks), "\n".join([*header, *rows]), sentence])


def _find_best(key: str, name: str) -> list[str]:
    """Return the best row of a method in a recorded table as a row of the page, in a list; [] without one."""
    if name not in _list_methods(key):
        return []
    fact = facts.look_up(f"{key}: best of {name}")
    value, *ends = (text.replace("-", "−") for text in fact["texts"])
    model, _, task = key.partition("-")
    # "value_zeroing, mean" and "gim(readout='absolute')" without the name of the method.
    form = fact["row"].removeprefix(name).lstrip("(, ").removesuffix(")")
    named = f"`{form}`" if form else "default"
    row = f"| {task} | {_MODELS[model]} | {named} | {value} [{', '.join(ends)}] | {fact['n']} |"
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
