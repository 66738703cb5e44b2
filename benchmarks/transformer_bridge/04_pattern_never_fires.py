"""hook_pattern never fires, without a warning, if attention is delegated and runs with sdpa."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import OPTConfig, OPTForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 48}
hf = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()
bridge = build_bridge_from_module(hf, architecture="OPTForCausalLM", hf_config=hf.config)

name, tokens, seen = "blocks.0.attn.hook_pattern", torch.arange(5, 12)[None], []
bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda pattern, hook: seen.append(pattern))])
print(f"{name} is in hook_dict: {name in bridge.hook_dict}")
print(f"times that it fired: {len(seen)}, expected 1, or an error")
print(f"in the cache: {name in bridge.run_with_cache(tokens)[1]}, expected True")
assert name in bridge.hook_dict
assert not seen
