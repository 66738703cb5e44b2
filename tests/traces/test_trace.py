"""Compare traces of every model of the matrix with the model's own forward pass, on tokens."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

import lens_mix as lm
from lens_mix._care.state import all_modules
from tests.matrix import Case, case_of, cases, model_of, prompt_of
from tests.tiny_models import is_encoder_decoder
from tests.traces.readers import PLAIN, reader

pytestmark = pytest.mark.filterwarnings("ignore")
N_PROMPT = 4
# transformers computes OPT's softmax and GPT-J's scores in float32 if attention is eager, as in a trace.
TOLERANCE = {"OPTForCausalLM": 1e-6, "GPTJForCausalLM": 1e-6}


def one_part(found: list[Case]) -> list[Case]:
    """Return the cases without the second part of an encoder-decoder, because a trace reads both."""
    return [case for case in found if case.part in (None, "encoder")]


WRITES = [case for case in one_part(cases(refused=False)) if not case.wrong_logits]


@dataclasses.dataclass
class Tokens:
    """A prompt and an answer of one model, as tokens."""

    model: object
    prompt: torch.Tensor
    answer: torch.Tensor
    n_start: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(type(getattr(self.model, "original_model", None)).__name__, 1e-10)

    @property
    def written(self) -> torch.Tensor:
        return self.answer[self.n_start :]

    def log_probabilities(self, prompt: torch.Tensor) -> torch.Tensor:
        """Return the log probability of each written token after a prompt, from one plain forward pass."""
        with torch.no_grad():
            if self.n_start:
                source, target = prompt[None], self.answer[None]
                if type(self.model).__name__ == "HookedEncoderDecoder":
                    output = self.model(source, target)
                else:
                    output = self.model(source, decoder_input=target)
            else:
                output = self.model(torch.cat([prompt, self.answer])[None])
        logits = (output if torch.is_tensor(output) else output.logits)[0]
        rows = logits[-1 - len(self.written) : -1].log_softmax(-1)
        return rows.gather(-1, self.written[:, None])[:, 0]


def tokens_of(case: Case, dtype: torch.dtype = torch.float64) -> Tokens:
    model = model_of(case, dtype)
    prompt = prompt_of(model)
    if isinstance(prompt, tuple):
        return Tokens(model, prompt[0][0], prompt[1][0], 1)
    return Tokens(model, prompt[0, :N_PROMPT], prompt[0, N_PROMPT:], 0)


def trace_or_skip(given: Tokens, **options: object) -> lm.Trace:
    """Return the trace; skip the test if this release cannot map source and target together."""
    try:
        return lm.trace(given.model, given.prompt, answer=given.answer, sources="token", **options)
    except lm.UnsupportedModelError as problem:
        if given.n_start and "TransformerLens" in str(problem):
            pytest.skip(str(problem))
        raise


@pytest.fixture(params=WRITES, ids=lambda case: case.label)
def given(request):
    found = tokens_of(request.param)
    if not given_writes(found.model):
        pytest.skip("an encoder")
    return found


def given_writes(model: object) -> bool:
    try:
        lm.trace(
            model, torch.tensor([3, 4]), answer=torch.tensor([3, 4]), sources="token", method="attention"
        )
    except lm.UnsupportedModelError as problem:
        return "got an encoder" not in str(problem)
    return True


def test_rows_are_the_spans_of_single_tokens(given):
    t = trace_or_skip(given)
    expected = given.log_probabilities(given.prompt)
    n_prompt = len(given.prompt) + given.n_start
    assert t.n_prompt == n_prompt
    assert len(t.tokens) == n_prompt + len(given.written)
    torch.testing.assert_close(t.log_probabilities, expected, atol=given.tolerance, rtol=0)
    steps = t.steps
    assert steps.scores.shape == (1, len(given.written), len(t.tokens))
    for index, number in enumerate(expected.tolist()):
        span = t[index]
        torch.testing.assert_close(span.scores, steps.scores[0, index], atol=1e-10, rtol=1e-7)
        assert list(span.positions) == [n_prompt + index]
        assert span.log_probability == pytest.approx(number, abs=given.tolerance)
        assert steps.explained[index].value == pytest.approx(number, abs=given.tolerance)
        # A token comes from those before it.
        assert not span.scores[n_prompt + index :].any()
        assert span.scores[: n_prompt + index].abs().sum() > 0
    whole = t[:]
    assert whole.log_probability == pytest.approx(expected.sum().item(), abs=3 * given.tolerance)
    assert whole.probability == pytest.approx(expected.sum().exp().item(), rel=4 * given.tolerance)


def test_a_source_is_removed_by_deleting_its_tokens(given):
    t = trace_or_skip(given)
    clean = given.log_probabilities(given.prompt)
    found = {each.source.positions[0]: each.loss for each in t[1:].verify(99)}
    # The start of a decoder is not a source.
    assert sorted(found) == list(range(len(given.prompt)))
    for position, loss in found.items():
        rest = torch.cat([given.prompt[:position], given.prompt[position + 1 :]])
        expected = (clean - given.log_probabilities(rest))[1:].sum().item()
        assert loss == pytest.approx(expected, abs=5 * given.tolerance)


REFUSED = [case for case in one_part(cases()) if case.refusal is not None]


@pytest.mark.parametrize("case", REFUSED, ids=[case.label for case in REFUSED])
def test_what_cannot_be_mapped_has_a_reason(case):
    model = model_of(case)
    prompt = prompt_of(model)
    prompt, answer = prompt if isinstance(prompt, tuple) else (prompt, torch.tensor([3, 4]))
    with pytest.raises(lm.UnsupportedModelError):
        lm.trace(model, prompt, answer=answer, sources="token")


@pytest.mark.parametrize("label", ["bridge bert", "bridge roberta", "HookedEncoder"])
def test_an_encoder_writes_nothing(label):
    case = case_of(label)
    if not case.exists:
        pytest.skip("this TransformerLens has no such model")
    model = model_of(case)
    for asked in ({"answer": torch.tensor([3])}, {"generate": 3}):
        with pytest.raises(lm.UnsupportedModelError, match=r"expected a causal model .* got an encoder"):
            lm.trace(model, prompt_of(model), sources="token", **asked)


def test_traces_in_a_row_are_those_alone():
    model = reader()
    texts = ["The company was founded in Oslo.", "Trains run every hour. Critics liked it.", "Oslo"]
    together = [lm.trace(model, text, answer=" On eight GPUs.") for text in texts]
    for text, t in zip(texts, together, strict=True):
        alone = lm.trace(reader(), text, answer=" On eight GPUs.")
        assert torch.equal(t[:].scores, alone[:].scores)
        assert torch.equal(t.steps.scores, alone.steps.scores)
        assert torch.equal(t.log_probabilities, alone.log_probabilities)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    model = reader(dtype=dtype)
    t = lm.trace(model, "The company was founded in Oslo.", answer=" On eight GPUs.")
    exact = lm.trace(reader(), "The company was founded in Oslo.", answer=" On eight GPUs.")
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(t.log_probabilities.double(), exact.log_probabilities, atol=tolerance, rtol=0)
    assert t[:].scores.dtype == torch.float32
    assert t.provenance["dtype"] == str(dtype).removeprefix("torch.")
    assert is_encoder_decoder(model) is False


# ------------------------------------------------------------------ the model afterwards


def state_of(model: object) -> list[object]:
    """Return everything that a trace must not change."""
    tokenizer = model.tokenizer
    found = [torch.is_grad_enabled(), torch.random.get_rng_state().tolist()]
    found += [
        tokenizer.padding_side,
        tokenizer.chat_template,
        tokenizer.eos_token,
        model.cfg.default_prepend_bos,
    ]
    found.append(str(tokenizer.backend_tokenizer.post_processor))
    for module in all_modules(model):
        found += [module.training, tuple(module._forward_hooks), tuple(module._forward_pre_hooks)]
        found += [len(getattr(module, "fwd_hooks", ())), len(getattr(module, "bwd_hooks", ()))]
        found += ["forward" in vars(module)]
        found.append(getattr(vars(module).get("config"), "_attn_implementation", None))
        parameters = list(module.parameters(recurse=False))
        found += [[parameter.requires_grad, parameter.grad is None] for parameter in parameters]
    return found


def unusual() -> object:
    """Return a model with unusual settings."""
    model = reader(template=PLAIN)
    model.tokenizer.padding_side = "left"
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    for index, module in enumerate(all_modules(model)):
        module.training = index % 2 == 0
    # The first run fills lazy caches.
    lm.trace(model, "Oslo", generate=2)
    return model


def everything(model: object) -> None:
    t = lm.trace(model, lm.Documents({"a": "Oslo has trains. Yes."}, "Where?"), answer="In Oslo.")
    t.verify(2)
    t.steps.top(1, query=t.n_prompt)
    lm.trace(model, "The company", generate=3, do_sample=True, method="attention")


def test_the_model_is_as_it_was():
    model = unusual()
    before = state_of(model)
    everything(model)
    assert state_of(model) == before


@pytest.mark.parametrize("how", ["error", "signal"])
@pytest.mark.parametrize("moment", [1, 9, 14])
def test_the_model_is_as_it_was_after_an_interruption(how, moment):
    """Interrupt the nth pass by an error of the model, or by Ctrl-C."""
    model = unusual()
    expected = lm.trace(model, "Oslo has trains", answer=" in Oslo.")[:].scores
    before, count = state_of(model), 0
    layer = model.blocks[1].mlp
    original = type(layer).forward

    def interrupt(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        # An error in one pass only would let the trace continue with another method.
        if how == "error" and count >= moment:
            raise ArithmeticError("in the model")
        if count == moment:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = KeyboardInterrupt if how == "signal" else (ArithmeticError, lm.UnsupportedModelError)
    try:
        type(layer).forward = interrupt
        with pytest.raises(wanted):
            everything(model)
    finally:
        type(layer).forward = original
        signal.signal(signal.SIGINT, handler)
    assert count >= moment
    assert state_of(model) == before
    assert torch.equal(lm.trace(model, "Oslo has trains", answer=" in Oslo.")[:].scores, expected)


# ------------------------------------------------------------------ notes


def test_notes_are_those_of_the_prompt_and_of_the_map():
    model = reader()
    twice = lm.trace(model, "<s>Oslo has trains.", answer=" Yes.")
    assert any(note.startswith("prepend_bos: the prompt begins with <s> twice") for note in twice.notes)
    assert lm.trace(model, "Oslo has trains.", answer=" Yes.").notes == ()
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: 0.5 * z)
    hooked = lm.trace(model, "Oslo has trains.", answer=" Yes.")
    assert any("layer 1: a hook scales z of its heads" in note for note in hooked.notes)
    assert lm.trace(model, "Oslo has trains.", generate=2).notes == hooked.notes


def test_maps_have_the_rows_that_predict_what_was_written(given):
    t = trace_or_skip(given)
    own = torch.cat([given.prompt, given.answer]) if not given.n_start else given.answer
    rows = list(range(len(own) - len(given.written) - 1, len(own) - 1))
    part = "cross" if given.n_start else None
    maps = t.maps(["attention", "value_zeroing"])
    assert isinstance(maps, lm.Maps)
    prompt = (given.prompt, given.answer) if given.n_start else own
    for name, expected in lm.run(given.model, prompt, list(maps), part=part, queries=rows).items():
        assert maps[name].query_positions == rows
        torch.testing.assert_close(maps[name].scores, expected.scores, atol=1e-10, rtol=0)
    alone = t.maps("attention", layers=[0])
    assert isinstance(alone, lm.MixingMap)
    assert torch.equal(alone.scores[0], maps["attention"].scores[0])


def test_maps_explain_what_was_written():
    t = lm.trace(reader(), "The company was founded in Oslo.", answer=" Oslo has trains.")
    each = t.maps("input_gradients").explained
    assert [entry.value for entry in each] == pytest.approx([entry.value for entry in t.explained])
    (value,) = {entry.value for entry in t.maps("gradient_attention").explained}
    assert value == pytest.approx(t[:].log_probability)
    span = t[1:3]
    (value,) = {entry.value for entry in span.maps("gradient_attention").explained}
    assert value == pytest.approx(span.log_probability)
    rows = span.maps(["attention", "alti"])["alti"]
    assert rows.query_positions == [span.positions[0] - 1, span.positions[1] - 1]
    own = t.maps(lm.methods.InputGradients(target=lm.targets.probability()))
    assert {entry.target[:15] for entry in own.explained} == {"probability of "}
    again = dataclasses.replace(t, model=None)
    with pytest.raises(ValueError, match="expected a trace with its model, got one from a file"):
        again.maps("attention")
