"""Test that every method agrees with its oracle on every model, or raises an error with the reason."""

from __future__ import annotations

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._inputs.batches import pad
from lens_mix._inputs.prompts import pad_token, read_prompt
from lens_mix._model.model import Lens
from lens_mix.methods import METHODS
from tests.matrix import cases, every_case, model_of, prompt_of, zeroed

CASES = {case.label: case for case in cases(cross=True)}
RUNNING = [label for label, case in CASES.items() if case.refusal is None]
pytestmark = pytest.mark.filterwarnings("ignore")


def default_method(name):
    """Return the method without arguments, or with a simple one if it needs an argument."""
    try:
        return METHODS[name]()
    except (TypeError, ValueError):
        return METHODS[name](target=lm.targets.predicted())


def run_or_reason(model, case, method, prompt=None, **options):
    """Return the map, or the message of an `UnsupportedModelError`; other errors are failures."""
    try:
        return lm.run(
            model, prompt_of(model) if prompt is None else prompt, method, part=case.part, **options
        ), None
    except lm.UnsupportedModelError as refusal:
        return None, str(refusal)


@pytest.mark.parametrize("label", CASES)
def test_refused_models_say_why_and_all_others_are_proven(label):
    case = CASES[label]
    model = model_of(CASES[label], torch.float64)
    if case.refusal is not None:
        with pytest.raises(lm.UnsupportedModelError, match=case.refusal):
            lm.run(model, prompt_of(model), "attention", part=case.part)
        return
    verification = lm.check(model, prompt_of(model), part=case.part).verification
    assert verification.hooks_failure is None
    assert max(entry.error for entry in verification.components if entry.error is not None) < 1e-12
    if {anatomy.feed_forward_kind for anatomy in verification.anatomy.values()} == {"mixture"}:
        assert "mixture feed-forward" in verification.algebra_failure
    else:
        assert verification.algebra_failure is None


def attention_oracle(model, case, prompt):
    """Return the patterns of TransformerLens's own cache, with eager attention so that they exist."""
    lens = Lens(model, case.part)
    batch = pad([read_prompt(model, lens.model_class, prompt)], pad_token(model), "right")
    store = {}

    def keep(tensor, hook, name):
        store[name] = tensor.detach().clone()

    names = [lens.stack.hook_name("pattern", layer) for layer in range(lens.n_layers)]
    hooks = [(name, functools.partial(keep, name=name)) for name in names]
    with lens.evaluation_mode(), model.hooks(fwd_hooks=hooks):
        lens.forward(batch)
    return torch.stack([store[name][0].mean(dim=0) for name in names])


def value_zeroing_oracle(model, case, prompt):
    """Compute whole forward passes, one per layer and position, and read outputs by torch's hooks."""
    lens = Lens(model, case.part)
    batch = pad([read_prompt(model, lens.model_class, prompt)], pad_token(model), "right")
    positions = batch.real_keys(lens.stack.name).shape[1]
    rows = []
    for layer in range(lens.n_layers):
        name = f"{lens.stack.attention_template.format(layer=layer)}.hook_v"
        clean = _block_output(lens, batch, layer, [])
        columns = []
        for key in range(positions):
            zero = (name, lambda values, hook, key=key: zeroed(values, key))
            columns.append(
                1 - torch.cosine_similarity(clean, _block_output(lens, batch, layer, [zero]), dim=-1)
            )
        rows.append(torch.stack(columns, dim=-1))
    return torch.stack(rows)


def _block_output(lens, batch, layer, fwd_hooks):
    kept = []

    def keep(module, arguments, output):
        kept.append((output[0] if isinstance(output, tuple) else output).detach()[0])

    handle = lens.stack.blocks[layer].register_forward_hook(keep)
    try:
        with lens.evaluation_mode(), lens.model.hooks(fwd_hooks=fwd_hooks):
            lens.forward(batch)
    finally:
        handle.remove()
    return kept[0]


ORACLES = {"attention": attention_oracle, "value_zeroing": value_zeroing_oracle}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("label", CASES)
def test_agrees_with_an_oracle_that_shares_no_code(label, name):
    case = CASES[label]
    model = model_of(CASES[label], torch.float64)
    if case.refusal is not None:
        assert run_or_reason(model, case, name)[1]
        return
    for engine in METHODS[name].engines:
        if engine == "recorded":
            engine = "auto"
        prompt = prompt_of(model)
        m, reason = run_or_reason(model, case, name, prompt, engine=engine)
        if m is None:
            assert engine == "algebra"
            assert reason
            continue
        torch.testing.assert_close(m.scores, ORACLES[name](model, case, prompt), atol=1e-10, rtol=0)


def test_run_and_support_agree_whichever_is_asked_first():
    for label in {"bridge gemma2", "HookedEncoderDecoder encoder", "bridge t5 encoder"} & {*RUNNING}:
        case = CASES[label]
        model = case.build()
        ran = run_or_reason(model, case, "alti_logit")[1]
        assert lm.support(model, part=case.part)["alti_logit"] == ran
        assert "unembedding: " in ran


def test_left_padding_is_not_refused_everywhere():
    """Check that left padding works somewhere, because the test above passes if all models raise errors."""
    for label in {"bridge gpt2", "HookedTransformer LN"} & {*RUNNING}:
        model = model_of(CASES[label], torch.float32)
        prompts = [prompt_of(model, seq, seed) for seq, seed in ((7, 1), (4, 2))]
        maps = list(lm.run_many(model, prompts, "value_zeroing", padding_side="left"))
        assert [m.scores.shape[-1] for m in maps] == [7, 4]


def test_the_matrix_covers_what_was_promised():
    promised = (
        "gpt2 llama mistral gemma gemma2 gemma3 qwen2 qwen3 gpt_neox gpt_neox_seq gpt_neo gptj opt phi phi3 "
        "bloom mpt falcon_mqa olmo olmo2 granite gpt_bigcode stablelm cohere mixtral bert roberta"
    ).split()
    labels = {case.label for case in every_case()}
    assert {f"bridge {name}" for name in promised} <= labels
    assert {"bridge t5 encoder", "bridge bart encoder", "HookedEncoder"} <= labels
    assert "HookedTransformer sandwich" in labels
