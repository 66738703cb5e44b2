"""Test models whose weights accelerate keeps on the CPU or on disk: maps without these weights are equal."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import lens_mix as lm
from lens_mix._care.users_hooks import name_user_hooks
from lens_mix.evaluation import randomised
from lens_mix.methods import METHODS
from tests.tiny_models import available, bridge, tokens, wrapped_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]

RUN = (
    "attention",
    "attn_res_w",
    "value_zeroing",
    "attention_attribution",
    "gradient_attention",
    "input_gradients",
    "occlusion",
    "frozen_gradients",
    "gim",
)


def one_layer_on_disk(model, folder):
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder)


OFFLOADS = {
    "one layer on disk": one_layer_on_disk,
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
}


def offloaded(name, how, folder):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = wrapped_model(name)
    model.set_attn_implementation("eager")
    model = OFFLOADS[how](model, str(folder)) or model
    try:
        built = build_bridge_from_module(model, architecture=type(model).__name__, hf_config=model.config)
    except NotImplementedError as problem:  # TransformerLens 3 splits GPT-2's matrices.
        pytest.skip(f"no bridge of it can be built: {problem}")
    return built.eval()


def runs_alone(model, prompt):
    """Skip the test if the model itself fails: in TransformerLens 3, accelerate has no value for a bias."""
    try:
        model(prompt)
    except KeyError as problem:
        pytest.skip(f"the model itself fails: {problem!r}")


CASES = [("llama", how) for how in OFFLOADS] + [(name, "cpu") for name in ("gpt2", "bert", "gemma2")]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_what_runs_is_the_map_of_the_same_model_with_its_weights(name, how, tmp_path):
    plain, model = bridge(name), offloaded(name, how, tmp_path)
    prompt = tokens(plain, 1, 7)
    runs_alone(model, prompt)
    for method in METHODS:
        asked = lm.methods.AttentionAttribution(n_steps=5) if method == "attention_attribution" else method
        try:
            found = lm.run(model, prompt, asked, queries=[-1])
        except lm.UnsupportedModelError as reason:
            assert method not in RUN, reason
            words = ("offloaded", "expected a causal model", "soft cap", "post-norm")
            assert any(word in str(reason) for word in words), reason
            continue
        expected = lm.run(plain, prompt, asked, queries=[-1])
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4)
    assert not name_user_hooks(model)
    # All weights are still offloaded.
    assert any(parameter.is_meta for parameter in model.original_model.parameters())


def test_the_recommended_map_says_why_it_is_another_one(tmp_path):
    model = offloaded("llama", "one layer on disk", tmp_path)
    found = lm.input_map(model, tokens(model, 1, 7))
    assert found.method == "gim"
    assert "the weights of its feed-forward are offloaded" in found.notes[0]
    table = lm.support(model)
    assert "load the model on one device" in table["alti"]
    assert "load the model on one device" in table["alti_logit"]
    assert "blocks" not in str(lm.check(model).verification.hooks_failure or "")


def test_offloaded_weights_are_not_shuffled(tmp_path):
    model = offloaded("llama", "cpu", tmp_path)
    with pytest.raises(lm.UnsupportedModelError, match="got offloaded ones"), randomised(model):
        pass


def test_a_model_of_shapes_alone_is_told_apart():
    with pytest.raises(lm.UnsupportedModelError, match="got a model on 'meta', which has only their shapes"):
        lm.run(bridge("llama").to("meta"), torch.tensor([[1, 2, 3]]), "attention")
