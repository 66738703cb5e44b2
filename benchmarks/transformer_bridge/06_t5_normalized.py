"""hook_normalized of T5 is centred, though T5 normalizes without subtracting the mean."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
sizes = {"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
hf = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
name = "T5ForConditionalGeneration"
bridge = build_bridge_from_module(hf, architecture=name, hf_config=hf.config)

tokens = torch.arange(5, 12)[None]
_, cache = bridge.run_with_cache(tokens, decoder_input_ids=tokens)
x, seen = (cache[f"encoder_blocks.0.ln1.{hook}"] for hook in ("hook_in", "hook_normalized"))
expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
print(f"largest mean over d_model: {float(seen.mean(-1).abs().max()):.4f}")
print(f"expected, as T5LayerNorm computes: {float(expected.mean(-1).abs().max()):.4f}")
assert (seen - expected).abs().max() > 1e-2
