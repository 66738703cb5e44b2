"""Measure what the tokens of a source do to the first predicted token, on flan-t5.

python -m benchmarks.input_map.source_tokens                writes results/source_tokens.md; seconds
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.common import describe_measurement, markdown_table

SOURCE = "translate English to French: The house is small."


def main() -> None:
    """Write the first token and its probability, for the tokens of each tokenizer."""
    from demos.models import flan_t5, flan_t5_folder

    model, folder = flan_t5(), flan_t5_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    start = torch.tensor([[original.config.decoder_start_token_id]])
    own = torch.tensor([tokenizer(SOURCE).input_ids])
    with torch.no_grad():
        logits = {
            "transformers": original(input_ids=own, decoder_input_ids=start).logits,
            "TransformerLens, with the tokens of the tokenizer's files": model(own, decoder_input=start),
            "TransformerLens, with `model.to_tokens`": model(model.to_tokens(SOURCE), decoder_input=start),
        }
    first = int(logits["transformers"][0, -1].argmax())
    rows = [
        {
            "model and tokens": name,
            "first token": f"`{tokenizer.convert_ids_to_tokens(first)}`",
            "probability": f"{float(values[0, -1].softmax(-1)[first]):.3f}",
        }
        for name, values in logits.items()
    ]
    page = (
        "# Tokens of a source\n\n"
        "Written by `PYTHONPATH=.:demos python -m benchmarks.input_map.source_tokens`.\n\n"
        "## Probability of the first token\n\n"
        f'flan-t5-small, tuned by others to write titles; source: "{SOURCE}"\n\n'
        f"{describe_measurement()}\n\n{markdown_table(rows)}\n"
    )
    (Path(__file__).parent / "results" / "source_tokens.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
