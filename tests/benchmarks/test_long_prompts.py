"""Test the table of long prompts."""

from __future__ import annotations

from benchmarks import long_prompts


def test_times_are_divided_by_the_forward_pass_of_the_same_length() -> None:
    measured = ((long_prompts.FORWARD, 500, 2.0, 30), ("attention, last row", 500, 3.0, 40))
    longer = ((long_prompts.FORWARD, 1000, 4.0, 50), (long_prompts.EAGER, 500, 5.0, 60))
    entries = [
        dict(zip(("call", "tokens", "seconds", "MB"), each, strict=True)) for each in (*measured, *longer)
    ]
    rows = {row["call"]: row for row in long_prompts.make_rows(entries)}
    assert rows["attention, last row"] == {
        "call": "attention, last row",
        "500 ÷ forward": 1.5,
        "1000 ÷ forward": None,
        "500 MB": 40,
        "1000 MB": None,
    }
    assert rows[long_prompts.FORWARD]["1000 ÷ forward"] == 1
    assert rows[long_prompts.EAGER]["500 ÷ forward"] == 2.5


def test_an_eager_pass_over_very_many_tokens_is_left_out() -> None:
    assert long_prompts.EAGER in long_prompts.list_calls(4000)
    assert long_prompts.EAGER not in long_prompts.list_calls(8000)
