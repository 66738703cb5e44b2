"""Test a corpus on models that are offloaded, in half precision or quantised."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix import corpus
from tests._classes.test_offloading import offloaded
from tests._verification.test_edges import Quantised
from tests.tiny_models import available, bridge, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]


def prompts_of(model, count=4):
    return [tokens(model, 1, 4 + number)[0].tolist() for number in range(count)]


@pytest.mark.parametrize("how", ["cpu", "disk", "one layer on disk"])
def test_an_offloaded_model_has_the_maps_of_the_whole_one(how, tmp_path):
    plain, model = bridge("llama"), offloaded("llama", how, tmp_path / "weights")
    prompts = prompts_of(plain)
    try:
        model(torch.tensor([prompts[0]]))
    except KeyError as problem:
        pytest.skip(f"the model itself fails: {problem!r}")
    methods = ["attention", "value_zeroing"]
    corpus.run(plain, prompts, methods, out=tmp_path / "plain")
    corpus.run(model, prompts, methods, out=tmp_path / "offloaded")
    pairs = zip(corpus.maps(tmp_path / "plain"), corpus.maps(tmp_path / "offloaded"), strict=True)
    for (*which, one), (*same, two) in pairs:
        assert which == same
        torch.testing.assert_close(one.scores, two.scores, atol=1e-5, rtol=0)
    assert corpus.run(model, prompts, methods, out=tmp_path / "offloaded").is_finished
    other = bridge("llama", seed=3)
    with pytest.raises(ValueError, match="weights: "):
        corpus.run(other, prompts, methods, out=tmp_path / "offloaded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision(dtype, tmp_path):
    model = bridge("llama", dtype)
    prompts = prompts_of(model)
    assert corpus.run(model, prompts, "attention", out=tmp_path).failed == 0
    for number, _, mixing in corpus.maps(tmp_path):
        alone = lm.run(model, torch.tensor(prompts[number]), "attention")
        torch.testing.assert_close(mixing.scores, alone.scores.float(), atol=2e-2, rtol=0)
        assert mixing.provenance["dtype"] == str(dtype).removeprefix("torch.")


def test_quantised_weights_say_why_a_method_does_not_run(tmp_path):
    model = bridge("llama")
    for block in model.blocks:
        block.attn.o.set_original_component(Quantised(block.attn.o.original_component))
    prompts = prompts_of(model)
    assert corpus.run(model, prompts, "attention", out=tmp_path / "attention").failed == 0
    with pytest.raises(ValueError, match=r"quantised weights \(Quantised\), which are not read"):
        corpus.run(model, prompts, "value_norm", out=tmp_path / "norms")
