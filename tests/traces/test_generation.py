"""Test text that the model writes: it equals a loop of plain forward passes, and is what a pass predicts."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from tests.matrix import build_or_skip, cases, model_of, prompt_of
from tests.tiny_models import available, bridge, gpt2_like, hooked_transformer, llama_like, toy_tokenizer
from tests.traces.readers import PLAIN, reader, tokenizer_of
from tests.traces.test_trace import one_part

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = "The company was founded in Oslo."


def greedy(model, tokens, count, ends=()):
    """Return the most probable tokens, each from a plain forward pass over all tokens before it."""
    written = []
    for _ in range(count):
        with torch.no_grad():
            output = model(torch.cat([tokens, torch.tensor(written, dtype=torch.long)])[None])
        logits = output if torch.is_tensor(output) else output.logits
        best = int(logits[0, -1].argmax())
        if best in ends:
            break
        written.append(best)
    return written


def ends_of(model):
    generation = getattr(getattr(model, "original_model", None), "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    return [found] if isinstance(found, int) else list(found or [])


CAUSAL = [case for case in one_part(cases(refused=False)) if case.part is None and "bert" not in case.label]


@pytest.mark.parametrize(
    "case", [case for case in CAUSAL if case.label not in ("HookedEncoder",)], ids=lambda case: case.label
)
def test_what_is_written_is_the_loop_of_plain_passes(case):
    model = model_of(case, torch.float64)
    tokens = prompt_of(model)[0, :5]
    expected = greedy(model, tokens, 6, ends_of(model))
    try:
        t = lm.trace(model, tokens, generate=6, sources="token", method="attention")
    except lm.UnsupportedModelError as problem:
        # These releases do not write without a tokenizer, or the model is bidirectional.
        assert "needs a tokenizer" in str(problem) or "got an encoder" in str(problem), problem
        return
    except ValueError as problem:
        assert not expected, problem
        assert "only the end of the text" in str(problem)
        return
    assert t.reading.ids[len(tokens) :].tolist() == expected
    # What is written is the most probable token everywhere.
    for entry, number in zip(t.explained, t.log_probabilities.tolist(), strict=True):
        assert number == pytest.approx(torch.tensor(entry.probability).log().item(), abs=1e-5)
    again = lm.trace(model, tokens, answer=expected, sources="token", method="attention")
    assert torch.equal(again.log_probabilities, t.log_probabilities)
    assert torch.equal(again[:].scores, t[:].scores)


def test_a_bar_shows_how_much_is_written(capsys):
    model = reader()
    silent = lm.trace(model, PROMPT, generate=3, sources="token", method="attention", seed=1)
    assert not capsys.readouterr().err
    shown = lm.trace(model, PROMPT, generate=3, sources="token", method="attention", seed=1, progress=True)
    assert "3/3 [" in capsys.readouterr().err
    assert shown.provenance["generation"] == silent.provenance["generation"]
    hidden = {"generate": 3, "sources": "token", "method": "attention", "progress": None}
    lm.trace(model, PROMPT, **hidden)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_an_encoder_decoder_writes(name):
    model = build_or_skip(bridge, name, torch.float64)
    source = prompt_of(model)[0][0]
    try:
        t = lm.trace(model, source, generate=5, sources="token")
    except lm.UnsupportedModelError as problem:
        if name != "t5":
            raise
        pytest.skip(str(problem))
    target = [t.reading.prompt.target[0].item()]
    for written in t.reading.prompt.target[1:].tolist():
        with torch.no_grad():
            output = model(source[None], decoder_input=torch.tensor([target]))
        logits = output if torch.is_tensor(output) else output.logits
        assert int(logits[0, -1].argmax()) == written
        target.append(written)
    assert t.n_prompt == len(source) + 1


def test_a_text_is_written_after_the_text():
    model = reader()
    t = lm.trace(model, PROMPT, generate=9)
    tokens = model.to_tokens(PROMPT)[0]
    assert t.reading.ids.tolist() == [*tokens.tolist(), *greedy(model, tokens, 9)]
    assert t.text == model.tokenizer.decode(t.reading.ids[t.n_prompt :].tolist())
    assert t.provenance["generation"] == {"generate": 9, "seed": 0}
    assert "generation" not in lm.trace(model, PROMPT, answer=t.reading.ids[t.n_prompt :]).provenance
    chat = lm.trace(reader(template=PLAIN), [{"role": "user", "content": PROMPT}], generate=4)
    assert chat.reading.n_written == 4


# ------------------------------------------------------------------ draws


def test_draws_are_those_of_the_seed():
    model = reader()
    options = {"generate": 8, "do_sample": True, "temperature": 3.0, "method": "attention"}
    before = torch.random.get_rng_state()
    first, same, other = (lm.trace(model, PROMPT, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.text == same.text != other.text
    torch.manual_seed(99)
    assert lm.trace(model, PROMPT, seed=1, **options).text == first.text
    assert first.provenance["generation"] == {"generate": 8, "seed": 1, "do_sample": True, "temperature": 3.0}
    # A token that was drawn is not the most probable one everywhere.
    assert any(
        number < torch.tensor(entry.probability).log() - 0.1
        for number, entry in zip(first.log_probabilities.tolist(), first.explained, strict=True)
    )


@pytest.mark.parametrize("seed", [1.5, "1", -1, True, None])
def test_wrong_seeds(seed):
    with pytest.raises((TypeError, ValueError), match="seed: expected"):
        lm.trace(reader(), PROMPT, generate=2, seed=seed)


# ------------------------------------------------------------------ a cache that is wrong


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no Bridge here")
@pytest.mark.parametrize("options", [{}, {"verbose": False}, {"do_sample": True}])
def test_a_wrong_cache_is_not_used(options, monkeypatch):
    model = gpt2_like(torch.float64)
    tokens = torch.tensor([5, 9, 12, 7])
    expected = lm.trace(model, tokens, generate=6, sources="token", method="attention", **options)
    generate = type(model).generate

    @functools.wraps(generate)
    def lie(self, given, *, use_past_kv_cache=True, **kwargs):
        output = generate(self, given, use_past_kv_cache=use_past_kv_cache, **kwargs)
        if use_past_kv_cache:
            output[0, -1] = (output[0, -1] + 1) % 40 + 3
        return output

    monkeypatch.setattr(type(model), "generate", lie)
    t = lm.trace(model, tokens, generate=6, sources="token", method="attention", **options)
    assert torch.equal(t.reading.ids, expected.reading.ids)
    (note,) = t.notes
    assert note.startswith("generate: written without the cache, because with it token ")
    assert expected.notes == ()


def test_a_hooked_transformer_with_folded_norms():
    """Check TransformerLens 3.9, whose cache is wrong with LNPre."""
    model = build_or_skip(hooked_transformer, "LNPre", torch.float64, tokenizer=toy_tokenizer())
    tokens = torch.tensor([5, 9, 12, 7])
    if transformer_lens_version()[0] < 3:
        # Its `generate` adds no position embeddings, with the cache or without.
        with pytest.raises(
            lm.UnsupportedModelError, match=r"generate: expected model.generate to write what"
        ):
            lm.trace(model, tokens, generate=8, sources="token", method="attention")
        return
    t = lm.trace(model, tokens, generate=8, sources="token", method="attention")
    assert t.reading.ids[4:].tolist() == greedy(model, tokens, 8, [2])


def test_a_model_that_never_writes_what_it_predicts(monkeypatch):
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())

    @functools.wraps(type(model).generate)
    def generate(self, given, **options):
        return torch.tensor([[*given[0].tolist(), 3, 4]])

    monkeypatch.setattr(type(model), "generate", generate)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"generate: expected model.generate to write what a pass"
    ):
        lm.trace(model, torch.tensor([5, 9]), generate=2, sources="token")


# ------------------------------------------------------------------ ends


def test_the_end_of_the_text_is_not_written():
    model = llama_like(torch.float64, tokenizer=toy_tokenizer())
    tokens = next(
        given for given in torch.arange(3, 43).split(4) if len(set(greedy(model, given, 6)[:3])) == 3
    )
    free = lm.trace(model, tokens, generate=6, sources="token", stop_at_eos=False).reading.ids[4:].tolist()
    assert free == greedy(model, tokens, 6)
    index, end = 2, free[2]
    model.tokenizer.eos_token = f"w{end}"
    model.tokenizer.pad_token = f"w{end}"
    t = lm.trace(model, tokens, generate=6, sources="token")
    assert t.reading.ids[4:].tolist() == free[:index]
    kept = lm.trace(model, tokens, generate=6, sources="token", stop_at_eos=False)
    assert kept.reading.ids[4:].tolist() == free
    other = {"generate": 6, "sources": "token", "eos_token_id": [free[1], 4]}
    # The ends that are asked for replace those of the tokenizer.
    assert lm.trace(model, tokens, **other).reading.ids[4:].tolist() == free[:1]
    assert lm.trace(model, tokens, **other, stop_at_eos=False).reading.ids[4:].tolist() == free


def test_nothing_but_the_end_is_an_error():
    model = llama_like(torch.float64, tokenizer=toy_tokenizer())
    tokens = torch.tensor([5, 9, 12, 7])
    (first,) = greedy(model, tokens, 1)
    model.tokenizer.eos_token = f"w{first}"
    with pytest.raises(
        ValueError, match=r"generate: expected .* only the end of the text; change the prompt"
    ):
        lm.trace(model, tokens, generate=6, sources="token")


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no Bridge here")
def test_several_ends_of_a_configuration():
    model = bridge("gpt2", torch.float64)
    tokens = torch.tensor([5, 9, 12, 7])
    free = greedy(model, tokens, 6)
    index = next(index for index in range(1, 6) if free[index] not in free[:index])
    model.original_model.generation_config.eos_token_id = [48, free[index]]
    t = lm.trace(model, tokens, generate=6, sources="token")
    assert t.reading.ids[4:].tolist() == free[:index]


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("generate", [0, -1, 1.5, "3", True])
def test_wrong_numbers_of_tokens(generate):
    with pytest.raises((TypeError, ValueError), match="generate: expected"):
        lm.trace(reader(), PROMPT, generate=generate)


@pytest.mark.parametrize(
    "option", ["sentences", "max_new_tokens", "return_type", "input", "agregation", "output_logits"]
)
def test_options_that_generate_does_not_have(option):
    with pytest.raises(
        TypeError, match=rf"{option}: expected an argument of lm\.trace or an option of .* got {option}=3"
    ):
        lm.trace(reader(), PROMPT, generate=2, **{option: 3})


def test_options_need_a_generation():
    with pytest.raises(
        TypeError, match=r"trace: expected options of generate= only with it, got \['temperature'\]"
    ):
        lm.trace(reader(), PROMPT, answer=" Oslo", temperature=0.5)
    for given in ({}, {"answer": " Oslo", "generate": 3}):
        with pytest.raises(ValueError, match="answer, generate: expected"):
            lm.trace(reader(), PROMPT, **given)


@pytest.mark.parametrize("option", ["temperature", "top_k", "top_p"])
def test_options_of_draws_need_draws(option):
    with pytest.raises(ValueError, match=rf"{option}: expected do_sample=True with it"):
        lm.trace(reader(), PROMPT, generate=2, **{option: 1})
    assert lm.trace(reader(), PROMPT, generate=2, do_sample=True, **{option: 1}).reading.n_written == 2


def test_rounding_in_half_precision(monkeypatch):
    """Change the last token to one that is less probable by no more than bfloat16 rounds."""
    for seed in range(20):
        model = reader(dtype=torch.bfloat16, seed=seed)
        tokens = model.to_tokens(PROMPT)[0]
        with torch.no_grad():
            logits = model(torch.cat([tokens, torch.tensor(greedy(model, tokens, 3))])[None])[0, -1].float()
        (largest, other), (_, second) = (each.tolist() for each in logits.topk(2))
        if 1e-3 < largest - other < 0.1:
            break
    generate = type(model).generate

    @functools.wraps(generate)
    def round_otherwise(self, *given, **options):
        output = generate(self, *given, **options).clone()
        output[0, -1] = second
        return output

    monkeypatch.setattr(type(model), "generate", round_otherwise)
    t = lm.trace(model, tokens, generate=4, sources="token", method="attention")
    assert t.reading.ids[-1] == second
    assert t.notes == ()


# TransformerLens 2 masks every token in `generate` where the padding token is number 0, as in this tokenizer.
@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no Bridge here")
def test_what_users_can_not_change_gives_no_warning():
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        lm.trace(model, torch.tensor([5, 9]), generate=3, sources="token", method="attention")
    assert not [each for each in shown if "past_key_values" in str(each.message)]


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no Bridge here")
def test_more_tokens_than_the_model_has_room_for():
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())
    tokens = torch.arange(3, 30)
    t = lm.trace(model, tokens, generate=20, sources="token", stop_at_eos=False)
    assert len(t.tokens) == model.cfg.n_ctx < len(tokens) + 20
    count = model.cfg.n_ctx - len(tokens)
    assert t.notes == (f"generate: the text ends after {count} tokens, where the model's context ends",)


def test_a_model_that_cannot_generate():
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())

    def generate(given, **options):
        raise RuntimeError("no generation here")

    model.generate = generate
    with pytest.raises(
        lm.UnsupportedModelError, match=r"generate: expected .* RuntimeError: no generation here"
    ):
        lm.trace(model, torch.tensor([5, 9]), generate=2, sources="token")


def test_out_of_memory_stays_what_it_is():
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())

    def generate(given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.generate = generate
    with pytest.raises(torch.OutOfMemoryError):
        lm.trace(model, torch.tensor([5, 9]), generate=2, sources="token")


WRONG_OPTIONS = [
    ({"temperature": -1.0}, ValueError, "temperature: expected a finite number, 0 or more, got -1.0"),
    ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number"),
    ({"temperature": "hot"}, TypeError, "temperature: expected a finite number"),
    ({"top_p": 0}, ValueError, "top_p: expected a number above 0, at most 1, got 0"),
    ({"top_p": 1.5}, ValueError, "top_p: expected a number above 0, at most 1, got 1.5"),
    ({"top_k": 0}, ValueError, "top_k: expected a whole number, 1 or more, got 0"),
    ({"top_k": 2.5}, TypeError, "top_k: expected a whole number"),
    (
        {"freq_penalty": float("nan")},
        ValueError,
        "freq_penalty: expected a finite number, 0 or more, got nan",
    ),
    ({"freq_penalty": -1}, ValueError, "freq_penalty: expected a finite number, 0 or more"),
    ({"do_sample": "no"}, TypeError, "do_sample: expected True or False"),
    ({"eos_token_id": 10**6}, ValueError, "eos_token_id: expected a token from 0 to"),
    ({"eos_token_id": ["x"]}, TypeError, "eos_token_id: expected a token from 0 to"),
    ({"seed": 2**70}, ValueError, "seed: expected a whole number from 0 to 18446744073709551615"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG_OPTIONS)
def test_options_out_of_range(options, error, message):
    with pytest.raises(error, match=message):
        lm.trace(reader(), "The company", generate=1, **{"do_sample": True, **options})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_text_ends_where_the_context_ends(name):
    tokenizer = tokenizer_of()
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 12}
    model = build_or_skip(bridge, name, torch.float64, tokenizer=tokenizer, **size)
    t = lm.trace(model, "The company", generate=10**9, stop_at_eos=False)
    assert len(t.tokens) == 12
    assert any("where the model's context ends" in note for note in t.notes)
    if name == "gpt2":
        # Its positions are a table, while those of Llama are computed.
        with pytest.raises(ValueError, match=r"generate: expected a prompt that leaves room in the n_ctx=12"):
            lm.trace(model, torch.arange(12) + 3, generate=1, sources="token")


def test_paths_are_no_longer_than_what_was_written():
    t = lm.trace(reader(), "The company", answer=" has trains", method="attention")
    assert t.through(10**9).hops == t.reading.n_written
    torch.testing.assert_close(t.through(10**9).scores_of(0, 2), t.through().scores_of(0, 2))


@pytest.mark.parametrize(
    ("prompt", "answer", "name"),
    [
        ("a \ud800", " x", "prompt"),
        ("a", " \udfff", "answer"),
        (lm.Documents({"a": "b \ud800"}), " x", "prompt"),
        ([{"role": "user", "content": "b \ud800 c"}], "x", "prompt"),
    ],
)
def test_half_of_a_surrogate_pair(prompt, answer, name):
    model = reader(template=PLAIN if isinstance(prompt, list) else None)
    with pytest.raises(ValueError, match=f"{name}: expected text that UTF-8 can represent, got U.D[8F]"):
        lm.trace(model, prompt, answer=answer)
