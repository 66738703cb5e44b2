"""The verification of the unembedding: when it is made, and which logits can't be split by token."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks import ends
from lens_mix._blocks.components import UNEMBEDDING
from lens_mix._blocks.verification_record import UNEMBEDDING_UNVERIFIED, Verification
from lens_mix._verification.engines import find_reason_against, needs_unembedding
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import available, bridge, hooked_transformer

pytestmark = pytest.mark.filterwarnings("ignore")
CAPPED = [(bridge, "gemma2", {}), (hooked_transformer, "RMS", {"output_logits_soft_cap": 30.0})]


@pytest.fixture(params=["gpt2", "LN"])
def model(request):
    return build_or_skip(bridge if request.param == "gpt2" else hooked_transformer, request.param)


@pytest.mark.parametrize(("factory", "name", "config"), CAPPED, ids=["bridge", "HookedTransformer"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 20.0])
def test_a_soft_cap_is_refused_however_small_the_logits(factory, name, config, size):
    capped = build_or_skip(factory, name, **config)
    with torch.no_grad():
        capped.W_U.mul_(size)
    reason = lm.support(capped)["alti_logit"]
    assert reason == (
        "alti_logit can't run on this model: algebra: unembedding: expected logits = final norm, then "
        "unembedding; this model's go through a soft cap at 30, which can't be split by token"
    )
    with pytest.raises(lm.UnsupportedModelError) as refused:
        lm.run(capped, prompt_of(capped), "alti_logit")
    assert str(refused.value) == reason
    assert lm.support(capped)["alti"] == "ok (algebra)"


def test_a_changed_logit_is_refused_by_support_and_run(model):
    model.add_hook(
        "unembed.hook_out" if hasattr(model, "original_model") else "ln_final.hook_normalized", _bend
    )
    reason = lm.support(model)["alti_logit"]
    expected = ("unembedding: expected logits = final norm", "final norm: expected its components")
    assert any(text in reason for text in expected)
    with pytest.raises(lm.UnsupportedModelError) as refused:
        lm.run(model, prompt_of(model), "alti_logit")
    assert str(refused.value).startswith(f"{reason}; these hooks are on the model: ")


def _bend(tensor, hook):
    return tensor + 0.1 * tensor.abs()


def test_the_unembedding_is_verified_only_for_methods_that_split_logits(model, monkeypatch):
    looked = []
    original = ends.read_unembedding
    monkeypatch.setattr("lens_mix._blocks.ends.read_unembedding", lambda *a: looked.append(1) or original(*a))
    lm.run(model, prompt_of(model), ["attention", "value_zeroing", "alti", "decompx"])
    assert looked == []
    lm.run(model, prompt_of(model), "alti_logit")
    assert len(looked) == 2  # The verification and this prompt's pass call it once each.
    lm.run(model, prompt_of(model), "alti_logit")
    assert len(looked) == 3
    assert needs_unembedding([lm.methods.Alti(), lm.methods.AltiLogit()])
    assert not needs_unembedding(
        [lm.methods.AttentionWeights(), lm.methods.ValueZeroing(), lm.methods.Alti(), lm.methods.DecompX()]
    )


def test_an_unembedding_that_was_not_compared_is_not_verified():
    verification = Verification((), {}, True)
    assert UNEMBEDDING in lm.methods.AltiLogit.needs
    assert find_reason_against(verification, "algebra", lm.methods.AltiLogit()) == UNEMBEDDING_UNVERIFIED
    assert find_reason_against(verification, "algebra", lm.methods.Alti()) is None


def test_check_says_it(model):
    assert "unembedding: verified" in str(lm.check(model, prompt_of(model)))
    capped = build_or_skip(bridge, "gemma2")
    assert "unembedding: expected logits" in str(lm.check(capped, prompt_of(capped)))
    assert lm.check(capped, prompt_of(capped)).ok


@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_a_classifier_has_no_logits_of_every_position():
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import BertConfig, BertForNextSentencePrediction

    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = BertForNextSentencePrediction._from_config(config, attn_implementation="eager")
    classifier = build_bridge_from_module(model, architecture="BertForMaskedLM", hf_config=config).eval()
    support = lm.support(classifier)
    assert support["value_zeroing"] == "ok (algebra)"
    assert "can't run on this model" in support["alti_logit"]
    with pytest.raises(lm.UnsupportedModelError, match="alti_logit can't run on this model"):
        lm.run(classifier, torch.tensor([1, 5, 6]), "alti_logit")
