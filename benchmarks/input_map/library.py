"""Store rows of the library's own maps of the whole model, for the table.

python -m benchmarks.input_map.library smollm2 held_out       (or gemma3, choose)
python -m benchmarks.input_map.library smollm2 held_out gim   only the forms of gim
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import lens_mix as lm
from benchmarks.input_map.importance import file_of, folder
from benchmarks.input_map.prompts import make

METHODS: dict[str, Any] = {
    "token_patching": lm.methods.TokenPatching(replacements=(" thing", " green")),
    "gim, ratio": lm.methods.Gim(activations="ratio"),
    "gim, ratio, absolute": lm.methods.Gim(activations="ratio", readout="absolute"),
    "gim, absolute": lm.methods.Gim(readout="absolute"),
    "gim": lm.methods.Gim(),
}


def main(model_name: str, half: str, only: str = "") -> None:
    """Store the rows of all prompts of one half; `only` limits the methods to one."""
    import models

    torch.set_num_threads(1)
    methods = {name: method for name, method in METHODS.items() if only in ("", name.split(",")[0])}
    model, kept = getattr(models, model_name)(), folder(f"{model_name} library {only}".strip())
    for prompt in make():
        measured = file_of(model_name, prompt)
        path = kept / measured.name
        if prompt.half != half or not measured.exists() or path.exists():
            continue
        tokens = torch.load(measured)["tokens"]
        maps = {name: lm.run(model, tokens, method, queries=[-1]) for name, method in methods.items()}
        torch.save({name: m.scores[0, 0].abs() for name, m in maps.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
