"""The table of costs has a row per call, rows can be measured singly, and memory is what a run needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, costs
from tests.tiny_models import available, bridge

if not available(bridge, "llama"):
    pytest.skip("no TransformerBridge in this TransformerLens", allow_module_level=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return common.llama_like(layers=2, context=64)


def test_a_row_per_call_with_its_time_memory_and_limits(model: Any) -> None:
    calls = costs.CALLS["short"][:2]
    first, second = costs.measure(model, calls, memory=True, turns=2, most_tokens=9)
    assert (first["call"], second["call"]) == ("attention", "attn_res_ln")
    assert first["÷ forward"] > 0
    assert first["forward s"] == second["forward s"]
    assert first["turns"] == 2
    assert first["returned MB"] == pytest.approx(2 * 9 * 9 * 4 / 1e6)
    assert second["÷ forward, limit"] == calls[1].most_forwards


def test_memory_alone_takes_no_turns(model: Any) -> None:
    call = costs.Call("forward pass", costs.run_forward, 9, most_memory=5)
    (row,) = costs.measure(model, [call], memory=True, turns=0)
    assert row["÷ forward"] is None
    assert row["memory MB, limit"] == 5
    assert "÷ forward, limit" in row


def test_the_run_whose_memory_is_measured_is_the_one_of_a_single_turn(model: Any) -> None:
    seen = []
    call = costs.Call("a call", lambda used, prompt: seen.append(len(prompt)), 9)
    (row,) = costs.measure(model, [call], memory=True, turns=1)
    assert seen == [costs.WARM_UP, 9]
    assert row["turns"] == 1
    assert row["÷ forward"] > 0


def test_a_long_call_is_between_forward_passes(model: Any) -> None:
    seen: list[str] = []

    def forward(used: Any, prompt: Any) -> None:
        seen.append("forward")
        sum(range(10_000))

    def run(used: Any, prompt: Any) -> None:
        seen.append("call")
        sum(range(1_000_000 if len(prompt) == 9 else 1))

    (row,) = costs.measure(model, [costs.Call("a call", run, 9, forward=forward)], memory=False, turns=2)
    assert seen[1:3] == ["forward", "call"]
    assert seen[-3:] == ["forward"] * 3
    assert row["turns"] == 2


def test_the_first_call_is_on_a_new_model_in_each_turn(model: Any) -> None:
    seen = []
    call = costs.Call("first", lambda used, prompt: seen.append(used), 9, is_first=True)
    list(costs.measure(model, [call], memory=False, turns=2))
    assert seen[0] is model  # the run that is not measured
    assert seen[1] is not model
    assert len(seen) == 3


def test_every_call_runs_on_a_small_model(model: Any) -> None:
    for calls in (*costs.CALLS.values(), costs.LENGTHS["1000"]):
        for call in calls:
            if call.name != "attention_attribution":
                call.run(model, call.make_prompt(model, "cpu", 5))


def test_prompts_of_a_batch_have_half_to_all_tokens(model: Any) -> None:
    (call,) = costs.CALLS["run_many"]
    lengths = [len(prompt) for prompt in call.make_prompt(model, "cpu")]
    assert len(lengths) == 64
    assert min(lengths) == 15
    assert max(lengths) == 30


def test_the_peak_is_what_a_run_needs_at_most() -> None:
    size = 80_000_000

    def run() -> torch.Tensor:
        torch.ones(size, dtype=torch.uint8)
        return torch.ones(size // 4, dtype=torch.uint8)

    peak, result = common.peak_over_model(run)
    assert 0.95 * size <= peak < 1.3 * size
    assert len(result) == size // 4


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected some of memory, .*, got rows"):
        list(costs.rows("costs", ["rows"]))


def test_a_call_that_fails_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    rows = list(costs.measure_in_process("costs", "memory"))
    assert [row["call"] for row in rows] == [call.name for call in costs.CALLS["memory"]]
    assert rows[0]["note"] == "exit status 1"


def test_rows_measured_singly_replace_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gemm_rates", lambda: {"GEMM GFLOP/s": 1.0})
    recorded = [{"call": "a", "tokens": 1, "x": 1}, {"call": "b", "tokens": 1, "x": 2}]
    common.write_table(tmp_path, "T", recorded)
    fresh = [{"call": "a", "tokens": 1, "x": 3}, {"call": "a", "tokens": 2, "x": 4}]
    common.write_table(tmp_path, "T", fresh, keys=costs.KEYS["costs"], is_part=True)
    rows = json.loads((tmp_path / "results.json").read_text())["T"]["rows"]
    assert [row["x"] for row in rows] == [3, 2, 4]
    common.write_table(tmp_path, "T", fresh)
    assert len(json.loads((tmp_path / "results.json").read_text())["T"]["rows"]) == 2


def test_the_lengths_of_one_call_are_columns_of_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "gemm_rates", lambda: {"GEMM GFLOP/s": 1.0})
    found = {
        name: [{"call": "a", "tokens": int(name), "÷ forward": float(name), "memory MB": 1.0}]
        for name in costs.LENGTHS
    }
    monkeypatch.setattr(costs, "measure_in_process", lambda table, name: found[name])
    for names in (["20", "8000"], ["64"]):
        rows = costs.rows("lengths", names)
        common.write_table(tmp_path, "T", rows, keys=costs.KEYS["lengths"], is_part=True)
    (row,) = json.loads((tmp_path / "results.json").read_text())["T"]["rows"]
    assert (row["20 ÷ forward"], row["64 ÷ forward"], row["8000 ÷ forward"]) == (20, 64, 8000)
    assert row["2000 ÷ forward"] is None
    assert list(row)[1:8] == [f"{length} ÷ forward" for length in costs.LENGTHS]


def test_rows_of_another_processor_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gemm_rates", lambda: {"GEMM GFLOP/s": 1.0})
    common.write_table(tmp_path, "T", [{"call": "a", "tokens": 1}])
    monkeypatch.setattr(common, "machine", lambda: {"cpu": "another", "gpu": None})
    with pytest.raises(ValueError, match="got another; measure all rows"):
        common.write_table(tmp_path, "T", [{"call": "a", "tokens": 1}], is_part=True)
