"""Test that strings become the tokens of the model's own tokenizer, for every family of tokenizers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from tests.family_tokenizers import family_tokenizer
from tests.tiny_models import (
    available,
    bridge,
    gpt2_like,
    hooked_encoder,
    hooked_encoder_decoder,
    toy_tokenizer,
)

pytestmark = pytest.mark.filterwarnings("ignore")

# Each family of tokenizers has an architecture that reads its tokens here.
ENCODERS = {
    "bert": "bert",
    "electra": "bert",
    "deberta_v2": "bert",
    "albert": "bert",
    "roberta": "roberta",
    "xlm_roberta": "roberta",
    "camembert": "roberta",
    "deberta": "roberta",
    "generic": "bert",
}
ENCODER_DECODERS = {
    "t5": "t5",
    "byt5": "t5",
    "bart": "bart",
    "generic": "bart",
    "generic_t5": "pegasus",
    "pegasus": "pegasus",
    "mbart": "mbart",
    "mbart50": "mbart",
    "nllb": "m2m100",
    "marian": "marian",
    "blenderbot": "blenderbot",
}
TEXT, OTHER = "a b c", "d e"


def build(family, architecture, folder, by_name=False):
    """Return the tokenizer that transformers loads, and a model with the tokenizer.

    Args:
        by_name: Whether the model's tokenizer is the one that
            `TransformerBridge.boot_transformers(folder)` loads.
    """
    if not available(bridge, architecture):
        pytest.skip(f"no Bridge for {architecture} in this TransformerLens")
    if architecture == "t5" and transformer_lens_version()[0] < 4:
        pytest.skip("a T5 under a Bridge of TransformerLens 3 is refused")
    tokenizer = family_tokenizer(family, folder)
    if tokenizer is None:
        pytest.skip(f"{family} is not built from a list in this transformers")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"decoder_vocab_size": len(tokenizer)} if architecture == "marian" else {}
    model = bridge(architecture, tokenizer=tokenizer, vocab_size=len(tokenizer), **special, **size)
    if by_name:
        model.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, add_bos_token=True)
    return family_tokenizer(family, folder), model


def read(mixing_map):
    return mixing_map.provenance["token_ids"]


LOADED = pytest.mark.parametrize("by_name", [False, True], ids=["given", "by name"])


@LOADED
@pytest.mark.parametrize("family", ENCODERS)
def test_strings_and_pairs_of_encoders(family, by_name, tmp_path):
    tokenizer, model = build(family, ENCODERS[family], tmp_path, by_name)
    for text in (TEXT, OTHER, ""):
        assert read(lm.run(model, text, "attention")) == tokenizer(text)["input_ids"]
    pair = tokenizer(TEXT, OTHER, return_token_type_ids=True)
    found = lm.run(model, (TEXT, OTHER), "attention")
    assert read(found) == pair["input_ids"]
    types = found.provenance.get("inputs", {}).get("token_type_ids", [0] * len(pair["input_ids"]))
    assert types == tokenizer(TEXT, OTHER).get("token_type_ids", types)
    several = [TEXT, (OTHER, TEXT), OTHER]
    expected = [tokenizer(TEXT), tokenizer(OTHER, TEXT), tokenizer(OTHER)]
    maps = list(lm.run_many(model, several, "attention"))
    assert list(map(read, maps)) == [each["input_ids"] for each in expected]
    torch.testing.assert_close(maps[2].scores, lm.run(model, OTHER, "attention").scores, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"prepend_bos: expected None for .* adds special tokens.*give"):
        lm.run(model, TEXT, "attention", prepend_bos=True)


def decoder_input(model, tokenizer, text):
    """Return the decoder's input that transformers makes of labels in training, without the end."""
    wrapped, config = model.original_model, model.original_model.config
    labels = tokenizer(text_target=text)["input_ids"]
    if tokenizer.eos_token_id not in labels:
        labels = [*labels, tokenizer.eos_token_id]
    labels = torch.tensor([labels])
    if hasattr(wrapped, "_shift_right"):
        shifted = wrapped._shift_right(labels)
    else:
        shift = sys.modules[type(wrapped).__module__].shift_tokens_right
        start = () if "mbart" in type(wrapped).__module__ else (config.decoder_start_token_id,)
        shifted = shift(labels, config.pad_token_id, *start)
    ids = shifted[0].tolist()
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


@LOADED
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_sources_and_targets_of_encoder_decoders(family, by_name, tmp_path):
    if family == "marian":
        pytest.importorskip("sentencepiece")
    tokenizer, model = build(family, ENCODER_DECODERS[family], tmp_path, by_name)
    given = {"target_token_ids": decoder_input(model, tokenizer, OTHER)}
    sources = [TEXT, tokenizer(TEXT), tokenizer(TEXT)["input_ids"]]
    sources += [tokenizer(TEXT, padding="max_length", max_length=14, return_tensors="pt")]
    for source in sources:
        found = lm.run(model, (source, OTHER), "attention")
        assert read(found) == tokenizer(TEXT)["input_ids"]
        assert found.provenance | given == found.provenance
    assert read(lm.run(model, OTHER, "attention")) == tokenizer(OTHER)["input_ids"]
    maps = list(lm.run_many(model, [(TEXT, OTHER), (OTHER, "a b c d")], "attention"))
    assert [read(one) for one in maps] == [tokenizer(one)["input_ids"] for one in (TEXT, OTHER)]
    targets = [decoder_input(model, tokenizer, one) for one in (OTHER, "a b c d")]
    assert [one.provenance["target_token_ids"] for one in maps] == targets
    # Afterwards the tokenizer reads sources again.
    assert model.tokenizer.convert_ids_to_tokens(read(lm.run(model, TEXT, "attention"))) == (
        tokenizer.convert_ids_to_tokens(tokenizer(TEXT)["input_ids"])
    )
    empty = lm.run(model, (TEXT, ""), "attention").provenance["target_token_ids"]
    assert empty == decoder_input(model, tokenizer, "")
    with pytest.raises(ValueError, match=r"prepend_bos: expected None for .* adds special tokens"):
        lm.run(model, (TEXT, OTHER), "attention", prepend_bos=False)


def test_a_source_of_two_texts(tmp_path):
    tokenizer, model = build("bart", "bart", tmp_path)
    found = lm.run(model, ((TEXT, OTHER), OTHER), "attention")
    assert read(found) == tokenizer(TEXT, OTHER)["input_ids"]
    assert found.provenance["target_token_ids"] == decoder_input(model, tokenizer, OTHER)


def test_an_end_that_the_user_writes_is_read(tmp_path):
    _, model = build("t5", "t5", tmp_path)
    found = lm.run(model, (TEXT, "d e </s>"), "attention").provenance["target_token_ids"]
    assert found == [0, *model.tokenizer("d e")["input_ids"]]


def test_the_text_of_a_target_is_spelled_as_targets_are(tmp_path):
    """Use Marian, for which `d` is one token of a source and two tokens of a target."""
    pytest.importorskip("sentencepiece")
    tokenizer, model = build("marian", "marian", tmp_path)
    assert len(tokenizer("d", add_special_tokens=False)["input_ids"]) == 1
    assert len(tokenizer(text_target="d", add_special_tokens=False)["input_ids"]) == 2
    method = lm.methods.InputGradients(target=lm.targets.token("d"))
    with pytest.raises(ValueError, match="'d', which is 2 tokens"):
        lm.run(model, (TEXT, "e f"), method, part="decoder")


def test_what_transformer_lens_made_of_the_tokenizer_is_noted(tmp_path):
    tokenizer, model = build("generic", "bert", tmp_path)
    found = lm.run(model, TEXT, "attention")
    was_replaced = model.tokenizer(TEXT)["input_ids"] != tokenizer(TEXT)["input_ids"]
    assert any("add_bos_token=True" in note for note in found.notes) is was_replaced
    before = model.tokenizer(TEXT, OTHER)["input_ids"]
    lm.run(model, (TEXT, OTHER), "attention")
    assert model.tokenizer(TEXT, OTHER)["input_ids"] == before


def test_files_that_cannot_be_compared_are_noted(tmp_path):
    """Delete the folder first, so that nobody knows whether special tokens were replaced."""
    tokenizer, model = build("generic", "bert", tmp_path / "files", by_name=True)
    (tmp_path / "files").rename(tmp_path / "elsewhere")
    found = lm.run(model, TEXT, "attention")
    assert read(found) == model.tokenizer(TEXT)["input_ids"]
    may_be_others = read(found) != tokenizer(TEXT)["input_ids"]
    assert any("files" in note and "can't be read" in note for note in found.notes) is may_be_others
    assert not lm.run(model, tokenizer(TEXT), "attention").notes


@pytest.mark.parametrize("family", ["bert", "generic"])
def test_a_hooked_encoder(family, tmp_path):
    if not available(hooked_encoder):
        pytest.skip("no HookedEncoder in this TransformerLens")
    tokenizer = family_tokenizer(family, tmp_path)
    model = hooked_encoder(tokenizer=tokenizer, d_vocab=len(tokenizer))
    assert read(lm.run(model, TEXT, "attention")) == tokenizer(TEXT)["input_ids"]
    assert read(lm.run(model, (TEXT, OTHER), "attention")) == tokenizer(TEXT, OTHER)["input_ids"]
    maps = lm.run_many(model, [TEXT, (TEXT, OTHER)], "attention")
    assert [len(each.tokens) for each in maps] == [
        len(tokenizer(TEXT).input_ids),
        len(tokenizer(TEXT, OTHER).input_ids),
    ]


@pytest.mark.parametrize("family", ["t5", "byt5", "generic"])
def test_a_hooked_encoder_decoder(family, tmp_path):
    if not available(hooked_encoder_decoder):
        pytest.skip("no HookedEncoderDecoder in this TransformerLens")
    tokenizer = family_tokenizer(family, tmp_path)
    if tokenizer is None:
        pytest.skip(f"{family} is not built from a list in this transformers")
    model = hooked_encoder_decoder(tokenizer=tokenizer, d_vocab=len(tokenizer))
    found = lm.run(model, (TEXT, OTHER), "attention").provenance
    assert found["token_ids"] == tokenizer(TEXT)["input_ids"]
    assert found["target_token_ids"] == [0, *tokenizer(OTHER)["input_ids"][:-1]]


def test_causal_decoders_keep_the_habit_and_note_it():
    tokenizer = toy_tokenizer()
    # In transformers 5 the toy tokenizer adds BOS itself.
    tokenizer.add_bos_token = False
    model = gpt2_like()
    model.tokenizer, model.cfg.tokenizer_prepends_bos = tokenizer, False
    found = lm.run(model, "w5 w6", "attention")
    assert read(found) == [1, 5, 6]
    assert tokenizer("w5 w6")["input_ids"] == [5, 6]
    [note] = found.notes
    assert "3 tokens ('<bos>' 'w5' 'w6')" in note
    assert "2 tokens ('w5' 'w6') (use prepend_bos=False for those)" in note
    assert note.startswith("prepend_bos: ")
    assert not lm.run(model, "w5 w6", "attention", prepend_bos=False).notes
    assert not lm.run(model, [1, 5, 6], "attention").notes
    twice = lm.run(model, "<bos> w5 w6", "attention")
    assert read(twice) == [1, 1, 5, 6]
    assert any("begins with <bos> twice" in note for note in twice.notes)
    assert not lm.run(model, [1, 1, 5], "attention").notes


def test_a_tokenizer_that_adds_a_start_needs_no_note_on_a_choice():
    tokenizer = toy_tokenizer()
    tokenizer.add_bos_token = True
    model = gpt2_like()
    model.tokenizer, model.cfg.tokenizer_prepends_bos = tokenizer, True
    own = tokenizer("w5 w6")["input_ids"]
    if own != [1, 5, 6]:
        pytest.skip("this tokenizer adds no start")
    for chosen in (None, True, False):
        assert not lm.run(model, "w5 w6", "attention", prepend_bos=chosen).notes


def test_a_target_without_a_language_says_so(tmp_path):
    _, model = build("mbart", "mbart", tmp_path)
    assert not lm.run(model, (TEXT, OTHER), "attention").notes
    model.tokenizer.tgt_lang = None
    [note] = lm.run(model, (TEXT, OTHER), "attention").notes
    assert "tgt_lang is None" in note
    assert model.tokenizer.tgt_lang is None


def test_a_tokenizer_that_fails_on_a_target_reads_sources_again(tmp_path):
    _, model = build("mbart", "mbart", tmp_path)
    model.tokenizer.tgt_lang = ["no language"]
    with pytest.raises(ValueError, match=r"target: model.tokenizer\(text_target=...\) raises .*; give the"):
        lm.run(model, (TEXT, OTHER), "attention")
    assert model.tokenizer.convert_ids_to_tokens(read(lm.run(model, TEXT, "attention")))[-1] == "en_XX"


def test_numpy_arrays():
    model = gpt2_like()
    expected = lm.run(model, [3, 4, 5], "attention").scores
    for dtype in ("int64", "int32", "uint8", "uint16", "uint64", ">i4"):
        array = np.array([3, 4, 5], dtype=dtype)
        for prompt in (array, array[None], np.array([5, 4, 3], dtype=dtype)[::-1], list(array)):
            assert torch.equal(lm.run(model, prompt, "attention").scores, expected)
        for prompts in ([array, array], np.stack([array, array]), (array for _ in range(2))):
            both = [each.scores for each in lm.run_many(model, prompts, "attention")]
            torch.testing.assert_close(both, [expected, expected], atol=1e-6, rtol=0)
    masked = lm.run(model, np.array([3, 4, 5, 0]), "attention", attention_mask=np.array([1, 1, 1, 0]))
    assert torch.equal(masked.scores, expected)
    for wrong, message in (
        (np.array([3.0, 4.0]), "expected integer tokens"),
        (np.array([True, False]), "expected integer tokens"),
        (np.array(["a", "b"]), "expected an array of whole numbers"),
    ):
        with pytest.raises(TypeError, match=message):
            lm.run(model, wrong, "attention")
    with pytest.raises(ValueError, match=r"below 2\*\*63"):
        lm.run(model, np.array([2**64 - 1], dtype="uint64"), "attention")
    with pytest.raises(ValueError, match=r"got shape \[2, 2\]; for a batch use run_many"):
        lm.run(model, np.array([[3, 4], [5, 6]]), "attention")
    model = encoder_decoder()
    pair = np.array([3, 4, 5]), np.array([[2, 6]])
    expected = lm.run(model, ([3, 4, 5], [2, 6]), "attention")
    assert lm.run(model, pair, "attention").provenance["target_token_ids"] == [2, 6]
    assert torch.equal(lm.run(model, pair, "attention").scores, expected.scores)


@pytest.mark.parametrize("empty", [[], np.array([]), torch.tensor([]), {"input_ids": []}])
def test_no_tokens(empty):
    for call in (lm.run, lambda *asked: list(lm.run_many(asked[0], [empty], asked[2]))):
        with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
            call(gpt2_like(), empty, "attention")


def test_a_string_of_no_tokens(tmp_path):
    """Use tokenizers like Blenderbot's, which add no special tokens to a text."""
    _, model = build("blenderbot", "blenderbot", tmp_path)
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
        lm.run(model, ("", TEXT), "attention")


def encoder_decoder():
    return bridge("bart") if available(bridge, "bart") else hooked_encoder_decoder()


def test_a_prompt_beyond_the_context_length_says_so():
    if not available(bridge, "llama"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model = bridge("llama", max_position_embeddings=8)
    assert not lm.run(model, list(range(3, 11)), "attention").notes
    [note] = lm.run(model, list(range(3, 12)), "attention").notes
    assert note.startswith(
        "prompt: 9 tokens are more than the context length that the model was trained with, 8"
    )
    short, long = lm.run_many(model, [[3, 4, 5], list(range(3, 12))], ["attention", "value_zeroing"])
    assert not any(each.notes for each in short.values())
    assert all("context length" in each.notes[0] for each in long.values())
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    wider = bridge("llama", max_position_embeddings=8, rope_parameters={**scaled, "rope_theta": 10000.0})
    assert not lm.run(wider, list(range(3, 12)), "attention").notes
    t5 = bridge("t5", n_positions=8) if available(bridge, "t5") else None
    if t5 is not None and transformer_lens_version()[0] > 3:
        [note] = lm.run(t5, ([3, 4], list(range(3, 12))), "attention").notes
        assert note.startswith("target: 9 tokens")


@pytest.mark.parametrize("name", ["pixel_values", "input_features", "inputs_embeds"])
def test_pictures_are_refused_by_name(name):
    with pytest.raises(
        ValueError, match=rf"{name}: expected text alone .*\[1, 3, 4, 4\]; the model takes no such"
    ):
        lm.run(gpt2_like(), {"input_ids": [3, 4], name: torch.zeros(1, 3, 4, 4)}, "attention")


def test_labels_are_no_target(tmp_path):
    """Give `tokenizer(source, text_target=target)`, which has labels. The map would be of the start token."""
    tokenizer, model = build("bart", "bart", tmp_path)
    for target in (TEXT, OTHER):
        encoding = tokenizer(TEXT, text_target=target)
        with pytest.raises(ValueError, match=r"labels: expected a target that the decoder reads"):
            lm.run(model, encoding, "attention")
        found = lm.run(model, (encoding, target), "attention").provenance
        assert found["target_token_ids"] == decoder_input(model, tokenizer, target)
        assert "inputs" not in found


def test_what_cannot_be_a_target():
    labels = {"input_ids": [3, 4, 2]}
    with pytest.raises(TypeError, match=r"target: expected a string or .* tokens, got dict \(labels"):
        lm.run(encoder_decoder(), ([3, 4], labels), "attention")
