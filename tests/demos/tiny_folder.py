"""Save a tiny random Llama, BERT, T5 and DINOv2 in folders that `transformers` can load, with tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

TEXT = (
    "My grandmother was born in Italy Japan . She left the country with her three children after war , but "
    "all life she cooked food of home and sang to us He They live"
)
WORDS = TEXT.split()


def save_tiny_llama(folder: Path, words: Sequence[str] = WORDS, context: int = 64, layers: int = 3) -> Path:
    """Save a Llama with four heads and two value heads that knows the words of the demos, or others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *words, *(f"Ġ{word}" for word in words)]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+|[^\w\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    _randomise(model, around_one="norm")
    # What it writes has as many tokens as a page asks for.
    with torch.no_grad():
        model.lm_head.weight[config.eos_token_id] = 0
    model.save_pretrained(folder)
    return folder


def save_tiny_t5(folder: Path, words: Sequence[str]) -> Path:
    """Save a T5 of three and three layers with four heads, which reads words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in words), *words]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    end = [("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=end)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = T5Config(
        vocab_size=len(pieces),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    _randomise(model, around_one="layer_norm")
    model.save_pretrained(folder)
    return folder


def save_tiny_bert(folder: Path) -> Path:
    """Save a BERT of three layers and four heads, with single letters as its words."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", ";", *letters]
    pieces += [f"##{letter}" for letter in letters]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=96,
    )
    model = BertForMaskedLM(config)
    _randomise(model, around_one="LayerNorm.weight")
    model.save_pretrained(folder)
    return folder


def save_tiny_classifier(folder: Path) -> Path:
    """Save the same BERT with a classifier of two classes instead of the unembedding."""
    from transformers import BertForSequenceClassification, BertTokenizerFast

    save_tiny_bert(folder)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    _randomise(model, around_one="LayerNorm.weight")
    model.save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def save_tiny_dinov2(folder: Path, layers: int = 2) -> Path:
    """Save a DINOv2 with two heads, for pictures of 224 x 224 pixels."""
    from transformers import Dinov2Config, Dinov2Model

    model = Dinov2Model(
        Dinov2Config(
            hidden_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=224,
            patch_size=14,
        )
    )
    _randomise(model, around_one="norm")
    model.save_pretrained(folder)
    return folder


def _randomise(model: torch.nn.Module, around_one: str) -> None:
    """Set random weights, also where the default is 0 or 1, so that a map that ignores one is noticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if around_one in name else noise)
