"""Test measured residual shares by hand, against the wrapped model's own tensors, and in the record."""

import pytest
import torch

import lens_mix as lm
from lens_mix.residual_shares import residual_shares
from tests.tiny_models import available, bridge, bridge_or_hooked, tokens, wrapped_model

# For each model, the module that reads the sum of residual stream and attention in the wrapped model.
READS_THE_SUM = {
    "gpt2": "transformer.h.{}.ln_2",
    "llama": "model.layers.{}.post_attention_layernorm",
    "bert": "bert.encoder.layer.{}.attention.output.LayerNorm",
}
BLOCKS = {"gpt2": "transformer.h.{}", "llama": "model.layers.{}", "bert": "bert.encoder.layer.{}"}
DOUBLE = torch.float64


def test_by_hand():
    x = torch.tensor([[[3.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 2.0]]])
    a = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]])
    # y = (4, 0): p(x) = 4 − 1, p(a) = 4 − 3. Then equal shares, nothing left of either, and no attention at
    # all.
    assert residual_shares(x, x + a).tolist() == [[0.75, 0.5, 0.5, 1.0]]


@pytest.mark.parametrize("name", sorted(READS_THE_SUM))
def test_equal_the_wrapped_models_own_tensors(name):
    if not available(bridge, name):
        pytest.skip("no TransformerBridge in this TransformerLens")
    plain, seen = wrapped_model(name, DOUBLE), {}
    for layer in range(2):
        for role, template in (("x", BLOCKS[name]), ("y", READS_THE_SUM[name])):
            plain.get_submodule(template.format(layer)).register_forward_pre_hook(
                lambda _, args, kwargs, key=(role, layer): seen.__setitem__(
                    key, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
    model = bridge(name, DOUBLE)
    prompt = tokens(model)[0]
    with torch.no_grad():
        plain(prompt[None])
    x, y = (torch.stack([seen[role, layer][0] for layer in range(2)]) for role in "xy")
    kept, added = (
        (y.norm(1, -1) - (y - x).norm(1, -1)).clamp(min=0),
        (y.norm(1, -1) - x.norm(1, -1)).clamp(min=0),
    )
    expected = kept / (kept + added)
    maps = lm.run(model, prompt, ["attention", "value_zeroing", "attn_res"], residual_shares=True)
    assert set(maps) == {"attention", "value_zeroing", "attn_res"}
    assert torch.allclose(maps["attention"].residual_shares, expected, rtol=0, atol=1e-6)
    assert torch.equal(maps["value_zeroing"].residual_shares, maps["attention"].residual_shares)
    # Its diagonal contains them already.
    assert maps["attn_res"].residual_shares is None
    rows = lm.run(model, prompt, "attention", residual_shares=True, queries=[-1, 2], layers=[1])
    assert torch.allclose(rows.residual_shares, expected[1:, [-1, 2]], rtol=0, atol=1e-6)
    one = lm.run(model, prompt, "attention")
    assert one.residual_shares is None
    assert torch.equal(one.scores, maps["attention"].scores)


@pytest.fixture
def model():
    return bridge_or_hooked("llama", "RMS", DOUBLE)


def test_padding_changes_nothing(model):
    prompts = [tokens(model)[0], tokens(model, seq=4)[1]]
    alone = [lm.run(model, prompt, "attention", residual_shares=True) for prompt in prompts]
    for m, together in zip(
        alone, lm.run_many(model, prompts, "attention", residual_shares=True), strict=True
    ):
        assert torch.allclose(m.residual_shares, together.residual_shares, rtol=0, atol=1e-10)
        rolled = lm.rollout(together, residual="measured")
        assert torch.allclose(rolled.scores.sum(-1), torch.ones_like(rolled.scores[..., 0]))


def test_the_record_carries_them(model, tmp_path):
    m = lm.run(model, tokens(model)[0], "attention", residual_shares=True)
    shares = m.residual_shares
    m.save(tmp_path / "map.safetensors")
    assert torch.equal(lm.MixingMap.load(tmp_path / "map.safetensors").residual_shares, shares)
    assert torch.equal(m.select_layers([1]).residual_shares, shares[1:])
    assert torch.equal(m.select_queries([4, 2]).residual_shares, shares[:, [4, 2]])
    assert torch.equal(m.drop(0).residual_shares, shares[:, 1:])
    assert m.merge_words([[0, 1], [2, 3], [4, 5, 6]]).residual_shares is None
    assert torch.equal(m.merge_heads().residual_shares, shares)


def test_shares_that_are_none(model):
    m = lm.run(model, tokens(model)[0], "attention")
    with pytest.raises(ValueError, match=r"residual_shares: expected shape \(2, 7\) \[layer, query\]"):
        m.replace(residual_shares=torch.zeros(2, 6))
    with pytest.raises(ValueError, match="residual_shares: expected numbers from 0 to 1"):
        m.replace(residual_shares=torch.full((2, 7), torch.nan))
    with pytest.raises(TypeError, match="residual_shares: expected True or False"):
        lm.run(model, tokens(model)[0], "attention", residual_shares="yes")


def test_another_engine_of_the_method_changes_nothing_of_them(model):
    prompt = tokens(model)[0]
    by_hooks = lm.run(model, prompt, "value_zeroing", engine="hooks", residual_shares=True)
    assert by_hooks.provenance["engine"] == "hooks"
    expected = lm.run(model, prompt, "value_zeroing", residual_shares=True)
    assert torch.equal(by_hooks.residual_shares, expected.residual_shares)


@pytest.mark.parametrize("name", ["rollout", "flow", "gradient_rollout", "layer_mean"])
def test_aggregations_of_maps_that_carry_them(model, name):
    """They are not in the map, and change nothing unless they are asked for."""
    carries = lm.run(model, tokens(model)[0], "attention", residual_shares=True)
    aggregate = getattr(lm, name)
    found, plain = aggregate(carries), aggregate(carries.replace(residual_shares=None))
    assert torch.equal(found.scores, plain.scores)
    assert found.residual_shares is None
