"""Test prompts, maps and traces of Whisper, beside transformers alone."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._inputs.speech import make_model_input
from lens_mix.session import Session
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, speech_extractor, speech_tokenizer, wrapped_model
from tests.view.page.test_page import Reader

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "w10 w20 w30"
# The start, the language, the task and "no times".
FIRST = [1, 3, 4, 5]
WINDOW, FRAME = 2880, 320


@pytest.fixture(scope="module")
def model():
    built = build_or_skip(bridge, "whisper", torch.float64)
    built.tokenizer, built.processor = speech_tokenizer(), speech_extractor()
    return built


@pytest.fixture(scope="module")
def plain():
    return wrapped_model("whisper", torch.float64)


def sound(count=1000, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def spectrogram_of(model, samples):
    extractor = model.processor
    return extractor(samples.numpy(), sampling_rate=2880, return_tensors="pt")["input_features"]


def log_p_of(plain, spectrogram, target):
    """Return the log probabilities of transformers alone for tokens of a target, and the output."""
    target = torch.tensor([target])
    with torch.no_grad():
        out = plain(input_features=spectrogram.double(), decoder_input_ids=target, use_cache=False)
    return out.logits[0].log_softmax(-1)[:-1].gather(1, target[0, 1:, None])[:, 0]


# ------------------------------------------------------------------ prompts


def test_a_waveform_is_what_the_extractor_makes_of_it(model):
    samples = sound()
    found = make_model_input(model, samples[None].double())
    torch.testing.assert_close(found, spectrogram_of(model, samples).double())
    encoding = model.processor(samples.numpy(), sampling_rate=2880, return_tensors="pt")
    prompts = [samples, samples[None], samples.numpy(), encoding, encoding["input_features"][0]]
    maps = [lm.run(model, (prompt, TEXT), "attention", part="cross") for prompt in prompts]
    for each in maps[1:]:
        torch.testing.assert_close(each.scores, maps[0].scores, atol=1e-9, rtol=0)


def test_frames_have_times_and_padding_is_outside_of_the_grid(model):
    m = lm.run(model, (sound(), TEXT), "attention", part="cross")
    count = -(-1000 // FRAME)
    assert m.grid.positions == tuple(range(count))
    assert m.grid.size == (1, 1000)
    assert m.grid.times == pytest.approx([place * FRAME / 2880 for place in range(count)])
    assert m.key_tokens[:2] == ["0.00 s", "0.11 s"]
    assert m.key_tokens[count] == "padding 0.44 s"
    assert len(m.key_tokens) == WINDOW // FRAME
    assert any("the sound ends at 0.44 s" in note for note in m.notes)
    whole = lm.run(model, (sound(WINDOW), TEXT), "attention", part="cross")
    assert len(whole.grid.positions) == 9
    assert not any("padding" in each for each in whole.notes)
    assert m.features.shape == (1000,)


def test_the_decoder_reads_the_language_and_the_task_before_a_text(model):
    m = lm.run(model, (sound(), TEXT), "attention", part="decoder")
    assert m.tokens == [*model.tokenizer.convert_ids_to_tokens(FIRST), "w10", "w20", "w30"]
    assert m.grid is None
    assert m.features.shape == (1000,)
    tokens = torch.tensor([*FIRST, 10, 20, 30])
    again = lm.run(model, (sound(), tokens), "attention", part="decoder")
    torch.testing.assert_close(again.scores, m.scores)
    alone = lm.run(model, sound(), "attention", part="encoder")
    assert alone.tokens[0] == "0.00 s"
    assert alone.grid is not None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.zeros(0), r"expected 1 to 2880 samples, the 1 seconds .* got 0"),
        (torch.zeros(2881), r"got 2881; cut the sound"),
        (torch.zeros(8, 17), r"expected a log-mel spectrogram \[8, 18\], .*got \[8, 17\]"),
        (torch.full((5,), torch.nan), "expected finite numbers"),
    ],
)
def test_wrong_sounds_raise(model, prompt, words):
    with pytest.raises(ValueError, match=words):
        lm.run(model, (prompt, TEXT), "attention", part="cross")


def test_what_is_missing_is_named(model, monkeypatch):
    with pytest.raises(ValueError, match=r"expected a pair \(sound, target\) for part='cross'"):
        lm.run(model, sound(), "attention", part="cross")
    with pytest.raises(ValueError, match="given twice"):
        lm.run(model, (sound(), TEXT), "attention", part="cross", decoder_input_ids=torch.tensor([1]))
    with pytest.raises(lm.UnsupportedModelError, match="a part that reads the sound"):
        lm.run(model, (sound(), TEXT), lm.methods.Occlusion(by="mean"), part="decoder")
    with monkeypatch.context() as patch:
        patch.setattr(model, "processor", None)
        with pytest.raises(TypeError, match=r"set model\.processor = WhisperFeatureExtractor"):
            lm.run(model, (sound(), TEXT), "attention", part="cross")
        patch.setattr(model, "tokenizer", None)
        with pytest.raises(ValueError, match="a string needs a tokenizer"):
            lm.run(model, (torch.zeros(8, 18), TEXT), "attention", part="cross")


def test_several_sounds_of_any_length_are_mapped_like_each_alone(model):
    pairs = [(sound(1000), TEXT), (sound(700, 1), "w7"), (sound(1000, 2), "w9 w8"), (sound(1000, 3), "w9 w7")]
    pairs += [(spectrogram_of(model, sound(900)), "w9 w8"), (spectrogram_of(model, sound(300)), "w9 w8")]
    methods = ["attention", "value_zeroing"]
    for pair, maps in zip(pairs, lm.run_many(model, pairs, methods, part="cross"), strict=True):
        for name, one in lm.run(model, pair, methods, part="cross").items():
            torch.testing.assert_close(maps[name].scores, one.scores, atol=1e-9, rtol=0)


def test_sounds_of_one_length_run_together(model):
    session = Session(model, {"attention": lm.methods.AttentionWeights()}, part="cross")
    prompts = [session.read((sound(1000, seed), "w9 w8")) for seed in (0, 1)]
    assert [len(batch) for batch in session.batches(prompts)] == [2]
    spectrograms = [session.read((spectrogram_of(model, sound(count)), "w9")) for count in (300, 900)]
    assert [len(batch) for batch in session.batches(spectrograms)] == [1, 1]


def test_a_model_in_half_precision_reads_samples_that_were_not_rounded():
    half = build_or_skip(bridge, "whisper", torch.bfloat16)
    half.processor = speech_extractor()
    m = lm.run(half, (sound(), torch.tensor([1, 3, 4, 5, 9])), "attention", part="cross")
    assert m.features.dtype == torch.float32
    expected = spectrogram_of(half, sound()).bfloat16()
    assert torch.equal(make_model_input(half, m.features[None]), expected)


def test_a_whole_spectrogram_has_no_padding(model):
    whole = spectrogram_of(model, sound(WINDOW))
    assert lm.run(model, (whole, TEXT), "attention", part="cross").grid.size == (1, 18)


def test_loud_samples_have_a_note(model):
    m = lm.run(model, (32768 * sound(), TEXT), "attention", part="cross")
    assert any("divide 16-bit ones by 32768" in note for note in m.notes)


def test_a_map_is_made_again_from_its_file(model, tmp_path):
    for prompt in (sound(), spectrogram_of(model, sound())):
        for part in ("encoder", "decoder", "cross"):
            m = lm.run(model, (prompt, TEXT), "value_norm", part=part, queries=[1])
            m.save(tmp_path / "m.safetensors")
            again = lm.run_again(model, lm.MixingMap.load(tmp_path / "m.safetensors"))
            torch.testing.assert_close(again.scores, m.scores, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------ maps


def test_joined_layers_are_products_of_the_parts(model):
    maps = lm.run(model, (sound(), TEXT), "value_norm", part="all")
    frames, tokens = WINDOW // FRAME, len(FIRST) + 3
    assert {name: m.scores.shape[1:] for name, m in maps.items()} == {
        "encoder": (frames, frames),
        "decoder": (tokens, tokens),
        "cross": (tokens, frames),
    }
    joined = lm.aggregation.joint(lm.run(model, (sound(), TEXT), "attn_res_ln", part="all"))
    assert joined.scores.shape[-1] == frames + tokens


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_rollouts_equal_products_of_transformers_attention(model, plain, part):
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        out = plain(
            input_features=spectrogram_of(model, sound()).double(),
            decoder_input_ids=torch.tensor([[*FIRST, 10, 20, 30]]),
            output_attentions=True,
            use_cache=False,
        )
    weights = torch.stack(getattr(out, f"{part}_attentions"))[:, 0].mean(1)
    product = torch.eye(weights.shape[-1], dtype=torch.float64)
    for layer in (weights + torch.eye(weights.shape[-1])) / 2:
        product = layer @ product
    found = lm.rollout(lm.run(model, (sound(), TEXT), "attention", part=part))
    torch.testing.assert_close(found.scores[-1], product, atol=1e-9, rtol=0)


# ------------------------------------------------------------------ traces


@pytest.fixture(scope="module")
def trace(model):
    return lm.trace(model, sound(), answer=TEXT, method="value_zeroing", sources=0.2)


def test_a_word_has_stretches_of_sound_as_sources(model, trace):
    assert trace.text == TEXT
    assert trace.n_prompt == 9 + len(FIRST)
    kinds = {source.text: source.kind for source in trace.sources()}
    assert [text for text, kind in kinds.items() if kind == "sound"] == ["0.00–0.22 s", "0.22–0.35 s"]
    assert "padding" in kinds.values()
    m = lm.run(model, (sound(), TEXT), "value_zeroing", part="cross")
    # The row before a token predicts it.
    expected = m.scores[:, m.row_index(len(FIRST))].mean(0)
    torch.testing.assert_close(trace["w20"].scores[:9].double(), expected)
    assert "0.00–0.22 s" in repr(trace["w20"])
    every = trace.by("token").sources()
    assert every[0].text == "0.00 s"
    assert every[0].kind == "sound"


def test_a_stretch_is_silenced_or_becomes_noise(model, plain, trace):
    samples, target = sound(), [*FIRST, 10, 20, 30]
    clean = log_p_of(plain, spectrogram_of(model, samples), target)[4]
    silent, noisy = samples.clone(), samples.clone()
    silent[: 2 * FRAME] = 0
    own = samples[: 2 * FRAME]
    noise = torch.randn(2 * FRAME, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy[: 2 * FRAME] = noise * own.square().mean().sqrt()
    span = trace["w20"]
    for fill, changed in (("silence", silent), ("noise", noisy)):
        losses = {each.source.text: each.loss for each in span.verify(2, fill=fill)}
        expected = clean - log_p_of(plain, spectrogram_of(model, changed), target)[4]
        assert losses["0.00–0.22 s"] == pytest.approx(float(expected), abs=1e-5)
    assert span.verify(2)[0].loss != span.verify(2, fill="noise")[0].loss
    with pytest.raises(ValueError, match="fill: expected"):
        span.verify(1, fill="music")


def test_noise_needs_a_waveform_and_padding_has_no_sound(model):
    t = lm.trace(model, spectrogram_of(model, sound()), answer=TEXT, method="attention")
    (strongest,) = t["w20"].verify(1, fill="noise")
    assert strongest.loss is None
    assert "give the waveform" in strongest.reason
    assert t["w20"].verify(1)[0].loss is not None
    with pytest.raises(lm.UnsupportedModelError, match=r"got a sound; use t\.verify"):
        t.audit()


@pytest.mark.parametrize("cached", [True, False])
def test_the_model_writes_what_transformers_predicts(model, plain, cached):
    t = lm.trace(model, sound(), generate=5, method="attention", stop_at_eos=False, use_past_kv_cache=cached)
    tokens = list(FIRST)
    for _ in range(5):
        with torch.no_grad():
            out = plain(
                input_features=spectrogram_of(model, sound()).double(),
                decoder_input_ids=torch.tensor([tokens]),
                use_cache=False,
            )
        tokens.append(int(out.logits[0, -1].argmax()))
    assert t.reading.ids[9:].tolist() == tokens
    assert t.reading.n_written == 5


def test_tokens_as_an_answer_begin_with_the_start(model, monkeypatch):
    text = lm.trace(model, sound(), answer=TEXT)
    same = lm.trace(model, sound(), answer=torch.tensor([*FIRST, 10, 20, 30]))
    assert same.text.strip() == text.text
    torch.testing.assert_close(same.log_probabilities, text.log_probabilities)
    before = lm.trace(model, sound(), answer=torch.tensor([2, 9, 9, *FIRST, 10, 20, 30]))
    assert (before.text.strip(), before.reading.n_written) == (TEXT, 3)
    with pytest.raises(ValueError, match="from the start token 1 on, got tokens without it"):
        lm.trace(model, sound(), answer=torch.tensor([10, 20, 30]))
    with monkeypatch.context() as patch:
        patch.setattr(model, "tokenizer", None)
        alone = lm.trace(model, sound(), answer=torch.tensor([*FIRST, 10, 20, 30]))
        assert alone.reading.n_written == 6
        torch.testing.assert_close(alone.log_probabilities[-3:], text.log_probabilities)
        with pytest.raises(ValueError, match=r"set model\.tokenizer = WhisperTokenizer"):
            lm.trace(model, sound(), generate=3)


def test_a_text_beside_the_sound_is_refused(model):
    """It would be neither the answer nor a text before what is written."""
    tokens = torch.tensor([*FIRST, 10])
    by_name = {"input_features": spectrogram_of(model, sound()), "decoder_input_ids": tokens}
    for prompt in ((sound(), TEXT), (sound(), tokens), by_name):
        for options in ({"answer": TEXT}, {"generate": 2}):
            with pytest.raises(ValueError, match=r"expected the source alone.*as answer="):
                lm.trace(model, prompt, **options)
    bart = build_or_skip(bridge, "bart", torch.float64)
    with pytest.raises(ValueError, match=r"expected the source alone.*as answer="):
        lm.trace(bart, (torch.arange(3, 10), torch.arange(4)), answer=torch.arange(4))


def test_what_the_decoder_reads_can_be_among_the_inputs(model):
    """Labels are what it predicts, so they would be left out."""
    inputs = {"input_features": spectrogram_of(model, sound())}
    tokens = torch.tensor([[*FIRST, 10, 20, 30]])
    named = lm.run(model, {**inputs, "decoder_input_ids": tokens}, "attention", part="cross")
    pair = lm.run(model, (inputs, tokens[0]), "attention", part="cross")
    torch.testing.assert_close(named.scores, pair.scores, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"labels: .*give a pair \(sound, target\)"):
        lm.run(model, {**inputs, "labels": tokens}, "attention", part="cross")
    with pytest.raises(ValueError, match="the target was given twice"):
        lm.run(model, ({**inputs, "decoder_input_ids": tokens}, tokens[0]), "attention", part="cross")


def test_what_is_written_ends_where_the_decoders_positions_end(model):
    assert model.cfg.n_ctx == 32
    t = lm.trace(model, sound(), generate=60, stop_at_eos=False)
    assert t.reading.n_written == 28
    assert any("the model's context ends" in note for note in t.notes)
    with pytest.raises(ValueError, match="target: expected at most n_ctx=32 tokens"):
        lm.run(model, (sound(), torch.full((33,), 9)), "attention", part="cross")


def test_a_text_without_a_language_has_a_note(model):
    for t in (lm.trace(model, sound(), answer=TEXT), lm.trace(model, sound(), generate=2)):
        assert any("model.tokenizer has no language" in note for note in t.notes)


def test_a_fill_is_for_sound_alone(model):
    text_model = build_or_skip(bridge, "bart", torch.float64)
    t = lm.trace(text_model, torch.arange(3, 10), answer=torch.arange(0, 4), sources="token")
    with pytest.raises(ValueError, match="fill: expected None for a text"):
        t.verify(1, fill="noise")
    mixed = lm.trace(model, sound(), answer=TEXT, method="attention", sources=[[0, 1, 5], [2]])
    reasons = {each.source.positions: each.reason for each in mixed.verify(9)}
    assert "expected frames of the sound alone" in reasons[0, 1, 5]
    assert reasons[2,] == ""


@pytest.mark.parametrize("unit", ["foo s", "-1 s", "inf s", "0 s"])
def test_units_that_are_no_seconds_raise(trace, unit):
    with pytest.raises(ValueError, match="unit: expected one of"):
        trace.by(unit)
    assert [each.text for each in trace.sources(0.2)] == [each.text for each in trace.sources()]


def test_a_function_that_splits_texts_raises_for_sound(model):
    with pytest.raises(ValueError, match="got a function that splits a text"):
        lm.trace(model, sound(), answer=TEXT, sources=lambda text: [(0, 1)])


def test_wrong_kinds_and_options_say_what_to_do(model):
    with pytest.raises(TypeError, match="divide 16-bit ones by 32768"):
        lm.run(model, (np.zeros(500, np.int16), TEXT), "attention", part="cross")
    with pytest.raises(TypeError, match=r"scipy\.io\.wavfile\.read"):
        lm.run(model, ("sound.wav", TEXT), "attention", part="cross")
    with pytest.raises(ValueError, match="freq_penalty: expected one of"):
        lm.trace(model, sound(), generate=2, freq_penalty=0.5)


@pytest.mark.parametrize(
    ("sources", "words"),
    [("sentence", "a number of seconds"), (0, "above 0"), ("words", "expected one of")],
)
def test_units_of_text_raise_for_sound(model, sources, words):
    with pytest.raises(ValueError, match=words):
        lm.trace(model, sound(), answer=TEXT, sources=sources)


def test_seconds_raise_for_text():
    text_model = build_or_skip(bridge, "bart", torch.float64)
    with pytest.raises((ValueError, lm.UnsupportedModelError), match="a unit of text"):
        lm.trace(text_model, torch.arange(3, 10), answer=torch.arange(0, 4), sources=0.2)


def test_a_trace_of_sound_is_saved_and_read_again(model, trace, tmp_path):
    trace["w20"].verify(1)
    trace["w20"].verify(1, fill="noise")
    trace.save(tmp_path / "t.safetensors")
    read = lm.Trace.load(tmp_path / "t.safetensors", model)
    assert repr(read["w20"].top(3)) == repr(trace["w20"].top(3))
    assert read.unit == trace.unit
    assert [str(each) for each in read.sources()] == [str(e) for e in trace.sources()]
    span = trace["w20"]
    assert (
        read.losses_of(span.start, span.stop, "noise")
        == trace.losses_of(span.start, span.stop, "noise")
        != {}
    )
    torch.testing.assert_close(read["w10"].scores, trace["w10"].scores)
    alone = lm.Trace.load(tmp_path / "t.safetensors")
    assert re.search(r"0\.\d\d–0\.\d\d s", repr(alone))


def test_maps_of_a_written_word_have_its_row(model, trace):
    m = trace["w20"].maps("attention")
    assert m.queries == [len(FIRST)]
    assert m.grid is not None
    figure = m.show(query=len(FIRST))
    # The waveform, the layers below it, and the bar of colors.
    assert len(figure.axes) == 3


# ------------------------------------------------------------------ pages and figures


def test_the_page_of_a_trace_has_the_waveform_of_each_stretch(trace):
    data = json.loads(dict_of(trace.show())["data"])
    texts = [text.strip() for _, _, text, _ in data["boxes"]]
    assert texts[:3] == ["0.00–0.22 s", "0.22–0.35 s", "padding from 0.44 s on"]
    waves = data["waves"]
    assert [wave is not None for wave in waves[:2]] == [True, True]
    lowest = min(low for wave in waves if wave for low, _ in wave)
    assert lowest == pytest.approx(float(sound().min()), rel=1e-2)
    assert data["seconds"] == pytest.approx(1000 / 2880)
    assert list(data["sources"]) == [trace.unit]
    assert [kind for kind, *_ in data["blocks"]] == ["sound", "padding", "template"]


def dict_of(page):
    return {given.get("id"): text for _, given, text in Reader(page.html).elements}


def test_a_figure_says_what_the_padding_has(model):
    for prompt in (sound(), spectrogram_of(model, sound())):
        m = lm.run(model, (prompt, TEXT), "attention", part="cross")
        figure = m.show(query=" w20" if " w20" in m.tokens else "w20")
        texts = " ".join(text.get_text() for text in figure.texts)
        share = float(1 - m.normalized().scores[0, m.row_index("w20"), list(m.grid.positions)].sum())
        assert "outside of the sound" in texts
        assert 0 < share < 1
        assert len(figure.axes) == 3
