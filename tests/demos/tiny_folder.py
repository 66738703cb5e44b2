"""Save a tiny random Llama and BERT with tokenizers, in folders that `transformers` can load."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT = (
    "My grandmother was born in Italy Japan . She left the country with her three children after war , but "
    "all life she cooked food of home and sang to us He They live"
)
WORDS = TEXT.split()


def save_tiny_llama(folder: Path) -> Path:
    """Save a Llama of three layers, four heads and two value heads, with the words of the demos."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *WORDS, *(f"Ġ{word}" for word in WORDS)]
    words = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+|[^\w\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    _randomise(model, around_one="norm")
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


def _randomise(model: torch.nn.Module, around_one: str) -> None:
    """Set random weights, also where the default is 0 or 1, so that a map that ignores one is noticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if around_one in name else noise)
