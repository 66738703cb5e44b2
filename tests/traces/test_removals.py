"""Compare the measured removals of an audit with plain models that read the rest, and count the passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import signal

import pytest
import torch

import lens_mix as lm
from lens_mix._passes.predictions import name_token
from lens_mix.traces import removals
from lens_mix.traces.claims import Rules
from lens_mix.traces.removals import OutOfPasses, Passes
from tests.matrix import build_or_skip
from tests.reference_models import to_bridge, to_hooked
from tests.tiny_models import available, bridge, is_encoder_decoder, wrapped_model
from tests.traces.readers import PLAIN, reader
from tests.traces.test_generation import greedy
from tests.traces.test_trace import state_of, unusual

pytestmark = pytest.mark.filterwarnings("ignore")
# The logits of two passes of different shapes differ by rounding.
CLOSE = {"rel": 1e-6, "abs": 1e-9}

# ------------------------------------------------------------------ plain models

T5 = {
    "positional_embedding_type": "relative_positional_bias",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "attention_dir": "bidirectional",
    "normalization_type": "RMS",
    "use_attn_scale": False,
    "act_fn": "relu",
    "eps": 1e-6,
    "d_mlp": 48,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": True,
}


def pair_of(label):
    """Return a TransformerLens model and the plain transformers model with its weights, in float64."""
    if label == "bridge of a T5":
        return build_or_skip(bridge, "t5", torch.float64), wrapped_model("t5", torch.float64)
    if label == "bridge of a BART":
        return build_or_skip(bridge, "bart", torch.float64), wrapped_model("bart", torch.float64)
    plain = wrapped_model("t5" if label == "HookedEncoderDecoder" else "gpt2", torch.float64)
    if label == "HookedEncoderDecoder":
        return build_or_skip(to_hooked, plain, label, "convert_t5_weights", n_ctx=32, **T5), plain
    if label == "HookedTransformer":
        options = {"act_fn": "gelu_new", "eps": plain.config.layer_norm_epsilon, "n_ctx": 32, "d_mlp": 96}
        return build_or_skip(to_hooked, plain, label, "convert_gpt2_weights", **options), plain
    return build_or_skip(to_bridge, wrapped_model("gpt2", torch.float64)), plain


def plain_rows(plain, t, removed):
    """Return the log probabilities in the place of each written token, from a plain pass over the rest.

    Args:
        plain: The transformers model.
        t: The trace.
        removed: The positions of `Trace.tokens` that are deleted.
    """
    reading, count = t.reading, len(t.tokens)
    kept = [position for position in range(count) if position not in removed]
    written = [position - reading.n_prompt for position in kept if position >= reading.n_prompt]
    with torch.no_grad():
        if reading.n_source:
            source = reading.prompt.tokens[[each for each in kept if each < reading.n_source]]
            own = reading.prompt.target
            logits = plain(input_ids=source[None], decoder_input_ids=own[None]).logits[0]
        else:
            logits = plain(reading.ids[kept][None]).logits[0]
    rows = torch.full((reading.n_written, logits.shape[-1]), torch.nan, dtype=torch.float64)
    rows[written] = logits[-len(written) - 1 : -1].double().log_softmax(-1)
    return rows


LABELS = (
    "TransformerBridge",
    "HookedTransformer",
    "bridge of a T5",
    "bridge of a BART",
    "HookedEncoderDecoder",
)


@functools.cache
def traced(label):
    model, plain = pair_of(label)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 50, (16,), generator=draw)
    prompt, answer = (tokens[:9], tokens[9:])
    if is_encoder_decoder(model):
        answer = torch.cat([torch.tensor([plain.config.decoder_start_token_id]), answer])
    try:
        return lm.trace(model, prompt, answer=answer, sources="token"), plain
    except lm.UnsupportedModelError as problem:
        if is_encoder_decoder(model) and "TransformerLens" in str(problem):
            pytest.skip(str(problem))
        raise


@pytest.mark.parametrize("label", LABELS)
def test_rows_are_those_of_a_plain_model_that_reads_the_rest(label):
    t, plain = traced(label)
    # Of an encoder-decoder only the source is removed, because the answer is in another part of the model.
    sources = [each for each in t.sources() if not t.reading.n_source or each.is_content]
    passes, draw = Passes(t, sources, 10**6), random.Random(0)
    last = max(number for number, each in enumerate(sources) if each.is_content)
    # One token of the prompt stays, and one that was written.
    removable = [each for each in range(len(sources)) if each not in (last, len(sources) - 1)]
    sizes = (0, 1, 2, 3, 5, len(sources) - 4)
    for size in sizes:
        removed = draw.sample(removable, size)
        positions = {position for number in removed for position in sources[number].positions}
        expected = plain_rows(plain, t, positions)
        found = passes.rows(removed)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
        own = expected[range(len(expected)), passes.written]
        torch.testing.assert_close(passes.of_written(removed), own, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert passes.count == len(sizes)


@pytest.mark.parametrize("label", LABELS)
def test_losses_and_probabilities_are_those_of_deletion(label):
    t, plain = traced(label)
    sources = [each for each in t.sources() if each.is_content]
    passes, span = Passes(t, sources, 99), t[1:4]
    clean = plain_rows(plain, t, ())
    for removed in ([2], [0, 3], [1, 4, 5, 6]):
        positions = {position for number in removed for position in sources[number].positions}
        rows = plain_rows(plain, t, positions)
        lost = [float((clean - rows)[place, passes.written[place]]) for place in (1, 3)]
        assert passes.loss([1, 3], removed) == pytest.approx(sum(lost), **CLOSE)
        found = passes.removal(span, [3], removed)
        assert found.sources == tuple(sources[each] for each in removed)
        assert found.loss == pytest.approx(lost[1], **CLOSE)
        whole = sum(float(rows[place, passes.written[place]]) for place in (1, 2, 3))
        assert found.probability == pytest.approx(torch.tensor(whole).exp().item(), rel=1e-5)


@pytest.mark.parametrize("label", LABELS)
def test_another_token_is_the_loss_of_the_rest(label):
    t, plain = traced(label)
    passes = Passes(t, [each for each in t.sources() if each.is_content], 99)
    span, clean, place, token = t[0:6], plain_rows(plain, t, ()), 2, 17
    prompt = t.reading.prompt
    own = prompt.tokens if prompt.target is None else prompt.target
    changed = own.clone()
    changed[len(own) - t.reading.n_written + place] = token
    name = "tokens" if prompt.target is None else "target"
    reading = dataclasses.replace(t.reading, prompt=dataclasses.replace(prompt, **{name: changed}))
    rows = plain_rows(plain, dataclasses.replace(t, reading=reading), ())
    lost = {each: float((clean - rows)[each, passes.written[each]]) for each in (3, 5)}
    # Token 4 depends on the sources, and what becomes more probable does not count.
    expected = sum(max(loss, 0.0) for loss in lost.values())
    found = passes.misfit(span, (place, place + 1), [token], [place, 4])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert passes.misfit(span, (5, 6), [token], []) == 0
    assert passes.count == 2


@pytest.mark.parametrize("label", LABELS)
def test_other_words_have_the_log_probability_of_plain_passes(label):
    t, plain = traced(label)
    sources = [each for each in t.sources() if each.is_content]
    passes, removed, place, other = Passes(t, sources, 99), [1, 2], 2, [17, 21]
    prompt = t.reading.prompt
    own = prompt.tokens if prompt.target is None else prompt.target
    changed, start = own.clone(), len(own) - t.reading.n_written + place
    changed[start : start + 2] = torch.tensor(other)
    name = "tokens" if prompt.target is None else "target"
    reading = dataclasses.replace(t.reading, prompt=dataclasses.replace(prompt, **{name: changed}))
    positions = {position for number in removed for position in sources[number].positions}
    rows = plain_rows(plain, dataclasses.replace(t, reading=reading), positions)
    expected = float(rows[[place, place + 1], other].sum())
    assert passes.of_other(place, other, removed) == pytest.approx(expected, rel=1e-5)
    assert passes.of_other(place, other, [2, 1]) == passes.of_other(place, other, removed)
    assert passes.count == 1
    # Without a tokenizer, the model has no words.
    assert passes.other_word(place, removed) == []


@pytest.mark.parametrize("label", LABELS)
def test_what_is_written_instead_is_the_loop_of_plain_passes(label):
    t, plain = traced(label)
    sources = [each for each in t.sources() if each.is_content]
    passes, removed, place = Passes(t, sources, 99), [1, 2], 3
    positions = {position for number in removed for position in sources[number].positions}
    first = int(plain_rows(plain, t, positions)[place].argmax())
    # Without a tokenizer, only the number of the first token is known.
    assert passes.write_instead(place, removed, 4) == str(first)
    assert passes.count == 2


# ------------------------------------------------------------------ a whole audit

PROMPT = (
    "The company was founded in Oslo. It has 120 employees. Critics liked the new product. "
    "Trains run every hour. The chief executive plans to retire. Where was the company founded?"
)
ANSWER = " The company was founded in Oslo. Trains run. Oslo has trains."
# Tiny random models lose little, and would not write this.
LOW = {
    "decisive": (0.05, 0.1),
    "memory": 0.1,
    "between": 0.01,
    "written": (0.0, 0.0),
    "support": 0.1,
    "margin": 9.0,
    "misfit": 99.0,
    "preferred": 99.0,
}


@pytest.fixture
def low(monkeypatch):
    monkeypatch.setattr("lens_mix.traces.audit.Rules", lambda: Rules(**LOW))


def require_deletion(audit, plain):
    """Check every number of an audit; return how many were checked."""
    t, checked = audit.trace, 0
    written = t.reading.ids[t.n_prompt :].tolist()
    clean = plain_rows(plain, t, ())

    def rows_without(sources):
        return plain_rows(plain, t, {position for each in sources for position in each.positions})

    def loss(rows, tokens):
        return sum(float(clean[each, written[each]] - rows[each, written[each]]) for each in tokens)

    for claim in audit:
        span, everything = claim.span, claim.memory.sources
        # The other losses of a claim that repeats another one are those of that claim.
        own = claim.follows is None
        for removal in (claim.memory, *claim.alone * own):
            rows = rows_without(removal.sources)
            assert removal.loss == pytest.approx(loss(rows, claim.decisive), **CLOSE)
            whole = sum(float(rows[each, written[each]]) for each in range(span.start, span.stop))
            assert removal.probability == pytest.approx(torch.tensor(whole).exp().item(), rel=1e-5)
            checked += 2
        for ground in claim.grounds * own:
            assert ground.loss == pytest.approx(loss(rows_without(ground.sources), ground.tokens), **CLOSE)
            whole = loss(rows_without(everything), ground.tokens)
            for source, share in zip(ground.sources, ground.shares, strict=True):
                rest = [each for each in everything if each != source]
                assert share == pytest.approx(1 - loss(rows_without(rest), ground.tokens) / whole, **CLOSE)
                checked += 1
        for each in claim.against * own:
            grounds = [ground for ground in claim.grounds if each.token in ground.tokens]
            known = [source for ground in grounds for source in ground.sources]
            margins = clean[each.token, written[each.token]] - clean[each.token]
            none = rows_without(everything)[each.token]
            # The smallest set may have more sources than those that are enough alone.
            sets = [
                [*known, *more]
                for count in range(3)
                for more in itertools.combinations([one for one in everything if one not in known], count)
            ]
            assert any(
                bool(((supports - each.support).abs() + (margins - each.margin).abs() < 1e-6).any())
                for supports in (rows_without(sources)[each.token] - none for sources in sets)
            )
            checked += 2
    return checked


def family(dtype=torch.float64, seed=0):
    """Return a small model that reads text and its plain model; in TransformerLens 2, it is plain itself."""
    model = reader(dtype=dtype, seed=seed)
    if not available(bridge, "llama"):
        return model, Forward(model)
    size = {"vocab_size": len(model.tokenizer), "max_position_embeddings": 512}
    plain = wrapped_model("llama", dtype, seed, **size)
    # In a trace the attention of the wrapped model is eager, with a softmax in float32.
    plain.set_attn_implementation("eager")
    return model, plain


@dataclasses.dataclass
class Forward:
    """A model of TransformerLens that is called as a plain one."""

    model: object

    def __call__(self, tokens):
        return type("Output", (), {"logits": self.model(tokens)})


@pytest.mark.parametrize("seed", range(2))
def test_every_number_of_an_audit_is_that_of_deletion(low, seed):
    model, plain = family(seed=seed)
    audit = lm.audit(model, PROMPT, answer=ANSWER, passes=999)
    assert require_deletion(audit, plain) >= 4
    verdicts = [claim.verdict for claim in audit]
    assert "unclear" not in verdicts
    assert any(claim.grounds for claim in audit)


def test_numbers_in_float32(low):
    model, _ = family(torch.float32)
    _, exact = family()
    audit = lm.audit(model, PROMPT, answer=ANSWER, passes=999)
    for claim in audit:
        positions = {position for each in claim.memory.sources for position in each.positions}
        written = audit.trace.reading.ids[audit.trace.n_prompt :].tolist()
        lost = plain_rows(exact, audit.trace, ()) - plain_rows(exact, audit.trace, positions)
        expected = sum(float(lost[each, written[each]]) for each in claim.decisive)
        assert claim.memory.loss == pytest.approx(expected, abs=1e-3)


# ------------------------------------------------------------------ passes


class Counter:
    """Count the forward passes of a model, where all that `generate` does is one."""

    def __init__(self, model, monkeypatch):
        # A trace compares the model in a further pass if a function of it is another one.
        self.count, self.writes = 0, False
        layer, generate = type(model.blocks[1].mlp), type(model).generate
        forward = layer.forward

        def counted(module, *given, **options):
            self.count += module is model.blocks[1].mlp and not self.writes
            return forward(module, *given, **options)

        def written(own, *given, **options):
            self.count, self.writes = self.count + 1, True
            try:
                return generate(own, *given, **options)
            finally:
                self.writes = False

        monkeypatch.setattr(layer, "forward", counted)
        monkeypatch.setattr(type(model), "generate", written)


def prepare(model):
    """Return a trace whose scores of sentences are computed, so that an audit takes no other passes."""
    t = lm.trace(model, PROMPT, answer=ANSWER)
    assert all(span.scores.any() for span in t.spans)
    return t


@functools.cache
def prepared():
    return prepare(family()[0])


def test_the_budget_is_never_exceeded(low, monkeypatch):
    model = family()[0]
    counter = Counter(model, monkeypatch)
    t = prepare(model)
    before = counter.count
    whole = t.audit(passes=999)
    assert whole.passes == counter.count - before > 10
    assert any(ground.instead for claim in whole for ground in claim.grounds)
    for passes in (2, 3, 5, whole.passes - 1, whole.passes):
        counter.count = 0
        audit = t.audit(passes=passes)
        assert audit.passes == counter.count <= passes
        unclear = [claim for claim in audit if claim.verdict == "unclear"]
        assert {claim.reason for claim in unclear} == (
            set() if passes == whole.passes else {"the budget of passes was too small"}
        )
    assert repr(audit) == repr(whole)


def test_the_default_budget_is_for_each_claim(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "lens_mix.traces.audit.Passes", lambda *given: seen.append(given[2]) or Passes(*given)
    )
    t = prepared()
    audit = t.audit()
    t.audit(["Trains run", slice(0, 3)])
    assert seen == [24 * 3, 24 * 2]
    assert audit.passes <= 24 * 3


@pytest.mark.parametrize("passes", [1, 0, -3])
def test_a_budget_below_two_is_an_error(passes):
    with pytest.raises(ValueError, match=rf"passes: expected a whole number, 2 or more, got {passes}"):
        prepared().audit(passes=passes)


def test_a_set_takes_one_pass_and_few_rows_stay():
    t, _ = traced("TransformerBridge" if available(bridge, "gpt2") else "HookedTransformer")
    passes = Passes(t, [each for each in t.sources() if each.is_content], 12)
    for number in range(8):
        passes.of_written([number, 0])
        passes.of_written([0, number, 0])
    assert passes.count == 8
    assert len(passes._rows) < 8
    # What was written stays for every set; the rows of the first are computed again.
    passes.of_written([0])
    assert passes.count == 8
    passes.rows([0])
    assert passes.count == 9
    for number in range(1, 4):
        passes.rows([number, 5, 6])
    with pytest.raises(OutOfPasses):
        passes.rows([4, 5, 6])
    with pytest.raises(OutOfPasses):
        passes.misfit(t[:], (0, 1), [5], [])
    with pytest.raises(OutOfPasses):
        passes.write_instead(0, [1, 5, 6], 3)
    assert passes.count == 12


def test_nothing_predicts_the_first_token():
    model = reader(has_bos=False)
    t = lm.trace(model, "Oslo has trains. It has 120 employees.", answer=" Yes.", prepend_bos=False)
    with pytest.raises(
        lm.UnsupportedModelError,
        match=r"audit: expected a prompt with tokens besides its sources.*put the question after the sources",
    ):
        t.audit(keep=[])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_text_is_written_without_sources(count):
    t = prepared()
    contents = [each for each in t.sources() if each.is_content]
    passes, place = Passes(t, contents, 9), 2
    keeps = [
        position
        for position in range(t.n_prompt + place)
        if position not in contents[0].positions and position not in contents[3].positions
    ]
    written = greedy(t.model, t.reading.ids[keeps], count, [t.model.tokenizer.eos_token_id])
    assert passes.write_instead(place, [0, 3], count) == t.model.tokenizer.decode(written)


def test_a_wrong_generate_is_not_believed(monkeypatch):
    t = prepared()
    passes = Passes(t, [each for each in t.sources() if each.is_content], 99)
    first = int(passes.rows([0])[1].argmax())
    expected = name_token(t.model.tokenizer, first)
    wrong = (first + 1) % len(t.model.tokenizer)
    for found in (torch.tensor([wrong, 5]), None):
        monkeypatch.setattr(removals, "continue_prompt", lambda *given, found=found: found)
        assert passes.write_instead(1, [0], 4) == expected


def test_a_model_that_cannot_generate_is_audited(low, monkeypatch):
    t = prepared()
    expected = t.audit(passes=999)

    def generate(*given, **options):
        raise RuntimeError("no generation here")

    monkeypatch.setattr(type(t.model), "generate", generate)
    audit = t.audit(passes=999)
    assert [claim.verdict for claim in audit] == [claim.verdict for claim in expected]
    assert all(ground.instead for claim in audit for ground in claim.grounds)


# ------------------------------------------------------------------ interruptions


@pytest.fixture(scope="module")
def odd():
    """Return a trace of a model with unusual settings."""
    return lm.trace(unusual(), "Oslo has trains. Critics liked it. Where?", answer=" Oslo has trains. Yes.")


@pytest.mark.parametrize("how", ["error", "signal"])
@pytest.mark.parametrize("moment", [1, 2, 5, "generate"])
def test_the_model_is_as_it_was_after_an_interruption(low, odd, how, moment):
    """Interrupt the nth pass, or the first one of a text, by an error of the model or by Ctrl-C."""
    t, model = odd, odd.model
    expected, before = t.audit(passes=99), state_of(model)
    layer, generate = type(model.blocks[1].mlp), type(model).generate
    original, count, writes = layer.forward, 0, False

    def interrupt(*given, **options):
        nonlocal count
        count += 1
        if writes if moment == "generate" else count == moment:
            if how == "error":
                raise ArithmeticError("in the model")
            signal.raise_signal(signal.SIGINT)
        return original(*given, **options)

    def write(*given, **options):
        nonlocal writes
        writes = True
        try:
            return generate(*given, **options)
        finally:
            writes = False

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_ignored = how == "error" and moment == "generate"
    wanted = KeyboardInterrupt if how == "signal" else (ArithmeticError, lm.UnsupportedModelError)
    try:
        layer.forward, type(model).generate = interrupt, write
        with contextlib.nullcontext() if is_ignored else pytest.raises(wanted):
            t.audit(passes=99)
    finally:
        layer.forward, type(model).generate = original, generate
        signal.signal(signal.SIGINT, handler)
    assert count
    assert state_of(model) == before
    assert repr(t.audit(passes=99)) == repr(expected)
    assert t.computed_audit is not expected


def test_the_model_is_as_it_was(low, odd):
    model = odd.model
    documents = lm.Documents({"a": "Oslo has trains. Yes.", "b": "Trains run every hour."}, "Where?")
    lm.audit(model, documents, answer="In Oslo.")
    before = state_of(model)
    lm.audit(model, documents, answer="In Oslo. Trains run.")
    assert state_of(model) == before


def test_a_changed_model_is_not_audited():
    model = reader(template=PLAIN)
    t = lm.trace(model, PROMPT, answer=ANSWER)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
    with pytest.raises(ValueError, match=r"model: expected the model of the trace, .* or trace again"):
        t.audit()
    assert t.computed_audit is None
