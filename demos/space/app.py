"""A Hugging Face Space: the app of `lens-mix serve`, with limits for a machine that many people share.

    python demos/space/app.py [MODEL]

MODEL is the name of a model on the hub or a local folder; without it, the one in LENS_MIX_MODEL, or SmolLM2.
"""

from __future__ import annotations

import os
import sys

from transformer_lens.model_bridge import TransformerBridge

from lens_mix.app import launch

MODEL = "HuggingFaceTB/SmolLM2-135M"

if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("LENS_MIX_MODEL", MODEL)
    model = TransformerBridge.boot_transformers(given)
    # A free Space has two cores, and everybody waits for the prompt of the first in the queue.
    app, url = launch(model, map_tokens=64, trace_tokens=256, server_name=None)
    print(url, flush=True)
    app.block_thread()
