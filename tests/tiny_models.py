"""Build tiny random models of every kind that TransformerLens supports, without a hub or a download.

Every parameter is drawn from a seeded normal distribution (including biases and norm weights), so that no
term of a block is zero or one by accident. The models have two layers, 32 positions and a vocabulary of 50.

The classes depend on the TransformerLens release (2.18: no Bridge; 4.3: only Bridges). A factory that cannot
build a model raises `Unavailable`; `available(factory, *arguments)` checks this beforehand:

    @pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge in this TransformerLens")

Some of these models are wrong. `bridge("falcon_new")`, `bridge("falcon_alibi")` and `bridge("gpt2_unscaled")`
compute other logits than the wrapped model, and the forward pass of `bridge("opt_postln")` fails. In
TransformerLens 3.9 that of the T5 Bridges fails too, and cohere and deepseek_v3 are wrong. In 2.18 the
decoder of `hooked_encoder_decoder` attends to later positions. They are built because the library must raise
errors for them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

VOCABULARY = 50
CONTEXT = 32


class Unavailable(Exception):
    """The installed TransformerLens or transformers has no such class or architecture."""


def available(factory: Callable[..., Any], *arguments: Any, **keywords: Any) -> bool:
    """Return whether `factory(*arguments)` builds a model here, and does not raise `Unavailable`."""
    if factory is bridge:
        # Every process calls this while it collects tests, so no model is built.
        return _has_bridge(arguments[0])
    return _available(factory, arguments, tuple(sorted(keywords.items())))


@functools.cache
def _available(factory: Callable[..., Any], arguments: tuple[Any, ...], keywords: tuple[Any, ...]) -> bool:
    try:
        factory(*arguments, **dict(keywords))
    except Unavailable:
        return False
    return True


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _sizes(names: str) -> dict[str, Any]:
    """Return the sizes by the names of one family of configurations, "hidden_size=24 num_layers=2"."""
    pairs = (pair.split("=") for pair in names.split())
    return {"vocab_size": VOCABULARY, **_SPECIAL, **{name: int(value) for name, value in pairs}}


_GPT2 = _sizes("n_positions=32 n_embd=24 n_layer=2 n_head=4")
_BASE = _sizes(
    "hidden_size=24 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 max_position_embeddings=32"
)
_LLAMA = {**_BASE, "num_key_value_heads": 2}
_GEMMA = {**_LLAMA, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
_SCALAR = {"query_pre_attn_scalar": 8}
_SLIDING = {"sliding_window": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NEOX = {**_BASE, "num_attention_heads": 3, "rotary_pct": 0.5}
_NEO = _sizes(
    "hidden_size=24 intermediate_size=48 num_layers=2 num_heads=4 max_position_embeddings=32 window_size=4"
)
_NEO["attention_types"] = [[["global", "local"], 1]]
_FALCON = _sizes("hidden_size=24 num_hidden_layers=2 num_attention_heads=4")
_OPT = _sizes(
    "hidden_size=24 ffn_dim=48 num_hidden_layers=2 num_attention_heads=4 max_position_embeddings=32 "
    "word_embed_proj_dim=24"
)
_BERT = {**_BASE, "type_vocab_size": 2}
_T5 = _sizes(
    "d_model=24 d_kv=6 d_ff=48 num_layers=2 num_decoder_layers=2 num_heads=4 decoder_start_token_id=0"
)
_T5 = {key: value for key, value in _T5.items() if key not in _SPECIAL}
_BART = _sizes(
    "d_model=24 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 decoder_attention_heads=4 "
    "encoder_ffn_dim=48 decoder_ffn_dim=48 max_position_embeddings=32 decoder_start_token_id=2"
)
_DEEPSEEK = {
    **_BASE,
    **_sizes(
        "num_key_value_heads=4 moe_intermediate_size=48 n_routed_experts=4 num_experts_per_tok=2 n_group=1 "
        "topk_group=1 kv_lora_rank=8 q_lora_rank=8 qk_rope_head_dim=4 qk_nope_head_dim=6 v_head_dim=6 "
        "first_k_dense_replace=1"
    ),
}
_VIT = _sizes(
    "hidden_size=24 num_hidden_layers=2 num_attention_heads=4 intermediate_size=48 image_size=16 "
    "patch_size=8 num_labels=5"
)
_MULTI_QUERY = {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "alibi": False}
# With multi_query=True, transformers' default, a TransformerBridge of the new architecture cannot be built.
_NEW_FALCON = {"multi_query": False, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}
_ALIBI_FALCON = {**_MULTI_QUERY, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}

# Each name has a model class of transformers, its configuration class and the configuration.
_WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2_unscaled": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "scale_attn_weights": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, **_SLIDING}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GEMMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, **_SLIDING, **_SCALAR}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, **_SLIDING, **_SCALAR, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    "gpt_neox_seq": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, "use_parallel_residual": False}),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", _NEO),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "n_head": 3, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "opt_postln": ("OPTForCausalLM", "OPTConfig", {**_OPT, "do_layer_norm_before": False}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_BASE, "num_attention_heads": 3}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA),
    "bloom": ("BloomForCausalLM", "BloomConfig", _sizes("hidden_size=24 n_layer=2 n_head=4")),
    "mpt": ("MptForCausalLM", "MptConfig", _sizes("d_model=32 n_layers=2 n_heads=4 max_seq_len=32")),
    "falcon_mqa": ("FalconForCausalLM", "FalconConfig", {**_FALCON, **_MULTI_QUERY}),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {**_FALCON, **_ALIBI_FALCON}),
    "falcon_new": ("FalconForCausalLM", "FalconConfig", {**_FALCON, **_NEW_FALCON}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _LLAMA),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**_LLAMA, "hidden_size": 32}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_LLAMA, "residual_multiplier": 0.5}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2),
    "cohere": ("CohereForCausalLM", "CohereConfig", _LLAMA),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, **_EXPERTS}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_LLAMA, **_EXPERTS, **_SLIDING, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
    "mamba": ("MambaForCausalLM", "MambaConfig", _sizes("hidden_size=24 num_hidden_layers=2 state_size=4")),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_BERT, "pad_token_id": 1, "bos_token_id": 0}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "t5_gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {**_BART, "decoder_vocab_size": 50, "forced_eos_token_id": 2},
    ),
}
# These are not in the matrix. Each has one unusual property.
_TRAPS = {
    # Its RMSNorm is called MT5LayerNorm.
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _WRAPPED["t5_gated"][2]),
    # Its LayerNorm multiplies by weight + 1.
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", _LLAMA),
    # The Bridge has no hook points for its final norm and the projection after it.
    "opt_projected": ("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 16}),
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], **_SLIDING}
_GEMMA_PART = {**_GEMMA, **_SCALAR, **_TWO_KINDS}
_PICTURES = _sizes(
    "hidden_size=24 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 image_size=16 patch_size=8"
)
_MAMBA = _sizes(
    "hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 "
    "max_position_embeddings=32 mamba_n_heads=4 mamba_d_state=8 mamba_d_head=16 mamba_n_groups=1 "
    "num_local_experts=4 num_experts_per_tok=2"
)
# These models run, but their blocks cannot be read, or they do not run (Granite).
_TRAPS |= {
    "gemma4_two_sizes": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_GEMMA_PART,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
        },
    ),
    "emu3": (
        "Emu3ForConditionalGeneration",
        "Emu3Config",
        {
            "text_config": _LLAMA,
            "vq_config": {
                "codebook_size": 8,
                "embed_dim": 4,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [],
                "hidden_size": 32,
                "num_attention_heads": 1,
            },
            "vocabulary_map": {"<image>": 3},
        },
    ),
    "t5gemma2": (
        "T5Gemma2ForConditionalGeneration",
        "T5Gemma2Config",
        {
            "encoder": {
                "text_config": _GEMMA_PART,
                "vision_config": _PICTURES,
                "mm_tokens_per_image": 4,
                "boi_token_index": 40,
                "eoi_token_index": 41,
                "image_token_index": 42,
            },
            "decoder": _GEMMA_PART,
            "image_token_index": 42,
        },
    ),
    "granite_without_positions": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**_MAMBA, "layer_types": ["mamba", "attention"]},
    ),
}
BRIDGE_NAMES: tuple[str, ...] = tuple(_WRAPPED)
_WRAPPED.update(_TRAPS)

_MOE = {
    **_LLAMA,
    **_sizes(
        "moe_intermediate_size=16 num_experts=4 num_experts_per_tok=2 first_k_dense_replace=1 n_group=1"
    ),
    **_sizes("num_local_experts=4 n_routed_experts=4 n_shared_experts=1 num_shared_experts=1 topk_group=1"),
    **_sizes("moe_num_experts=4 moe_k=2 shared_expert_intermediate_size=16"),
}
_ONE_KIND = {"layer_types": ["full_attention", "full_attention"]}
_LATENT = {**_DEEPSEEK, "head_dim": 4, "num_key_value_heads": 4}
_MBART = {**_BART, "decoder_start_token_id": 2, "max_length": 32}
_LINEAR = _sizes(
    "linear_num_key_heads=2 linear_num_value_heads=2 linear_key_head_dim=8 linear_value_head_dim=8"
)
_HYBRID = {
    **_LLAMA,
    **_LINEAR,
    **_sizes("num_hidden_layers=4 head_dim=8"),
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_STATE_SPACE = _sizes(
    "hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 "
    "max_position_embeddings=32 mamba_n_heads=4 mamba_d_state=8 mamba_d_head=16 mamba_n_groups=1"
)
_SWITCH = {**_T5, **_sizes("num_experts=4 expert_capacity=32 num_sparse_encoder_layers=1")}
_GEMMA_SIDE = {**_GEMMA, **_SCALAR, **_SLIDING, **_ONE_KIND}

_SPECTROGRAM = {
    **_VIT,
    **_sizes("patch_size=4 max_length=10 num_mel_bins=8 frequency_stride=4 time_stride=3"),
}
_SOUND = {
    **_BASE,
    "vocab_size": 32,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 2],
    **_sizes("num_feat_extract_layers=2 num_conv_pos_embeddings=4 num_conv_pos_embedding_groups=2"),
}
SPEECH_TOKENS = ("startoftranscript", "endoftext", "en", "transcribe", "notimestamps")
_WHISPER = {
    **_sizes(
        "d_model=24 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 decoder_attention_heads=4 "
        "encoder_ffn_dim=48 decoder_ffn_dim=48 num_mel_bins=8 max_source_positions=9 max_target_positions=32 "
        "decoder_start_token_id=1"
    ),
    **_sizes("pad_token_id=0 bos_token_id=1 eos_token_id=2"),
}
_STABLE = {**_SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}

# The wide sweep (tests/test_wide.py) has all other architectures that a small configuration can build. A pair
# is an encoder-decoder whose configuration contains two configurations.
_WIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # These read pictures or sound instead of tokens (`reads_features`).
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _VIT),
    "ast": ("ASTForAudioClassification", "ASTConfig", _SPECTROGRAM),
    "hubert": ("HubertForCTC", "HubertConfig", _SOUND),
    "hubert_stable": ("HubertForCTC", "HubertConfig", _STABLE),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SOUND),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {**_MOE, "head_dim": 8, "num_dense_layers": 1, **_ONE_KIND}),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", _LLAMA),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", {**_LLAMA, "head_dim": 6}),
    # In these hybrids, every second block has attention.
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {**_STATE_SPACE, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    ),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", _LLAMA),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT2, "n_embd": 32, "rotary_dim": 4}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**_LLAMA, **_SLIDING, **_ONE_KIND, "head_dim": 6}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", _LATENT),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_LLAMA, "head_dim": 6}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", _MOE),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**_LLAMA, **_SLIDING, **_ONE_KIND}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**_STATE_SPACE, "mamba_d_ssm": 64}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {**_BASE, "state_size": 4}),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", _MOE),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_GEMMA_SIDE, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8},
    ),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_LLAMA, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_LLAMA, "head_dim": 8}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**_MOE, "head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", _LATENT),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**_LATENT, "index_topk": 4}),
    "granite_moe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", _MOE),
    "granite_moe_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_MOE,
            **_STATE_SPACE,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope",
        },
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {**_LLAMA, "head_dim": 6}),
    "jais2": ("Jais2ForCausalLM", "Jais2Config", {**_LLAMA, "head_dim": 6}),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_MOE,
            **_sizes("num_hidden_layers=4 attn_layer_period=2 attn_layer_offset=1"),
            "use_mamba_kernels": False,
        },
    ),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", {**_MOE, "kv_channels": 6, "num_key_value_heads": 2}),
    "laguna": ("LagunaForCausalLM", "LagunaConfig", {**_MOE, "head_dim": 8}),
    "led": ("LEDForConditionalGeneration", "LEDConfig", {**_BART, "attention_window": 4}),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_LLAMA, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "lfm2_attention": ("Lfm2ForCausalLM", "Lfm2Config", {**_LLAMA, **_ONE_KIND}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {**_MOE, **_ONE_KIND, "num_dense_layers": 1}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**_MOE, "head_dim": 8, "intermediate_size_mlp": 48}),
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config", _T5),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", _MBART),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_sizes("hidden_size=24 num_hidden_layers=2 state_size=4 num_heads=4 head_dim=12 n_groups=1")},
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _MBART),
    "ministral3": ("Ministral3ForCausalLM", "Ministral3Config", {**_LLAMA, "head_dim": 6}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**_MOE, "head_dim": 8, "rotary_dim": 4}),
    "modernbert_decoder": ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", _BASE),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", {**_T5, "tie_word_embeddings": False}),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", _LLAMA),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {**_LLAMA, "head_dim": 6}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**_MOE, **_sizes("mamba_num_heads=4 mamba_head_dim=8 ssm_state_size=8 n_groups=1 head_dim=6")},
    ),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {**_LLAMA, **_SLIDING, **_ONE_KIND}),
    "olmo_clipped": ("OlmoForCausalLM", "OlmoConfig", {**_LLAMA, "clip_qkv": 1}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", _HYBRID),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", _MOE),
    "openai_gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _GPT2),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _MOE),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_MOE, "head_dim": 8}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_MOE, **_HYBRID}),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_MOE, **_HYBRID}),
    "qwen3_5_attention": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**_HYBRID, **_ONE_KIND, "num_hidden_layers": 2},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**_LLAMA, "lru_width": 24, "block_types": ["recurrent", "attention"], "attention_window_size": 32},
    ),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {**_BASE, "attention_hidden_size": 24, "context_length": 32}),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {**_LLAMA, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _LLAMA),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _LLAMA),
    "switch": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", _SWITCH),
    "vaultgemma": ("VaultGemmaForCausalLM", "VaultGemmaConfig", _GEMMA_SIDE),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        _sizes("d_model=24 ffn_dim=48 num_layers=2 attention_heads=4 max_position_embeddings=32"),
    ),
    "youtu": ("YoutuForCausalLM", "YoutuConfig", _LATENT),
}
_ROBERTA = _WRAPPED["roberta"][2]
_NARROW = {**_BERT, "embedding_size": 16}
_DISTILBERT = _sizes("dim=24 hidden_dim=48 n_layers=2 n_heads=4 max_position_embeddings=32")
# TransformerLens has no adapter for these encoders, which `lm.wrap` makes into a Bridge.
_RENAMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", _NARROW),
    "xlm_roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", _ROBERTA),
    "camembert": ("CamembertForMaskedLM", "CamembertConfig", _ROBERTA),
    "data2vec_text": ("Data2VecTextForMaskedLM", "Data2VecTextConfig", _ROBERTA),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_NARROW, "num_hidden_groups": 2}),
    "ernie": ("ErnieForMaskedLM", "ErnieConfig", {**_BERT, "use_task_id": True}),
    "rembert": (
        "RemBertForMaskedLM",
        "RemBertConfig",
        {**_BERT, "input_embedding_size": 16, "output_embedding_size": 20},
    ),
}
_WIDE.update(_RENAMED)
WIDE_NAMES: tuple[str, ...] = tuple(_WIDE)


def wrapped_class(name: str) -> str:
    """Return the name of the class of transformers that `bridge(name)` wraps."""
    model_class: str = _entry({**_WRAPPED, **_WIDE}, name)[0]
    return model_class


def is_pair(name: str) -> bool:
    """Return whether an architecture of the tables is an encoder-decoder, without building it."""
    return "ConditionalGeneration" in _entry({**_WRAPPED, **_WIDE}, name)[0]


_CLASSIC: dict[str, dict[str, Any]] = {
    "LN": {},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "none": {"normalization_type": None},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 6},
    "alibi": {"positional_embedding_type": "alibi"},
    "grouped": {"n_key_value_heads": 2, "positional_embedding_type": "rotary", "rotary_dim": 6},
    "gated": {"gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"},
    "parallel": {"parallel_attn_mlp": True},
    "sandwich": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    "attn_only": {"attn_only": True},
    "local": {"use_local_attn": True, "attn_types": ["global", "local"], "window_size": 3},
    "mixture": {
        "num_experts": 4,
        "experts_per_token": 2,
        "gated_mlp": True,
        "act_fn": "silu",
        "normalization_type": "RMS",
    },
    "bidirectional": {"attention_dir": "bidirectional"},
}
HOOKED_TRANSFORMER_NAMES: tuple[str, ...] = tuple(_CLASSIC)
_CLASSIC_BASE: dict[str, Any] = {
    "d_model": 24,
    "n_heads": 4,
    "d_head": 6,
    "n_layers": 2,
    "n_ctx": CONTEXT,
    "d_vocab": VOCABULARY,
    "d_mlp": 48,
    "act_fn": "gelu",
    "normalization_type": "LN",
    "device": "cpu",
}


def _entry(table: dict[str, Any], name: str) -> Any:
    if name not in table:
        raise ValueError(f"name: expected one of {', '.join(table)}; got {name!r}")
    return table[name]


def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.25) -> torch.nn.Module:
    """Overwrite every parameter in place: N(0, scale), and 1 + N(0, scale) for the weights of norms."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for module in model.modules():
        kind = type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            value = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            # Norms have weights around 1, except Gemma's, which multiply by 1 + weight. A_log is an exponent.
            if "Norm" in kind and name in ("weight", "w") and not kind.startswith("Gemma"):
                value = 1 + value
            elif name == "A_log":
                value = parameter.detach().double() + 0.1 * value
            with torch.no_grad():
                parameter.copy_(value)
    return model


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide TransformerLens's notices, and keep the global random state, inside the context."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        torch.random.fork_rng(devices=[]),
    ):
        warnings.simplefilter("ignore")
        yield


def wrapped_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """Return the transformers model that `bridge(name, dtype, seed)` wraps, without a Bridge."""
    model_class, config_class, usual = _entry({**_WRAPPED, **_WIDE}, name)
    if not hasattr(transformers, model_class) or not hasattr(transformers, config_class):
        raise Unavailable(f"transformers {transformers.__version__} has no {model_class}")
    with _quietly():
        # `randomise` does not set A_log, which is drawn here. Two models with one seed must be equal.
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**usual, **config}))
    # The grouped matrix product of transformers for mixtures has no float64.
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model = randomise(model, seed).to(dtype).eval()
    if dtype == torch.float64:
        _norm_in_double(model)
    return model


@functools.cache
def in_transformers() -> frozenset[str]:
    """Return the names that transformers has. `hasattr` would import the file of each class."""
    # This takes a third of a second.
    return frozenset(dir(transformers))


def transformers_version() -> tuple[int, ...]:
    """Return the first two numbers of the installed release of transformers."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _runs_on_transformers(name: str) -> bool:
    """Return whether the installed release of transformers can run a model on a TransformerBridge.

    TransformerLens 4.3 reads an attribute of CodeGen's attention that transformers 5.24 no longer has.
    Llama 4 with pictures fails in transformers 5.24 itself: its output lacks a field that it reads.
    """
    return name not in ("codegen", "llama4_pictures") or transformers_version() < (5, 24)


@functools.cache
def _has_bridge(name: str) -> bool:
    model_class, config_class, _ = _entry({**_WRAPPED, **_WIDE}, name)
    if name in _RENAMED:
        return _has_bridge("bert") and {model_class, config_class} <= in_transformers()
    if not _runs_on_transformers(name):
        return False
    # lens_mix has its adapter.
    if name == "whisper":
        return _has_bridge("bart") and {model_class, config_class} <= in_transformers()
    return f'"{model_class}": ' in _table_of_bridges() and {model_class, config_class} <= in_transformers()


@functools.cache
def _table_of_bridges() -> str:
    """The file that names the architectures that have a bridge; empty before TransformerLens 3.

    It is read as text: its import takes two seconds, as that of every bridge, and tests that are collected
    do not need them.
    """
    path = distribution("transformer_lens").locate_file(
        "transformer_lens/factories/architecture_adapter_factory.py"
    )
    file = Path(str(path))
    return file.read_text() if file.exists() else ""


def _norm_in_double(model: torch.nn.Module) -> None:
    """Let norms compute in the dtype of their input, because transformers casts it to float32."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "LayerNorm" or not kind.endswith("Norm") or not hasattr(module, "forward"):
            continue
        weight = getattr(module, "weight", None)
        x = torch.randn(3, 24 if weight is None else weight.shape[-1], dtype=torch.float64)
        # The norm is measured, because its name does not say whether it centers or multiplies by 1 + weight.
        for centered, offset in itertools.product((False, True), (False, True)):
            try:
                difference = module(x) - _normed(module, x, centered=centered, offset=offset)
            except (TypeError, RuntimeError, IndexError):  # It takes more than a vector, or is not a norm.
                break
            if difference.abs().max() < 1e-4:
                module.forward = functools.partial(_normed, module, centered=centered, offset=offset)
                break


def _normed(module: torch.nn.Module, x: torch.Tensor, *, centered: bool, offset: bool) -> torch.Tensor:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-5))
    x = x - x.mean(-1, keepdim=True) if centered else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    weight = getattr(module, "weight", None)
    return x if weight is None else x * (1 + weight if offset else weight)


def bridge(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None, **config: Any
) -> Any:
    """Return a TransformerBridge of a tiny random model in evaluation mode, with its own attention kernel.

    `config` overrides fields of the wrapped model's configuration.

    Raises:
        Unavailable: If TransformerLens has no Bridge (2.x), or none for this architecture.
    """
    if not _runs_on_transformers(name):
        raise Unavailable(f"transformers {transformers.__version__} cannot run it")
    model = wrapped_model(name, dtype, seed, **config)
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as error:
        raise Unavailable("this TransformerLens has no TransformerBridge") from error
    if name in _RENAMED:
        import lens_mix as lm

        with _quietly():
            return lm.wrap(model, tokenizer)
    model.config.architectures = [type(model).__name__]
    if name == "whisper":
        from lens_mix._model.adapters import register_adapters

        register_adapters()
    with _quietly():
        try:
            built = build_bridge_from_module(
                model, architecture=type(model).__name__, hf_config=model.config, tokenizer=tokenizer
            )
        except ValueError as error:
            if "nsupported architecture" not in str(error):
                raise
            raise Unavailable(f"this TransformerLens has no bridge for {type(model).__name__}") from error
    return built.eval()


def _classic(
    class_name: str, config: dict[str, Any], dtype: torch.dtype, seed: int, tokenizer: Any = None
) -> Any:
    import transformer_lens

    # For removed classes, TransformerLens 4 raises an ImportError and not an AttributeError.
    try:
        model_class = getattr(transformer_lens, class_name)
        config_class = transformer_lens.HookedTransformerConfig
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"this TransformerLens has no {class_name}") from error
    with _quietly():
        model = model_class(config_class(**{**_CLASSIC_BASE, **config, "dtype": dtype}), tokenizer=tokenizer)
    # The router of a mixture is float32, whatever the configuration says.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return randomise(model, seed).eval()


def hooked_transformer(
    name: str = "LN", dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None, **config: Any
) -> Any:
    """Return a tiny random HookedTransformer; `config` overrides fields of its configuration.

    Raises:
        Unavailable: If it is TransformerLens 4.
    """
    return _classic("HookedTransformer", {**_entry(_CLASSIC, name), **config}, dtype, seed, tokenizer)


def bridge_or_hooked(
    name: str, hooked: str, dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None
) -> Any:
    """Return `bridge(name)`, or `hooked_transformer(hooked)` if this TransformerLens has no such Bridge."""
    build, name = (bridge, name) if available(bridge, name) else (hooked_transformer, hooked)
    return build(name, dtype, seed, tokenizer)


def gpt2_like(dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None) -> Any:
    """Return a decoder with learned positions, LayerNorm and biases, of a class that this release has."""
    return bridge_or_hooked("gpt2", "LN", dtype, seed, tokenizer)


def llama_like(dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None) -> Any:
    """Return a decoder with rotary positions and grouped values, of a class that this release has."""
    return bridge_or_hooked("llama", "grouped", dtype, seed, tokenizer)


def hooked_encoder(
    dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None, **config: Any
) -> Any:
    """Return a tiny random HookedEncoder (BERT). Raise `Unavailable` in TransformerLens 4."""
    return _classic("HookedEncoder", {"attention_dir": "bidirectional", **config}, dtype, seed, tokenizer)


def hooked_encoder_decoder(
    dtype: torch.dtype = torch.float32, seed: int = 0, tokenizer: Any = None, **config: Any
) -> Any:
    """Return a tiny random HookedEncoderDecoder (T5). Raise `Unavailable` in TransformerLens 4."""
    t5 = {
        "act_fn": "relu",
        "normalization_type": "RMS",
        "attention_dir": "bidirectional",
        "positional_embedding_type": "relative_positional_bias",
        "relative_attention_max_distance": 16,
        "relative_attention_num_buckets": 8,
        "decoder_start_token_id": 0,
        "use_attn_scale": False,
    }
    return _classic("HookedEncoderDecoder", {**t5, **config}, dtype, seed, tokenizer)


def is_encoder_decoder(model: Any) -> bool:
    """Return whether it is a HookedEncoderDecoder, or a Bridge of an encoder-decoder."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return type(model).__name__ == "HookedEncoderDecoder" or bool(
        getattr(config, "is_encoder_decoder", False)
    )


def tokens(
    model: Any, batch: int = 2, seq: int = 7, seed: int = 1, *, of_decoder: bool = False
) -> torch.Tensor:
    """Return random tokens [batch, seq] without special ones; a picture or sound for models of these.

    Args:
        model: The model.
        batch: The number of prompts.
        seq: The number of tokens.
        seed: The seed.
        of_decoder: Whether they are those that the decoder of an encoder-decoder reads.
    """
    generator = torch.Generator().manual_seed(seed)
    config = getattr(getattr(model, "original_model", model), "config", None)
    shapes = {"vit": (3, 16, 16), "deit": (3, 16, 16), "audio-spectrogram-transformer": (10, 8)}
    # A frame of the sound begins every 10 samples, and has 25.
    shapes |= dict.fromkeys(("hubert", "wav2vec2"), (25 + 10 * (seq - 1),))
    shapes["whisper"] = (8, 18)
    if config is not None and config.model_type in shapes and not of_decoder:
        dtype = next(model.parameters()).dtype
        return torch.randn(batch, *shapes[config.model_type], generator=generator).to(dtype)
    return torch.randint(3, VOCABULARY, (batch, seq), generator=generator)


def inputs(model: Any, batch: int = 2, seq: int = 7, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `(args, kwargs)` of a model's call: `tokens`, and `seq - 2` more for an encoder-decoder."""
    first = tokens(model, batch, seq, seed)
    if not is_encoder_decoder(model):
        return (first,), {}
    second = tokens(model, batch, seq - 2, seed + 1, of_decoder=True)
    if type(model).__name__ == "HookedEncoderDecoder":
        return (first, second), {}
    return (first,), {"decoder_input": second}


def speech_tokenizer(words: Sequence[str] = ()) -> Any:
    """Return a tokenizer whose numbers before 6 are Whisper's special tokens.

    Args:
        words: Its other tokens, with GPT-2's mark of a space. None: `w6` ... `w49`, split at spaces.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", *(f"<|{name}|>" for name in SPEECH_TOKENS)]
    names += words or [f"w{number}" for number in range(len(names), VOCABULARY)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def speech_extractor() -> Any:
    """Return what makes a spectrogram of the tiny Whisper: 18 columns of 8 bands, of 2,880 samples."""
    with _quietly():
        return transformers.WhisperFeatureExtractor(
            feature_size=8, sampling_rate=2880, hop_length=160, chunk_length=1, n_fft=400
        )


def toy_tokenizer(padding_side: str = "right") -> Any:
    """Return a tokenizer of `w3` ... `w49`, split at spaces; 0, 1, 2 are `<pad>`, `<bos>`, `<eos>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # With name_or_path and add_bos_token, TransformerLens does not look for the tokenizer on the hub.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<eos>",
        name_or_path="toy",
        add_bos_token=True,
        padding_side=padding_side,
    )
