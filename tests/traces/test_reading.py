"""Test how text becomes tokens: by the offsets of the tokenizer, for tokenizers of the usual kinds."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

import lens_mix as lm
from lens_mix.traces.reading import add_answer, read_prompt_alone, read_prompt_text
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, gpt2_like, toy_tokenizer
from tests.traces.readers import KINDS, PLAIN, reader, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

# Each of these has characters of several bytes; the tokenizers have no tokens for most of them.
TEXTS = (
    "The company was founded in Oslo.",
    " The café, naïve: 東京 and 😀👍🏽 GPUs.",
    "line one\n\n\tline two  with   spaces ",
    "e\u0301 is two characters, ﬁ is one; \u200b hidden",
    "Oslo",
)


@functools.cache
def reader_of(kind, has_bos=True):
    return reader(kind, has_bos)


def read(model, prompt, answer, prepend_bos=None):
    text = read_prompt_text(model, prompt)
    return add_answer(model, read_prompt_alone(model, prompt, text, prepend_bos), text, answer)


def is_subsequence(part, whole):
    rest = iter(whole)
    return all(any(one == other for other in rest) for one in part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_model_reads_the_tokenizers_tokens(kind, text):
    model = reader_of(kind)
    own = model.tokenizer(text + " On eight GPUs.", add_special_tokens=False)["input_ids"]
    alone = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if own[: len(alone)] != alone:
        # "  " and the space of the answer are one token.
        with pytest.raises(
            ValueError, match=r"answer: expected .* boundary between tokens.*begin the answer"
        ):
            read(model, text, " On eight GPUs.")
        return
    reading = read(model, text, " On eight GPUs.")
    assert reading.ids.tolist() == [model.tokenizer.bos_token_id, *own]
    assert reading.n_prompt == 1 + len(alone)
    assert reading.n_written == len(own) - len(alone)
    assert reading.written_text.text == " On eight GPUs."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_each_character_has_its_tokens(kind, text):
    model = reader_of(kind)
    placed = read(model, text, "." if text.endswith(" ") else "\nYes").prompt_text
    assert len(placed.offsets) == placed.first + len(model.to_tokens(text)[0])
    assert placed.offsets[0] == (0, 0)
    for index, character in enumerate(text):
        positions = placed.find_tokens(index, index + 1)
        assert bool(positions) == bool(character.strip()), (character, positions)
        # These tokens spell the character, whether each is a part of it or has more.
        decoded = model.tokenizer.decode(model.to_tokens(text)[0, positions].tolist())
        assert character.strip() in decoded, (character, decoded)
    # What has no character is not on a token: the whole text is on all tokens but <s> and white space.
    assert is_subsequence(placed.find_tokens(0, len(text)), range(1, len(placed.offsets)))


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_a_beginning(kind, has_bos):
    model = reader_of(kind, has_bos)
    own = model.tokenizer("Oslo has GPUs", add_special_tokens=False)["input_ids"]
    for prepend_bos in (True, False):
        read_by_model = model.to_tokens("Oslo has GPUs", prepend_bos=prepend_bos)[0].tolist()
        if read_by_model[len(read_by_model) - len(own) :] != own:
            # TransformerLens writes the beginning as text, and metaspace then adds no space after it.
            with pytest.raises(ValueError, match=r"expected the tokens of the tokenizer.*as tokens"):
                read(model, "Oslo has GPUs", " On", prepend_bos)
            continue
        reading = read(model, "Oslo has GPUs", " On", prepend_bos)
        assert reading.ids[: reading.n_prompt].tolist() == read_by_model
        assert reading.prompt_text.find_tokens(0, 4)[0] == len(read_by_model) - len(own)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_read_after_the_prompt(kind):
    model = reader_of(kind)
    with pytest.raises(ValueError, match=r"answer: expected .*'Oslo' after ' founded in ', which merge"):
        lm.trace(model, "The company was founded in ", answer="Oslo")
    with pytest.raises(ValueError, match=r"answer: expected .*'unded in Oslo' after .*, which merge"):
        lm.trace(model, "The company was fo", answer="unded in Oslo")
    for empty in ("",):
        with pytest.raises(ValueError, match="answer: expected text of at least one token, got ''"):
            lm.trace(model, "The company was", answer=empty)
    assert lm.trace(model, "The company was", answer=" ").text == " "


@pytest.mark.parametrize("kind", KINDS)
def test_an_emoji_is_one_span_of_all_its_tokens(kind):
    """Check that text and its tokens, which the tokenizer encodes in the same way, have the same spans."""
    model = reader_of(kind)
    prompt, answer = "The company has", " 😀 and 東京. Yes é!"
    by_text = lm.trace(model, prompt, answer=answer)
    written = by_text.reading.ids[by_text.n_prompt :]
    by_tokens = lm.trace(model, prompt, answer=written)
    assert by_tokens.text == by_text.text == answer
    for part in ("😀", "東", "東京", "é", "京. Yes", answer):
        assert by_text[part].positions == by_tokens[part].positions, part
        assert part.strip() in by_text[part].text
    assert len(by_text["😀"].positions) >= 4
    assert [span.text for span in by_tokens.spans] == [span.text for span in by_text.spans]
    assert [each.positions for each in by_tokens.sources()] == [each.positions for each in by_text.sources()]


@pytest.mark.parametrize("kind", KINDS)
def test_written_tokens_may_differ_from_those_of_their_text(kind):
    model = reader_of(kind)
    letters = [model.tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in "Oslo"]
    t = lm.trace(model, "The company is in Norway.", answer=letters)
    assert t.reading.ids[t.n_prompt :].tolist() == letters
    assert model.tokenizer("Oslo", add_special_tokens=False)["input_ids"] != letters
    assert t.text.strip() == "Oslo"
    assert list(t["sl"].positions) == [t.n_prompt + 1, t.n_prompt + 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_ends_too_early(kind):
    model = reader_of(kind)
    first = model.tokenizer(" 😀", add_special_tokens=False)["input_ids"][-4:]
    point = model.tokenizer("a.", add_special_tokens=False)["input_ids"][-1]
    for answer, count in (([*first[:2], point], 3), ([point, first[0]], 2), ([first[0]], 1)):
        t = lm.trace(model, "The company", answer=answer)
        assert len(t.tokens) - t.n_prompt == count
        # No token of a sentence is lost.
        assert [each for span in t.spans for each in span.positions] == list(t[:].positions)
        assert "\ufffd" in t.text


def test_tokens_have_no_text(model):
    t = lm.trace(model, torch.tensor([3, 4, 5]), answer=[6, 7], sources="token")
    assert t.text == "w6w7"
    assert [span.positions for span in t.spans] == [range(3, 5)]
    with pytest.raises(ValueError, match="span: expected the numbers of written tokens"):
        t["w6"]
    with pytest.raises(ValueError, match="answer: expected tokens, because the prompt was given as tokens"):
        lm.trace(model, torch.tensor([3, 4]), answer="w5", sources="token")
    for unit in ("sentence", "message", "document"):
        with pytest.raises(ValueError, match="sources: expected 'token', 'word' or groups of positions"):
            lm.trace(model, torch.tensor([3, 4]), answer=[5], sources=unit)
        with pytest.raises(ValueError, match="sources: expected 'token', 'word' or groups of positions"):
            t.by(unit)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ([99], ValueError, r"answer: expected tokens in 0\.\.49, got"),
        ([-1], ValueError, r"answer: expected tokens in 0\.\.49, got"),
        ([], ValueError, r"answer: expected at least one token \[pos\], got shape \[0\]"),
        ([1.5], TypeError, "answer: expected text or tokens"),
        ([True], TypeError, "answer: expected text or tokens"),
        ({}, TypeError, "answer: expected text or tokens"),
        (b"w3", ValueError, "answer: expected tokens, because the prompt was given as tokens, got text"),
        (["w3"], TypeError, "answer: expected text or tokens"),
        (3, ValueError, r"answer: expected at least one token \[pos\], got shape \[\]"),
        (torch.tensor([[3], [4]]), ValueError, r"got shape \[2, 1\]"),
        (torch.tensor([3]).to_sparse(), TypeError, "answer: expected text or tokens"),
        ([4] * 40, ValueError, "expected at most n_ctx=32 tokens, got 43"),
    ],
)
def test_wrong_answers(model, answer, error, message):
    if "n_ctx" in message and not hasattr(model, "original_model"):
        message = message.replace("prompt", "")
    with pytest.raises(error, match=message):
        lm.trace(model, torch.tensor([3, 4, 5]), answer=answer, sources="token")


def test_answers_as_tokens_in_any_form(model):
    expected = lm.trace(model, [3, 4, 5], answer=[6, 7], sources="token")[:].scores
    for answer in (torch.tensor([6, 7]), torch.tensor([[6, 7]]), (6, 7), torch.tensor([6, 7]).int()):
        found = lm.trace(model, torch.tensor([[3, 4, 5]]), answer=answer, sources="token")
        assert torch.equal(found[:].scores, expected)
    encoding = {"input_ids": torch.tensor([[0, 3, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert torch.equal(lm.trace(model, encoding, answer=[6, 7], sources="token")[:].scores, expected)


def test_a_slow_tokenizer_has_no_offsets():
    class Slow(transformers.PreTrainedTokenizer):
        vocab_size = 50

        def get_vocab(self):
            return {f"w{number}": number for number in range(50)}

        def _tokenize(self, text):
            return text.split()

        def _convert_token_to_id(self, token):
            return int(token[1:] or 2)

        def _convert_id_to_token(self, index):
            return f"w{index}"

    model = gpt2_like(tokenizer=toy_tokenizer())
    model.tokenizer = Slow(
        bos_token="w1",
        eos_token="w2",
        pad_token="w0",
        unk_token="w2",
        name_or_path="slow",
        add_bos_token=True,
    )
    with pytest.raises(
        ValueError, match=r"expected a fast tokenizer, .* got Slow; give the prompt and the ans"
    ):
        lm.trace(model, "w3 w4", answer=" w5")
    assert lm.trace(model, [3, 4], answer=[5], sources="token").tokens == ["w3", "w4", "w5"]


def test_text_needs_a_tokenizer():
    for prompt in ("w3 w4", [{"role": "user", "content": "w3"}], lm.Documents({"a": "w3"})):
        with pytest.raises(ValueError, match="prompt: expected tokens, because the model has no tokenizer"):
            lm.trace(gpt2_like(), prompt, answer="w4")


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_of_an_encoder_decoder(kind):
    tokenizer = tokenizer_of(kind)
    model = build_or_skip(
        bridge,
        "bart",
        torch.float64,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_position_embeddings=99,
    )
    text, answer = "The company was founded in Oslo. It has 😀 GPUs.", "On eight GPUs. Yes 😀."
    t = lm.trace(model, text, answer=answer)
    assert [(each.text, each.kind) for each in t.sources() if each.is_content] == [
        ("The company was founded in Oslo.", "source"),
        ("It has 😀 GPUs.", "source"),
    ]
    assert [span.text.strip() for span in t.spans] == ["On eight GPUs.", "Yes 😀."]
    assert t["Yes 😀"].text.strip() == "Yes 😀"
    assert sorted(each for source in t.sources() for each in source.positions) == list(range(len(t.tokens)))
    written = t.reading.prompt.target
    assert t.reading.n_source + len(written) == len(t.tokens)
    for losses in (t.verify(2), t["eight GPUs"].verify(2)):
        assert all(each.loss is not None for each in losses)
    with pytest.raises(ValueError, match=r"answer: expected tokens in 0\.\.\d+, got"):
        lm.trace(model, text, answer=[1, 9999])
    with pytest.raises(ValueError, match="answer: expected text of at least one token"):
        lm.trace(model, text, answer="")


def test_messages_and_documents_end_where_the_answer_begins():
    model = reader(template=PLAIN)
    t = lm.trace(model, [{"role": "user", "content": "Where? In Oslo"}], answer="In Oslo.")
    assert t["Oslo"].text == " Oslo"
    assert t.tokens[: t.n_prompt][-1] == "\n"
    assert t.tokens.count("<s>") == 0
    ended = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In"}]
    with pytest.raises(ValueError, match=r"prompt: expected messages that end before .* as answer="):
        lm.trace(model, ended, answer=" Oslo.")
