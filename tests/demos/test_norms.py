"""Run the demo of the norm-based maps on a tiny encoder and a tiny decoder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.demos.tiny_folder import save_tiny_bert, save_tiny_llama
from tests.tiny_models import available, bridge

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8"}


def run_demo(*arguments: str) -> str:
    command = [sys.executable, "demos/norms.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_it_prints_the_findings_of_both_models_and_draws_them(tmp_path: Path) -> None:
    folders = [str(save_tiny_bert(tmp_path / "bert")), str(save_tiny_llama(tmp_path / "llama"))]
    out = tmp_path / "out"
    text = run_demo("--encoder", folders[0], "--decoder", folders[1], "--outputs", str(out))
    pictures = [f"norms_{model}_{what}.png" for model in ("bert", "llama") for what in ("mixing", "cancel")]
    written = [Path(line.strip()) for line in text.split("Written:")[1].splitlines() if line.strip()]
    assert written == [out / name for name in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    for name in ("bert", "llama"):
        part = text.split(f"=== {name}, 6 sentences")[1].split("===")[0]
        mean = re.search(r"^mean((?: +\d\.\d{3}){6})$", part, re.MULTILINE)
        assert mean
        weights, vectors, _, residual, normed, _ = (float(number) for number in mean[1].split())
        verb = "falls" if normed < weights else "does not fall"
        said = re.search(
            rf"Mean mixing ratio {verb} from (\S+) by .*\n +(\S+) by .*, (\S+) with .*, (\S+) after", part
        )
        assert said
        assert [float(number) for number in said.groups()] == pytest.approx(
            [weights, vectors, residual, normed], abs=6e-3
        )
        assert re.search(r"Cancel effect: \S+ gets \d+% of the attention in layer \d", part)
        assert re.search(r"Spearman correlation of weight and length: -?\d\.\d\d", part)


@pytest.mark.slow
@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_folding_changes_the_maps_of_values_and_leaves_the_weights(tmp_path: Path) -> None:
    text = run_demo("--encoder", str(save_tiny_bert(tmp_path / "bert")), "--folding")
    rows = {
        name: [float(number) for number in re.findall(r"\d\.\d{4}", line)]
        for line in text.splitlines()
        for name in [re.split(r"  +", line)[0]]
    }
    kept, folded, change = rows["b_V in the values"], rows["b_V folded"], rows["largest change of a layer"]
    assert kept[0] == folded[0]  # the stage attn_w
    assert change[0] == 0 == change[2]
    assert kept[1] != folded[1]
    assert min(change[1], *change[3:]) > 0
    for name in ("value_norm", "attn_res", "attn_res_ln", "atb_ff", "atb_ff_res_ln", "globenc", "alti"):
        size, before, after = rows[name]
        assert size > 1e-3
        assert abs(after - before) == pytest.approx(size, abs=2e-4)


@pytest.mark.skipif(available(bridge, "bert"), reason="TransformerBridge is there")
def test_without_transformer_bridge_the_encoder_is_left_out(tmp_path: Path) -> None:
    decoder = str(save_tiny_llama(tmp_path / "llama"))
    text = run_demo("--decoder", decoder, "--outputs", str(tmp_path))
    assert "all-MiniLM-L6-v2 is left out: all-MiniLM-L6-v2 needs TransformerBridge" in text
    assert "=== llama" in text


def test_findings_say_which_way_the_numbers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "demos")
    import norms

    layers = pd.DataFrame(
        {"attn_w": [0.9], "attn_n": [0.8], "attn_res": [0.3], "attn_res_ln": [0.2]}, index=["mean"]
    )
    tokens = pd.DataFrame(
        {"token": ["[CLS]"], "layer": [4], "weight": [0.6], "norm": [0.1], "others_norm": [4.0]}
    )
    correlations = pd.Series([-0.5, 0.1], index=[0, 1])
    found = norms.describe_findings(layers, tokens, correlations)
    assert "falls from 0.90" in found
    assert "[CLS] gets 60% of the attention in layer 4,\n  where its vectors are shorter" in found
    assert "-0.20, mean over the layers,\n  from -0.50 (layer 0) to 0.10 (layer 1)" in found
    other = norms.describe_findings(layers.assign(attn_res_ln=0.95), tokens.assign(norm=5.0), correlations)
    assert "does not fall from 0.90" in other
    assert "are not shorter than the others'" in other
    for name in ("norms", "models"):
        monkeypatch.delitem(sys.modules, name)
