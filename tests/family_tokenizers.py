"""Build small tokenizers of the families that transformers has, without a hub and without a download.

Each is saved and loaded again, like a user's. Words are single letters, `a` to `z`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

LETTERS = string.ascii_lowercase
VERSION = int(transformers.__version__.split(".")[0])


def family_tokenizer(name: str, folder: Path) -> Any:
    """Return the tokenizer of a family; None if this release of transformers cannot build it from a list."""
    if VERSION < 5 and name not in _OF_EVERY_RELEASE:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    _FAMILIES[name](folder).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _word_pieces(kind: str) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{one}" for one in LETTERS)]
        (folder / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
        return getattr(transformers, kind)(str(folder / "vocab.txt"))

    return build


def _bytes(kind: str, special: tuple[str, ...]) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        from tokenizers import pre_tokenizers

        pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        if VERSION >= 5:
            return getattr(transformers, kind)(vocab=vocabulary, merges=[])
        (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        return getattr(transformers, f"{kind}Fast")(str(folder / "vocab.json"), str(folder / "merges.txt"))

    return build


def _unigram(kind: str, special: str, last: str = "", **options: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        vocabulary = [(piece, 0.0) for piece in special.split()]
        vocabulary += [("▁", -2.0)]
        vocabulary += [(start + one, -3.0) for start in ("", "▁") for one in LETTERS]
        vocabulary += [(piece, 0.0) for piece in last.split()]
        return getattr(transformers, kind)(vocab=vocabulary, **options)

    return build


def _nllb(folder: Path) -> Any:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return transformers.NllbTokenizer(vocab=vocabulary, merges=[], src_lang="eng_Latn", tgt_lang="fra_Latn")


def _marian(folder: Path) -> Any:
    """Return a tokenizer with two vocabularies: a single token of a source is several letters in a target."""
    import sentencepiece

    text = folder / "text.txt"
    for side, lines in (("source", ["abc abc d", "abc e f", "a b c d e f"]), ("target", ["a b c d e f"])):
        text.write_text("\n".join(lines * 20), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / side),
            vocab_size=14 if side == "source" else 10,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    models = [
        sentencepiece.SentencePieceProcessor(str(folder / f"{side}.model")) for side in ("source", "target")
    ]
    pieces = {model.id_to_piece(number) for model in models for number in range(3, model.get_piece_size())}
    listed = ["</s>", "<unk>", *sorted(pieces), "<pad>"]
    numbers = {piece: number for number, piece in enumerate(listed)}
    (folder / "vocab.json").write_text(json.dumps(numbers), encoding="utf-8")
    files = (str(folder / name) for name in ("source.model", "target.model", "vocab.json"))
    return transformers.MarianTokenizer(*files, source_lang="en", target_lang="fr")


def _generic(single: str, pair: str, **special: str) -> Callable[[Path], Any]:
    """Return a fast tokenizer of no family, with its own template."""

    def build(folder: Path) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        pieces = ["<pad>", "<s>", "</s>", "<unk>", *LETTERS]
        words = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        numbers = [("<s>", 1), ("</s>", 2)]
        words.post_processor = processors.TemplateProcessing(single, pair, special_tokens=numbers)
        named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", **special}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named)

    return build


_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_LANGUAGES = {"src_lang": "en_XX", "tgt_lang": "ro_RO"}
_FAMILIES: dict[str, Callable[[Path], Any]] = {
    "bert": _word_pieces("BertTokenizerFast"),
    "electra": _word_pieces("ElectraTokenizerFast"),
    "roberta": _bytes("RobertaTokenizer", _ROBERTA),
    "bart": _bytes("BartTokenizer", _ROBERTA),
    "blenderbot": _bytes("BlenderbotTokenizer", _ROBERTA),
    "deberta": _bytes("DebertaTokenizer", ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")),
    "deberta_v2": _unigram("DebertaV2Tokenizer", "[PAD] [CLS] [SEP] [UNK]", "[MASK]"),
    "xlm_roberta": _unigram("XLMRobertaTokenizer", "<s> <pad> </s> <unk>", "<mask>"),
    "camembert": _unigram(
        "CamembertTokenizer", "<s>NOTUSED <pad> </s>NOTUSED <unk> <unk>NOTUSED", "<s> </s> <mask>"
    ),
    "albert": _unigram("AlbertTokenizer", "<pad> <unk> [CLS] [SEP]", "[MASK]"),
    "t5": _unigram("T5Tokenizer", "<pad> </s> <unk>", extra_ids=2),
    "pegasus": _unigram("PegasusTokenizer", "<pad> </s> <mask_1> <mask_2>", "<unk>"),
    "mbart": _unigram("MBartTokenizer", "<s> <pad> </s> <unk>", **_LANGUAGES),
    "mbart50": _unigram("MBart50Tokenizer", "<s> <pad> </s> <unk>", **_LANGUAGES),
    "nllb": _nllb,
    "marian": _marian,
    "byt5": lambda folder: transformers.ByT5Tokenizer(),
    "generic": _generic("<s> $A </s>", "<s> $A </s> </s> $B:1 </s>:1", bos_token="<s>"),
    # The files are like those of flan-t5, of which only tokenizer.json is published.
    "generic_t5": _generic("$A </s>", "$A </s> $B </s>"),
}
_OF_EVERY_RELEASE = {
    "bert",
    "electra",
    "roberta",
    "bart",
    "byt5",
    "generic",
    "generic_t5",
    "marian",
    "blenderbot",
}
