"""Test kinds of prompts: pairs of strings, what tokenizers return, chat messages."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import lens_mix as lm
from tests.demos.tiny_folder import save_tiny_bert
from tests.tiny_models import available, bridge, gpt2_like, hooked_encoder, toy_tokenizer

PAIR = ("a b c", "d e")
CHAT = "{% for m in messages %}w3 {{ m.content }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"


@pytest.fixture(scope="module")
def bert_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module", params=[bridge, hooked_encoder])
def bert(request, bert_tokenizer):
    arguments = ("bert",) if request.param is bridge else ()
    if not available(request.param, *arguments):
        pytest.skip("not in this TransformerLens")
    size = {"vocab_size" if arguments else "d_vocab": len(bert_tokenizer)}
    return request.param(*arguments, tokenizer=bert_tokenizer, **size)


def test_a_pair_of_strings(bert):
    found = lm.run(bert, PAIR, "attention")
    assert found.tokens == ["[CLS]", "a", "b", "c", "[SEP]", "d", "e", "[SEP]"]
    types = [0, 0, 0, 0, 0, 1, 1, 1]
    assert found.provenance["inputs"] == {"token_type_ids": types}
    assert found.provenance["prompt"] == list(PAIR)
    ids = torch.tensor(found.provenance["token_ids"])
    same = lm.run(bert, ids, "attention", token_type_ids=torch.tensor(types))
    assert torch.equal(found.scores, same.scores)
    assert not torch.equal(found.scores, lm.run(bert, ids, "attention").scores)
    assert torch.equal(lm.run_again(bert, found).scores, found.scores)
    with pytest.raises(ValueError, match="prepend_bos: expected None for a pair"):
        lm.run(bert, PAIR, "attention", prepend_bos=True)


def test_pairs_among_many(bert):
    maps = list(lm.run_many(bert, [PAIR, ("f", "g h i")], "attention"))
    assert torch.allclose(maps[1].scores, lm.run(bert, ("f", "g h i"), "attention").scores, atol=1e-6)


def test_what_a_tokenizer_returns(bert):
    one = lm.run(bert, PAIR, "attention")
    for options in ({}, {"return_tensors": "pt"}, {"return_offsets_mapping": True}):
        assert torch.equal(lm.run(bert, bert.tokenizer(*PAIR, **options), "attention").scores, one.scores)
    padded = bert.tokenizer(*PAIR, padding="max_length", max_length=12, return_tensors="pt")
    assert torch.equal(lm.run(bert, padded, "attention").scores, one.scores)
    several = bert.tokenizer([PAIR, ("f", "g")], padding=True)
    maps = list(lm.run_many(bert, several, "attention"))
    assert maps[0].tokens == one.tokens
    assert torch.allclose(maps[0].scores, one.scores, atol=1e-6)
    assert maps[1].tokens == ["[CLS]", "f", "[SEP]", "g", "[SEP]"]
    with pytest.raises(ValueError, match=r"one length \(padding=True\)"):
        list(lm.run_many(bert, bert.tokenizer([PAIR, ("f", "g")]), "attention"))
    with pytest.raises(ValueError, match="for a batch use run_many"):
        lm.run(bert, several, "attention")
    with pytest.raises(TypeError, match=r"a tokenizer returns \(with input_ids\), got .*'text'"):
        lm.run(bert, {"text": "a b"}, "attention")


def test_token_types_of_zeros_are_no_input(model):
    encoded = {"input_ids": torch.tensor([[5, 6]]), "token_type_ids": torch.tensor([[0, 0]])}
    assert lm.run(model, encoded, "attention").provenance["token_ids"] == [5, 6]


def test_a_pair_is_refused_by_a_decoder(model):
    with pytest.raises(ValueError, match=r"pair of strings for encoders .* is neither; .*run_many"):
        lm.run(model, ("w5 w6", "w7"), "attention")


def test_chat_messages():
    model = gpt2_like(tokenizer=toy_tokenizer())
    messages = [{"role": "user", "content": "w7 w8"}]
    with pytest.raises(ValueError, match=r"with a chat template .*; set model.tokenizer.chat_template"):
        lm.run(model, messages, "attention")
    model.tokenizer.chat_template = CHAT
    found = lm.run(model, messages, "attention")
    assert found.provenance["token_ids"] == [3, 7, 8, 4, 5]
    assert found.provenance["prompt"] == messages
    # Two messages are not a pair, and no answer begins after a message of the assistant.
    answered = [*messages, {"role": "assistant", "content": "w9"}]
    assert lm.run(model, answered, "attention").provenance["token_ids"] == [3, 7, 8, 4, 3, 9, 4]
    for wrong in ({"text": "w7"}, {"name": "w7"}, {}):
        with pytest.raises(ValueError, match='messages with "role" and "content"'):
            lm.run(model, [{"role": "user", **wrong}], "attention")
    maps = list(lm.run_many(model, [messages, answered], "attention"))
    assert [len(each.tokens) for each in maps] == [5, 7]


@pytest.mark.once
def test_text_of_any_library_is_the_same_prompt():
    model = gpt2_like(torch.float32, tokenizer=toy_tokenizer())
    expected = lm.run(model, "w3 w4", "attention")
    same = [b"w3 w4", b"\xef\xbb\xbfw3 w4", "w3 w4".encode("utf-16"), bytearray(b"w3 w4"), np.str_("w3 w4")]
    same += [np.bytes_(b"w3 w4"), np.array("w3 w4"), pa.scalar("w3 w4"), pa.scalar(b"w3 w4")]
    for prompt in same:
        found = lm.run(model, prompt, "attention")
        assert found.tokens == expected.tokens
        assert torch.equal(found.scores, expected.scores)
        assert found.provenance["prompt"] == "w3 w4"
    for prompts in (io.StringIO("w3 w4\r\n\nw3 w4"), io.BytesIO(b"w3 w4\rw3 w4"), pd.Series(["w3 w4"] * 2)):
        assert [found.tokens for found in lm.run_many(model, prompts, "attention")] == [expected.tokens] * 2
    traces = [lm.trace(model, prompt, answer=b" w5", sources="word") for prompt in (b"w3 w4", "w3 w4")]
    assert traces[0].tokens == traces[1].tokens
    (many,) = lm.trace_many(model, io.StringIO("w3 w4\n"), answers=[" w5"], sources="word")
    assert many.tokens == traces[0].tokens


@pytest.mark.once
def test_what_is_not_a_prompt_is_an_error():
    model = gpt2_like(torch.float32, tokenizer=toy_tokenizer())
    frame = pd.DataFrame({"text": ["w3 w4"]})
    for prompt, message in (
        (Path("a.txt"), r"prompt: expected a string .*, got \w+Path; give the text of the file"),
        (frame, "prompt: expected a string .*, got DataFrame; give one text of a column"),
        (frame["text"], "prompt: expected a string .*, got Series"),
        (pd.NA, "prompt: expected a string .*, got NAType"),
        (None, "prompt: expected a string .*, got NoneType"),
        (float("nan"), "prompt: expected a string .*, got float"),
        ({"w3"}, "prompt: expected a string .*, got set"),
    ):
        for call in (
            lambda prompt: lm.run(model, prompt, "attention"),
            lambda prompt: list(lm.run_many(model, [prompt], "attention")),
            lambda prompt: lm.trace(model, prompt, answer=[3]),
        ):
            with pytest.raises(TypeError, match=message):
                call(prompt)
    for prompt in (b"\xff", "w3 \ud800"):
        with pytest.raises(ValueError, match="prompt: expected text"):
            lm.run(model, prompt, "attention")
        with pytest.raises(ValueError, match="prompt 0: prompt: expected text"):
            list(lm.run_many(model, [prompt], "attention"))
    for many in (lm.run_many, lm.trace_many):
        with pytest.raises(TypeError, match="got DataFrame; give one of its columns"):
            many(model, frame, "attention") if many is lm.run_many else many(model, frame)
