"""Read the scores of a method from the recorded tables of the leaderboard."""

from __future__ import annotations

from benchmarks import facts


def write_table(name: str) -> str:
    """Return a table with the method's best row of every task; a sentence if the leaderboard has no row."""
    rows = []
    for key, table in facts.TABLES.items():
        if table.page != "benchmarks/LEADERBOARD.md" or key.endswith("differences"):
            continue
        try:
            fact = facts.look_up(f"{key}: best of {name}")
        except LookupError:
            continue
        form = fact.get("row", name)
        figure = f"{fact['value']:.2f} [{fact['low']:.2f}, {fact['high']:.2f}]".replace("-", "−")
        cases = f"{fact['n']} {table.cases}"
        rows.append(f"| {table.score} | {table.model} | `{form}` | {figure} | {cases} |")
    if not rows:
        return "The leaderboard has no row for this method."
    head = ["| score | model | best form | mean [95 % interval] | n |", "|---|---|---|---|---|"]
    note = (
        "Each row is the best form or aggregation on that task, chosen on these same cases. A higher score "
        "is better. Differences within the intervals mean nothing."
    )
    return "\n".join([*head, *rows]) + f"\n\n{note}"
