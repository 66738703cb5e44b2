"""Test the table of long prompts."""

from __future__ import annotations

import pytest

from benchmarks import long_prompts
from tests.tiny_models import available, bridge

with_bridge = pytest.mark.skipif(
    not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"
)


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


def test_bytes_on_paper_are_those_that_were_counted_at_other_sizes() -> None:
    def count(call: str, layers: int, tokens: int) -> int:
        return (100 * layers + 700) * tokens + 3 * tokens**2

    paper = long_prompts.Paper.of("gim", count)
    assert paper.linear == 8 * (100 * 32 + 700)
    assert paper.square == 3
    assert paper.gigabytes(10_000) == (paper.linear * 10_000 + 3 * 10_000**2) / 1e9


def test_a_gradient_takes_three_to_four_and_a_half_passes() -> None:
    passes = [long_prompts.count_passes(tokens) for tokens in (1, 8_000, 128_000, 10**9)]
    assert passes == sorted(passes)
    assert abs(passes[0] - 3) < 0.01
    assert abs(passes[-1] - 4.5) < 0.01


@with_bridge
@pytest.mark.parametrize(("call", "bound"), [("attention", 20), ("alti", 20), ("gim", 40)])
def test_the_memory_of_a_long_prompt_is_linear(call: str, bound: int) -> None:
    # In kB for each token of a model of width 512. A whole pattern would add 4 kB at 512 tokens.
    short, long = (long_prompts.count_bytes(call, 2, tokens) / tokens / 1e3 for tokens in (512, 1024))
    assert long < 1.04 * short
    assert short < bound
