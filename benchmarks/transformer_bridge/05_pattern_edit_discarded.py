"""An edited attention pattern does not reach the output on models that delegate attention."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import BertConfig, BertForMaskedLM, OPTConfig, OPTForCausalLM

tokens, changes = torch.arange(5, 12)[None], {}
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
for hf in (
    OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=24, ffn_dim=48)),
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=48)),
):
    hf.eval().set_attn_implementation("eager")
    name = type(hf).__name__
    bridge = build_bridge_from_module(hf, architecture=name, hf_config=hf.config)
    knock_out = [("blocks.0.attn.hook_pattern", lambda pattern, hook: 0 * pattern)]
    edited = bridge.run_with_hooks(tokens, fwd_hooks=knock_out)
    changes[name] = float((edited - bridge(tokens)).abs().max())
    print(f"{name}: largest change of a logit {changes[name]}, expected more than 0")
assert max(changes.values()) == 0
