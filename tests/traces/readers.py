"""Build small models that read text, with tokenizers of the usual kinds and with chat templates."""

from __future__ import annotations

from typing import Any

import torch
import transformers

# The tokenizers learn their merges from this text, and so have tokens of several letters.
CORPUS = (
    "The company was founded in Oslo. It has 120 employees. In 2023 the models were trained on eight GPUs.",
    "Critics liked the new product. The chief executive plans to retire. Trains run every hour.",
    "Question: On which hardware were the models trained? Answer: on eight GPUs. Use the documents.",
    "user assistant system report press café naïve",
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|end|>"]
KINDS = ("byte-level", "metaspace", "replaced spaces")

# Each template writes a message in another way. The first adds nothing but marks.
PLAIN = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|user|>system\nUse the documents.<|end|>\n{% endif %}" + PLAIN
)
STRIPPING = PLAIN.replace("m['content']", "m['content'] | trim")
STRIPPING_USERS = PLAIN.replace(
    "m['content']", "(m['content'] | trim) if m['role'] == 'user' else m['content']"
)


def tokenizer_of(kind: str = "byte-level", has_bos: bool = True, template: str | None = None) -> Any:
    """Return a fast tokenizer of about 400 tokens.

    Args:
        kind: "byte-level" (GPT-2, Llama 3, Qwen), "metaspace" (Llama 2, which writes a space before the text)
            or "replaced spaces" (Gemma, which does not). The last two write unknown characters as bytes.
        has_bos: Whether it writes <s> before a text.
        template: The chat template.
    """
    from tokenizers import processors

    backend, bos = _train(kind), {}
    if has_bos:
        numbers = [("<s>", SPECIAL.index("<s>"))]
        backend.post_processor = processors.TemplateProcessing(
            "<s> $A", "<s> $A <s> $B", special_tokens=numbers
        )
        bos = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[4:],
        name_or_path="toy",
        **bos,
    )
    # With this, TransformerLens does not look for the tokenizer on the hub.
    tokenizer.init_kwargs["add_bos_token"] = True
    tokenizer.chat_template = template
    return tokenizer


def _train(kind: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind != "byte-level"))
    alphabet: list[str] = []
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
        )
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    pieces = [] if kind == "byte-level" else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=430, special_tokens=[*SPECIAL, *pieces], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def reader(
    kind: str = "byte-level",
    has_bos: bool = True,
    template: str | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Any:
    """Return a tiny random causal model with one of these tokenizers, and room for 512 tokens."""
    tokenizer = tokenizer_of(kind, has_bos, template)
    return _build(tokenizer, dtype, seed)


def _build(tokenizer: Any, dtype: torch.dtype, seed: int) -> Any:
    from tests.tiny_models import available, bridge, hooked_transformer

    size = len(tokenizer)
    if available(bridge, "llama"):
        return bridge("llama", dtype, seed, tokenizer=tokenizer, vocab_size=size, max_position_embeddings=512)
    return hooked_transformer("grouped", dtype, seed, tokenizer=tokenizer, d_vocab=size, n_ctx=512)
