"""Test tokens as text, and characters that are split into several tokens, for each kind of tokenizer."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import lens_mix as lm
from lens_mix._inputs.token_strings import token_strings
from lens_mix.maps.characters import join_tokens
from tests.tiny_models import gpt2_like

TEXT = "the café 你好 مرحبا 👩\u200d🚀🇫🇷 👍🏽 naïve हिन्दी"


def byte_level(texts=("the cat sat",), size=270):
    """Return a tokenizer like GPT-2's: merges of bytes that are written as characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<｜begin▁of▁sentence｜>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts) * 3, trainer)
    end = "<|endoftext|>"
    return fast(tokenizer, eos_token=end, pad_token=end, bos_token="<｜begin▁of▁sentence｜>")


def byte_fallback():
    """Return a tokenizer like Llama 2's: SentencePiece, with single bytes for unknown text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁catfhe"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))} | {"▁c": 300}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "c")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram():
    """Return a tokenizer like T5's: tokens with scores, and no bytes."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), *((c, -4.0) for c in sorted(set(TEXT.replace(" ", ""))))]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return fast(tokenizer, unk_token="<unk>")


def word_piece():
    """Return a tokenizer like BERT's: tokens inside a word start with ##."""
    names = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "caf",
        "##é",
        "你",
        "好",
        "مر",
        "##حبا",
        "na",
        "##ïve",
        "हिन्दी",
    ]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return fast(tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def fast(tokenizer, **special):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path="toy", **special)


def byt5():
    return transformers.ByT5Tokenizer()


def strings(tokenizer, ids):
    return token_strings(SimpleNamespace(tokenizer=tokenizer), torch.tensor(ids))


def read(tokenizer, text):
    return strings(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def map_of(tokens):
    return lm.MixingMap(torch.ones(1, len(tokens), len(tokens)), tokens=tokens)


KINDS = [byte_level, lambda: byte_level([TEXT], 400), byte_fallback, unigram, byt5]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_spell_the_text(kind):
    tokenizer = kind()
    tokens = read(tokenizer, TEXT)
    assert "\ufffd" not in "".join(tokens)
    assert join_tokens(tokens).removeprefix(" ") == TEXT
    assert len(tokens) == len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_found_and_named(kind):
    mixing_map = map_of(read(kind(), TEXT))
    words = TEXT.split(" ")
    assert [word.strip() for word in mixing_map.merge_words().tokens] == words
    assert mixing_map.merge_words(groups=words).tokens == words


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, byt5])
@pytest.mark.parametrize("word", ["مرحبا", "café", "한국어", "नमस्ते", "ok👍", "你好café"])
def test_a_single_word_of_split_characters(kind, word):
    """Use a word without a space, so that no token has a mark of a word; the bytes show that it is whole."""
    tokens = read(kind(), word)
    assert [found.strip() for found in map_of(tokens).merge_words().tokens] == [word]
    assert [found.strip() for found in map_of(["<s>", *tokens]).merge_words().tokens] == ["<s>", word]


def test_tokens_of_a_character_are_told_apart():
    tokens = read(byte_level(), "café 👩\u200d🚀🇫🇷👍🏽")
    assert tokens[:6] == ["c", "a", "f", "é[1/2]", "é[2/2]", " "]
    assert tokens[6:] == [
        *(f"👩\u200d🚀[{number}/11]" for number in range(1, 12)),
        *(f"🇫🇷[{number}/8]" for number in range(1, 9)),
        *(f"👍🏽[{number}/8]" for number in range(1, 9)),
    ]
    mixing_map = map_of(tokens)
    assert mixing_map.top(1, query="é[2/2]") == mixing_map.top(1, query=4)


def test_what_is_text_on_its_own_stays():
    """Use tokens that are text but less than a visible character: an accent, a part of an emoji."""
    tokens = read(unigram(), "né 👩\u200d🚀 हि")
    assert tokens == [" ", "n", "é", " ", "👩", "\u200d", "🚀", " ", "ह", "ि"]
    assert read(word_piece(), "the café 你好 مرحبا 👩") == [
        *("the", "caf", "##é", "你", "好", "مر", "##حبا", "[UNK]")
    ]
    assert map_of(read(word_piece(), "the café 你好")).merge_words(["the", "café", "你", "好"]).tokens == [
        *("the", "café", "你", "好")
    ]


def test_tokens_across_a_characters_border_are_one_run():
    """Use a token that ends one character and starts the next."""
    tokenizer = byte_level(["你好"], 277)
    tokens = read(tokenizer, "你好")
    assert join_tokens(tokens) == "你好"
    assert "\ufffd" not in "".join(tokens)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, byt5])
def test_bytes_of_no_character(kind):
    """Use a prompt that ends inside a character, and one with a special token inside a character."""
    tokenizer = kind()
    first, *_ = tokenizer("é", add_special_tokens=False)["input_ids"][-2:]
    last = tokenizer("é", add_special_tokens=False)["input_ids"][-1]
    end = tokenizer.eos_token_id
    assert strings(tokenizer, [last]) == ["<0xA9>"]
    assert strings(tokenizer, [first, end, last]) == ["<0xC3>", tokenizer.eos_token, "<0xA9>"]
    assert strings(tokenizer, [first, first, last]) == ["<0xC3>", "é[1/2]", "é[2/2]"]


def test_special_tokens_keep_their_marks():
    tokenizer = byte_level()
    assert strings(tokenizer, [tokenizer.bos_token_id]) == ["<｜begin▁of▁sentence｜>"]


def test_a_real_replacement_character():
    assert join_tokens(read(byte_level(), "a\ufffdb")) == "a\ufffdb"


def test_maps_of_a_model():
    """Map a string and check the labels of its words."""
    model = gpt2_like()
    bytes_of_cafe = {piece: number for number, piece in enumerate("theĠcafÃ©s")}
    tokenizer = Tokenizer(models.BPE({**bytes_of_cafe, "<eos>": 20}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    model.tokenizer = fast(tokenizer, eos_token="<eos>", pad_token="<eos>")
    found = lm.run(model, model.tokenizer("the café", return_tensors="pt"), "attention")
    assert found.tokens == ["t", "h", "e", " ", "c", "a", "f", "é[1/2]", "é[2/2]"]
    assert found.merge_words().tokens == ["the", " café"]
    spans = [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    prompt = torch.tensor(found.provenance["token_ids"])
    zeroed = lm.run(model, prompt, lm.methods.ValueZeroing(spans=spans), engine="hooks")
    assert zeroed.key_tokens == ["the", " café"]
