"""Test models of nnsight, whose model of transformers is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from tests.matrix import build_or_skip
from tests.tiny_models import available, bridge, toy_tokenizer, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")


class LanguageModel:
    """What nnsight 0.8 returns: an object that is not a module, with the model in `_module`."""

    def __init__(self, model: Any) -> None:
        self._module = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def given(kind: str, model: Any) -> Any:
    """Return a model in nnsight's own object, if it is installed, or in one that is like it."""
    if kind == "stand-in":
        return LanguageModel(model)
    return pytest.importorskip("nnsight").NNsight(model)


@pytest.mark.parametrize("kind", ["stand-in", "nnsight"])
@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge in this TransformerLens")
def test_the_model_inside_is_wrapped(kind):
    prompt = torch.arange(5, 12)[None]
    inside = build_or_skip(wrapped_model, "gpt2", torch.float64)
    nn_model = given(kind, inside)
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = build_bridge_from_module(
        nn_model._module, architecture="GPT2LMHeadModel", hf_config=inside.config, dtype=torch.float64
    )
    expected = lm.run(bridge("gpt2", torch.float64), prompt, "value_zeroing")
    got = lm.run(model, prompt, "value_zeroing")
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["stand-in", "nnsight"])
@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_errors_name_the_model_inside(kind):
    nn_model = given(kind, build_or_skip(wrapped_model, "bert"))
    reason = r"It contains a BertForMaskedLM: give model._module to lm.wrap, or to TransformerBridge"
    with pytest.raises(TypeError, match=f"model: expected a TransformerLens model .*{reason}"):
        lm.run(nn_model, "a", "attention")
    with pytest.raises(TypeError, match=f"hf_model: expected a model of transformers, got .*{reason}"):
        lm.wrap(nn_model)
    model = lm.wrap(nn_model._module, toy_tokenizer())
    assert lm.run(model, torch.tensor([[3, 4, 5]]), "value_zeroing").scores.shape == (2, 3, 3)
