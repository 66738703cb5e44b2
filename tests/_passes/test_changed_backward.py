"""Test the rules of a changed backward pass one by one."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix._model.anatomy import Norm
from lens_mix._model.model import Lens
from lens_mix._passes.changed_backward import ChangedRules, Rules, changed_backward
from lens_mix.hooks import record
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, gpt2_like, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_with_its_scale_held_is_linear(kind):
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = Norm(kind, weight[0], weight[1], 1e-5)
    leaf = x.clone().requires_grad_(True)
    out = norm.linear_at(leaf)(leaf)
    torch.testing.assert_close(out + norm.bias, norm(x))
    (gradient,) = torch.autograd.grad(out[:, 2].sum(), leaf)
    torch.testing.assert_close((gradient * x).sum(-1), out.detach()[:, 2])


def test_the_streams_of_a_pass_are_kept_from_a_leaf_to_the_last_block():
    model = gpt2_like(torch.float64)
    lens, ids = Lens(model), tokens(model, 1)
    anatomies = list(lm.check(model).verification.anatomy.values())
    changed = ChangedRules(lens, anatomies, Rules(), after=[1, lens.n_layers], leaf=True)
    seen = {}
    with lens.evaluation_mode(gradients=True), changed.applied([record(seen, "blocks.1.hook_resid_pre")]):
        model(ids)
        first = dict(changed.streams)
        with torch.no_grad():
            model(ids)
    assert sorted(first) == [0, 1, lens.n_layers]
    assert all(changed.streams[number] is stream for number, stream in first.items())
    assert first[0].is_leaf
    torch.testing.assert_close(seen["blocks.1.hook_resid_pre"], first[1].detach())
    with pytest.raises(lm.UnsupportedModelError, match="expected a gradient through"):
        changed.require_gradients()
    (gradient,) = torch.autograd.grad(model.ln_final(first[lens.n_layers]).square().sum(), first[0])
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("name", ["gpt_oss", "llama", "opt"])
def test_without_gradients_nothing_is_changed_and_idle_rules_are_an_error(name):
    model = build_or_skip(bridge, name)
    lens = Lens(model)
    anatomies = list(lm.check(model).verification.anatomy.values())
    clean = model(tokens(model, 1))
    with (
        lens.evaluation_mode(),
        pytest.raises(lm.UnsupportedModelError, match=r"gradient through ScalePatternGradient\(blocks.0"),
        changed_backward(lens, anatomies, lm.methods.Gim()),
    ):
        assert torch.allclose(model(tokens(model, 1), use_cache=False), clean, atol=1e-5)


def test_a_norm_that_is_not_as_it_was_read_is_refused(monkeypatch):
    """Add a user hook to the output of a norm, which the linearised norm does not include."""
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    before = lm.run(model, ids, "gim", queries=[-1]).scores
    monkeypatch.setattr(Norm, "__call__", lambda self, x: 1.5 * self.linear_at(x)(x))
    with pytest.raises(lm.UnsupportedModelError, match="expected its components to give its output within"):
        lm.run(model, ids, "gim", queries=[-1])
    monkeypatch.undo()
    torch.testing.assert_close(lm.run(model, ids, "gim", queries=[-1]).scores, before)


def _share_of_input(module, factor):
    """Replace forward so that a share of the output, 1 − factor, does not depend on the module's input."""
    forward = module.forward

    def shared(x, *args, **kwargs):
        moving, fixed = forward(x, *args, **kwargs), forward(x.detach(), *args, **kwargs)
        return factor * moving + (1 - factor) * fixed

    vars(module)["forward"] = shared


# The classes of the modules that compute gate and up.
GATED = {
    "mixtral": {"MixtralExperts"},
    "gpt_oss": {"GptOssExperts"},
    "qwen2_moe": {"Qwen2MoeExperts", "Qwen2MoeMLP"},
    "llama4": {"Llama4TextExperts", "Llama4TextMLP"},
    "glm4_moe": {"Glm4MoeExperts", "Glm4MoeMLP"},
    "lfm2_moe": {"Lfm2MoeExperts", "Lfm2MoeMLP"},
    "granite_moe": {"GraniteMoeExperts"},
    "llama": {"LlamaMLP"},
    "phi3": {"JointGateUpMLPBridge"},
    "modernbert_decoder": {"ModernBertDecoderMLP"},
    "t5_gated decoder": {"T5DenseGatedActDense"},
}


@pytest.mark.parametrize("label", GATED)
def test_gate_and_up_get_a_share_in_every_kind_of_gated_feed_forward(label):
    """A share of the gradients of gate and up is that of their input. A router has all of its own."""
    name, _, part = label.partition(" ")
    if part and transformer_lens_version() < (4,):
        pytest.skip("only TransformerLens 4 runs T5 on a TransformerBridge")
    model, expected = (build_or_skip(bridge, name, torch.float64) for _ in range(2))
    ids, where = prompt_of(model), {"part": part or None, "queries": [-1]}
    modules = [each for each in expected.modules() if type(each).__name__ in GATED[label]]
    assert modules
    for module in modules:
        _share_of_input(module, 0.3)
    found = lm.run(model, ids, lm.methods.Gim(gate_up=0.3), **where).scores
    by_definition = lm.run(expected, ids, lm.methods.Gim(gate_up=1), **where).scores
    # The router of a mixture is float32.
    torch.testing.assert_close(found, by_definition, atol=1e-7, rtol=0)
    assert float((found - lm.run(model, ids, lm.methods.Gim(gate_up=1), **where).scores).abs().max()) > 1e-5


def test_experts_that_are_modules_get_a_share():
    model, expected = (build_or_skip(hooked_transformer, "mixture", torch.float64) for _ in range(2))
    ids = tokens(model, 1)
    for block in expected.blocks:
        for expert in block.mlp.experts:
            _share_of_input(expert, 0.3)
    found = lm.run(model, ids, lm.methods.Gim(gate_up=0.3), queries=[-1]).scores
    by_definition = lm.run(expected, ids, lm.methods.Gim(gate_up=1), queries=[-1]).scores
    torch.testing.assert_close(found, by_definition, atol=1e-7, rtol=0)


def test_a_feed_forward_without_a_gate_has_no_rule():
    for name in ("gpt2", "apertus"):
        model = build_or_skip(bridge, name, torch.float64)
        first, second = (lm.run(model, tokens(model, 1), lm.methods.Gim(gate_up=x)).scores for x in (0.5, 1))
        assert torch.equal(first, second)


def test_a_feed_forward_that_cannot_be_read_is_an_error():
    model = build_or_skip(bridge, "mixtral")
    model.blocks[1].mlp.original_component.another = torch.nn.Linear(4, 4)
    ids = tokens(model, 1)
    with pytest.raises(lm.UnsupportedModelError, match=r"gate_up: expected .*blocks.1.mlp.*; gate_up=1"):
        lm.run(model, ids, lm.methods.Gim(), queries=[-1])
    assert bool(torch.isfinite(lm.run(model, ids, lm.methods.Gim(gate_up=1), queries=[-1]).scores).all())
