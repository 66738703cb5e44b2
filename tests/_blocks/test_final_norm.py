"""Test models without a mapped final norm: either the verification finds that there is none, or it fails."""

from __future__ import annotations

import copy

import pytest
import torch

import lens_mix as lm
from lens_mix._model.model import Lens
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, gpt2_like, hooked_encoder, hooked_transformer

pytestmark = pytest.mark.filterwarnings("ignore")

AFTER = lm.targets.head(lambda resid: resid[:, -1].sum(-1), after_final_norm=True)
BEFORE = lm.targets.head(lambda resid: resid[:, -1].sum(-1))
READ_IT = [
    (lm.methods.ValueZeroing(last_layer="after_final_norm"), "algebra", lm.methods.ValueZeroing()),
    (lm.methods.ValueZeroing(last_layer="after_final_norm"), "hooks", lm.methods.ValueZeroing()),
    (lm.methods.AtbFfResLn(next_norm=True), "auto", None),
    (lm.methods.GlobEnc(), "auto", None),
    (
        lm.methods.AttentionAttribution(target=AFTER, n_steps=2),
        "auto",
        lm.methods.AttentionAttribution(BEFORE, n_steps=2),
    ),
]
EACH = pytest.mark.parametrize(
    ("method", "engine", "without"), READ_IT, ids=[f"{m.name} {engine}" for m, engine, _ in READ_IT]
)


@EACH
def test_a_norm_that_is_not_mapped_is_not_taken_as_none(method, engine, without):
    """Use OPT with a projection after its final norm. The Bridge has hook points for neither."""
    model = build_or_skip(bridge, "opt_projected")
    with pytest.raises(lm.UnsupportedModelError, match="final norm: expected the model's own"):
        lm.run(model, prompt_of(model), method, engine=engine)
    if without is not None:
        lm.run(model, prompt_of(model), without, engine=engine)
    if method.name != "attention_attribution":
        lm.run(model, prompt_of(model), method, engine=engine, layers=[0])


@EACH
@pytest.mark.parametrize(
    ("name", "stack"), [("gpt2", None), ("t5", "encoder"), ("t5", "decoder"), ("llama", None)]
)
def test_nor_is_one_that_was_lost(name, stack, method, engine, without, monkeypatch):
    model = gpt2_like() if name == "gpt2" else build_or_skip(bridge, name)
    monkeypatch.setattr(Lens, "final_norm", lambda lens: None)
    # Bridges before TransformerLens 4 cannot run T5; cross-attention has no algebra in most methods.
    refusal = "final norm: expected the model's own|cannot run T5|cross-attention"
    with pytest.raises(lm.UnsupportedModelError, match=refusal):
        lm.run(model, prompt_of(model), method, engine=engine, part=stack)


@EACH
@pytest.mark.parametrize(
    ("factory", "arguments", "stack"),
    [
        (hooked_transformer, ("none",), None),
        (hooked_encoder, (), None),
        (bridge, ("bert",), None),
        (bridge, ("roberta",), None),
        (bridge, ("bart",), "encoder"),
        (bridge, ("bart",), "decoder"),
    ],
)
def test_a_model_without_one_needs_none(factory, arguments, stack, method, engine, without):
    model = build_or_skip(factory, *arguments)
    try:
        found = lm.run(model, prompt_of(model), method, engine=engine, part=stack).scores
    except lm.UnsupportedModelError as problem:
        assert "cross-attention" in str(problem)
        return
    if without is not None:
        plain = lm.run(model, prompt_of(model), without, engine=engine, part=stack).scores
        torch.testing.assert_close(found, plain)


def test_a_native_bridge_without_norms_needs_none():
    try:
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        pytest.skip("no TransformerBridge in this TransformerLens")
    sizes = {"d_model": 24, "d_head": 6, "n_heads": 4, "n_layers": 2, "n_ctx": 32, "d_vocab": 50, "d_mlp": 48}
    config = TransformerBridgeConfig(**sizes, act_fn="gelu", normalization_type=None, seed=0)
    model = TransformerBridge.boot_native(config).eval()
    found = lm.run(model, prompt_of(model), lm.methods.ValueZeroing(last_layer="after_final_norm"))
    torch.testing.assert_close(found.scores, lm.run(model, prompt_of(model), "value_zeroing").scores)


def test_support_says_what_run_does():
    model = build_or_skip(bridge, "opt_projected")
    assert lm.support(model)["globenc"].startswith("final norm: expected the model's own")
    assert lm.support(model)["attn_res_ln"] == "ok (algebra)"


@EACH
def test_a_mapped_norm_has_to_read_the_last_residual(method, engine, without):
    """Insert a projection that reverses the axes between the last block and the final norm."""
    model = gpt2_like()
    norm = model.ln_final
    norm.register_forward_pre_hook(lambda module, args: (args[0].flip(-1), *args[1:]))
    words = r"final norm: expected the norm that TransformerLens maps to read the last block's output, but it"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, prompt_of(model), method, engine=engine)
    if without is not None:
        lm.run(model, prompt_of(model), without, engine=engine)


def test_nor_one_that_is_never_asked(monkeypatch):
    model = gpt2_like()
    spare = copy.deepcopy(model.ln_final)
    monkeypatch.setattr(Lens, "final_norm", lambda lens: spare)
    with pytest.raises(lm.UnsupportedModelError, match="output, but it never ran"):
        lm.run(model, prompt_of(model), "globenc")
    assert "never ran" in lm.support(model)["alti_logit"]
