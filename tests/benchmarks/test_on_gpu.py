"""The script for a GPU runs on a CPU, and finds what would wait for a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import costs, on_gpu
from tests.tiny_models import available, bridge

with_bridge = pytest.mark.skipif(
    not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"
)


@with_bridge
@pytest.mark.slow
def test_the_whole_script_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CALLS", {name: costs.CALLS[name] for name in ("short",)})
    monkeypatch.setattr(on_gpu, "_CHUNKED", {"value_zeroing": "value_zeroing"})
    monkeypatch.setattr(on_gpu, "_COMPARED", ("attention", "value_zeroing"))
    on_gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "on_gpu.json").read_text())
    assert found["is quick"]
    assert [row["call"] for row in found["costs"]][:2] == ["attention", "attn_res_ln"]
    assert all(row["÷ forward"] > 0 for row in found["costs"])
    assert not any("limit" in name for row in found["costs"] for name in row)
    assert {row["method"] for row in found["waits"]} == {"attention", "value_zeroing", "gim"}
    assert all(row["by line"] > 0 and row["aten::_local_scalar_dense"] > 0 for row in found["waits"])
    # The loop over pairs of positions never waits, however many chunks there are.
    (chunks,) = found["chunks"]
    assert chunks["operations, small chunks"] > chunks["operations, large chunks"]
    assert chunks["inside the chunks"] == "none"
    assert [row["difference"] for row in found["scores"]] == [0, 0]
    page = (tmp_path / "on_gpu.md").read_text()
    assert page.startswith("# The script for a GPU, tried on a CPU")
    assert "attn_res_ln" in page


@with_bridge
def test_the_costs_of_a_large_model_in_two_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "_LARGE", ("20",))
    before = torch.get_default_dtype()
    on_gpu.main(["--device", "cpu", "--quick", "--model", "large", "--out", str(tmp_path)])
    assert torch.get_default_dtype() == before
    found = json.loads((tmp_path / "on_gpu_large.json").read_text())
    assert {row["dtype"] for row in found["costs"]} == {"float32", "bfloat16"}
    assert {row["call"] for row in found["costs"]} == {call.name for call in costs.LENGTHS["20"]}
    assert all(row["÷ forward"] > 0 for row in found["costs"])
    # Each call has one line per dtype.
    page = (tmp_path / "on_gpu_large.md").read_text()
    assert page.count("| attention, all rows |") == 2


@with_bridge
def test_the_costs_of_long_prompts(tmp_path: Path) -> None:
    on_gpu.main(["--device", "cpu", "--quick", "--model", "long", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "on_gpu_long.json").read_text())
    assert [row["call"] for row in found["costs"][1:3]] == [
        on_gpu.long_prompts.FORWARD,
        "attention, last row",
    ]
    assert {row["tokens"] for row in found["costs"]} == set(on_gpu._QUICK_LONG)
    assert all(row["seconds"] > 0 for row in found["costs"])
    page = (tmp_path / "on_gpu_long.md").read_text()
    assert page.count("| gim, last row |") == 1


def test_a_call_that_does_not_fit_is_not_tried_with_a_longer_prompt() -> None:
    tried = []

    def run(prompt: torch.Tensor) -> None:
        tried.append(len(prompt))
        raise ValueError("too long")

    rows = list(on_gpu.measure_lengths("a call", run, (3, 4), "cpu", float("inf")))
    assert (tried, rows) == ([3], [{"call": "a call", "tokens": 3, "note": "too long"}])


@with_bridge
def test_nothing_is_measured_after_the_time(tmp_path: Path) -> None:
    on_gpu.main(["--device", "cpu", "--quick", "--seconds", "0", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "on_gpu.json").read_text())
    assert {row["note"] for row in found["costs"]} == {"no time left"}
    assert {row["inside the chunks"] for row in found["chunks"]} == {"no time left"}


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[torch.tensor([0, 1])], 0),
        (lambda x: x @ x.T + 1, 0),
    ],
)
def test_what_waits_for_a_gpu(run: Any, waits: int) -> None:
    x = torch.eye(3)
    counted = on_gpu.count_by_line(lambda: run(x))
    assert counted.origins.total() == waits
    assert counted.operations > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        on_gpu.main([])
    assert "--device cpu tries the script" in capsys.readouterr().err
