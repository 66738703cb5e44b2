"""Fields of bridge.cfg have values that the model does not have."""

import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

base = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
llama = {**base, "intermediate_size": 48, "head_dim": 6, "num_key_value_heads": 2}
t5 = {"d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
bloom = {"hidden_size": 24, "n_layer": 2, "n_head": 4}
for name, family, fields, attribute, expected in (
    ("T5ForConditionalGeneration", "T5", t5, "d_mlp", 48),
    ("OPTForCausalLM", "OPT", {**base, "ffn_dim": 48}, "d_mlp", 48),
    ("BloomForCausalLM", "Bloom", bloom, "act_fn", "gelu"),
    ("ViTForImageClassification", "ViT", base, "attention_dir", "bidirectional"),
    ("Gemma2ForCausalLM", "Gemma2", llama, "use_normalization_before_and_after", True),
    ("MistralForCausalLM", "Mistral", {**llama, "sliding_window": 4}, "window_size", 4),
):
    hf = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**fields))
    seen = getattr(build_bridge_from_module(hf, architecture=name, hf_config=hf.config).cfg, attribute)
    print(f"{name}: {attribute} is {seen!r}, expected {expected!r}")
    assert seen != expected
