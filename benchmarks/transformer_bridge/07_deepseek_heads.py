"""hook_z of DeepSeek-V3 is split at the wrong places, and hook_v has its axes swapped."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ranks = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
config = DeepseekV3Config(**sizes, **experts, **ranks, num_key_value_heads=4, v_head_dim=6)
hf = DeepseekV3ForCausalLM(config).eval()
bridge = build_bridge_from_module(hf, architecture="DeepseekV3ForCausalLM", hf_config=hf.config)

_, cache = bridge.run_with_cache(torch.arange(5, 12)[None])
shapes = [tuple(cache[f"blocks.0.attn.{name}"].shape) for name in ("hook_v", "hook_z")]
print(f"hook_v: {shapes[0]}, hook_z: {shapes[1]}, expected (1, 7, 4, 6) for both")
assert shapes == [(1, 4, 7, 6), (1, 7, 6, 4)]
