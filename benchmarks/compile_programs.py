"""Compile the RASP programs of lens_mix/experiments/constructed/ with Tracr and store their weights.

Only this script needs Tracr (Lindner et al., NeurIPS 2023; Apache-2.0). Tracr requires JAX, so it needs an
environment of its own:

    python -m venv .environments/tracr
    .environments/tracr/bin/pip install tracr-pypi==1.0.0
    .environments/tracr/bin/python benchmarks/compile_programs.py

The arrays of the file have the names `<program>/<name of lens_mix._model.from_weights.Weights>`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tracr.compiler import assemble, compiling, lib
from tracr.rasp import rasp

LENGTH = 7  # The first token is not counted.
LETTERS = "abcdefgh"
FILE = Path(__file__).parents[1] / "lens_mix" / "experiments" / "constructed" / "tracr.npz"

# What each program returns for a prompt. Token 0 is Tracr's beginning-of-sequence token.
PROGRAMS = {
    "fraction": (lib.make_frac_prevs(rasp.numerical(rasp.tokens == "a")), LETTERS),
    "reverse": (lib.make_reverse(rasp.tokens), LETTERS),
    "histogram": (lib.make_hist(), LETTERS),
    "sort": (lib.make_sort_unique(rasp.tokens, rasp.tokens), range(1, 13)),
}


def weights(program: rasp.SOp, vocabulary: object) -> dict[str, np.ndarray]:
    """Return the parameters of a compiled program by our names, with tokens in order."""
    model = compiling.compile_rasp_to_model(
        program, vocab=set(vocabulary), max_seq_len=LENGTH, compiler_bos="BOS"
    )
    config, parameters = model.model_config, model.params
    encoding = model.input_encoder.encoding_map
    order = [encoding["BOS"], *(encoding[token] for token in vocabulary)]

    def stacked(part: str, name: str) -> np.ndarray:
        layers = range(config.num_layers)
        return np.stack([np.asarray(parameters[f"transformer/layer_{n}/{part}"][name]) for n in layers])

    def by_head(part: str) -> np.ndarray:
        flat = stacked(f"attn/{part}", "w")
        return flat.reshape(*flat.shape[:2], config.num_heads, config.key_size).transpose(0, 2, 1, 3)

    output = stacked("attn/linear", "w")
    made = {
        "embedding": np.asarray(parameters["token_embed"]["embeddings"])[order],
        "positions": np.asarray(parameters["pos_embed"]["embeddings"])[: LENGTH + 1],
        "query": by_head("query"),
        "key": by_head("key"),
        "value": by_head("value"),
        "output": output.reshape(len(output), config.num_heads, config.key_size, -1),
        "mlp_in": stacked("mlp/linear_1", "w"),
        "mlp_out": stacked("mlp/linear_2", "w"),
        "unembedding": unembedding(model, program),
    }
    parts = ("attn/query", "attn/key", "attn/value", "attn/linear", "mlp/linear_1", "mlp/linear_2")
    # Tracr puts constants into the residual stream, so that its layers need no biases.
    assert not any(stacked(part, "b").any() for part in parts)
    return {name: value.astype(np.float32) for name, value in made.items()}


def unembedding(model: assemble.AssembledTransformerModel, program: rasp.SOp) -> np.ndarray:
    """Return the unembedding: one column per category of the program's output, or one for a number.

    A number gets a second, empty column, so that a prediction has two choices.
    """
    categories = getattr(model.output_encoder, "encoding_map", None)
    names = [f"{program.label}:{value}" for value in categories] if categories else [program.label]
    columns = np.zeros((len(model.residual_labels), max(2, len(names))))
    for column, name in enumerate(names):
        columns[model.residual_labels.index(name), column] = 1.0
    return columns


if __name__ == "__main__":
    stored = {
        f"{name}/{part}": values
        for name, (program, vocabulary) in PROGRAMS.items()
        for part, values in weights(program, vocabulary).items()
    }
    np.savez_compressed(FILE, **stored)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
