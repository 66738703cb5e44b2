"""Read the scores of a method from the recorded tables of the leaderboard."""

from __future__ import annotations

from benchmarks import facts


def write_table(name: str) -> str:
    """Return a table with the method's best row of every task of the leaderboard, or a sentence if it has none."""
    rows = []
    for key, table in facts.TABLES.items():
        if table.page != "benchmarks/LEADERBOARD.md" or key.endswith("differences"):
            continue
        try:
            fact = facts.look_up(f"{key}: best of {name}")
        except LookupError:
            continue
        form = fact.get("row", name)
        figure = f"{fact['value']:.2f}" + (f" [{fact['low']:.2f}, {fact['high']:.2f}]" if fact["low"] is not None else "")
        rows.append(
            f"| {table.score} | {table.model} | `{form}` | {figure.replace('-', '−')} | {fact['n']} {table.cases} |"
        )
    if not rows:
        return "The leaderboard has no row for this method."
    head = ["| score | model | best form | mean [95 % interval] | n |", "|---|---|---|---|---|"]
    note = (
        "Each row is the best aggregation or form on that task, chosen on these same cases; a higher score is "
        "better. Differences within the intervals mean nothing."
    )
    return "\n".join([*head, *rows]) + f"\n\n{note}"
