"""start_at_layer returns the logits of the wrong residual stream on BERT, BLOOM and Mamba."""

import torch
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

torch.manual_seed(0)
bert = transformers.BertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
bloom = transformers.BloomConfig(vocab_size=50, hidden_size=24, n_layer=2, n_head=4)
mamba = transformers.MambaConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2)
models = {"BertForMaskedLM": bert, "BloomForCausalLM": bloom, "MambaForCausalLM": mamba}
tokens, errors = torch.arange(5, 12)[None], []
for name, config in models.items():
    hf = getattr(transformers, name)(config).eval()
    bridge = build_bridge_from_module(hf, architecture=name, hf_config=hf.config)
    logits, cache = bridge.run_with_cache(tokens)
    resumed = bridge(cache["blocks.1.hook_resid_pre"], start_at_layer=1)
    errors.append(float((resumed - logits).abs().max()))
    print(f"{name}: largest difference of a logit {errors[-1]:.4f}, expected 0.0000")
assert min(errors) > 1e-3
