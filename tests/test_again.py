"""Test that a map that was saved and loaded can be computed again with identical scores."""

import datetime

import pytest
import torch

import lens_mix as lm
from lens_mix.registry import describe
from tests.tiny_models import available, bridge, hooked_encoder

TOKENS = torch.tensor([5, 9, 12, 7, 30, 21])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("attention", {}),
        (lm.methods.ValueZeroing(metric="euclidean", per_head=True), {"layers": [1], "engine": "hooks"}),
        (
            lm.methods.InputGradients(target=lm.targets.token("w9", of="logit"), score="times_input"),
            {"queries": [-1]},
        ),
        (
            lm.methods.AttentionAttribution(target=lm.targets.logit_difference(9, 12), n_steps=3),
            {"queries": [4, 2]},
        ),
        ("decompx", {"queries": [3]}),
    ],
)
def test_the_same_map_again(model, method, options, tmp_path):
    made = lm.run(model, TOKENS, method, **options)
    made.save(tmp_path / "map.safetensors")
    loaded = lm.MixingMap.load(tmp_path / "map.safetensors")
    again = lm.run_again(model, loaded)
    assert torch.equal(again.scores, made.scores)
    for name in ("tokens", "queries", "layers", "parameters", "kind", "default_query"):
        assert getattr(again, name) == getattr(made, name), name
    assert {**again.provenance, "date": ""} == {**made.provenance, "date": ""}


def test_what_the_record_tells(model):
    record = lm.run(model, "w5 w9 w12", "attention").provenance
    assert record["lens_mix"] == lm.__version__
    assert record["prompt"] == "w5 w9 w12"
    assert record["token_ids"] == model.to_tokens("w5 w9 w12")[0].tolist()
    assert datetime.datetime.fromisoformat(record["date"]) <= datetime.datetime.now(datetime.UTC)
    assert lm.run(model, TOKENS, "attention").provenance["prompt"] is None


def test_what_was_merged_comes_back_whole(model):
    made = lm.run(model, TOKENS, "attention")
    for changed in (lm.rollout(made), made.drop_bos(), made.replace(tokens=["a b"] * 6)):
        assert torch.equal(lm.run_again(model, changed).scores, made.scores)


@pytest.mark.skipif(not (available(bridge, "t5") or available(hooked_encoder)), reason="none of the two")
def test_with_inputs_and_pairs():
    if available(bridge, "t5"):
        try:
            made = lm.run(bridge("t5"), (TOKENS, TOKENS[:3]), "attention", part="decoder")
        except lm.UnsupportedModelError:
            pytest.skip("no T5 in this TransformerLens")
        assert torch.equal(lm.run_again(bridge("t5"), made).scores, made.scores)
        cross = lm.run(bridge("t5"), (TOKENS, TOKENS[:3]), "attention", part="cross")
        assert torch.equal(lm.run_again(bridge("t5"), cross).scores, cross.scores)
        # The rows of the cross map are the target's tokens, so the default row is the target's last.
        assert cross.default_query_position == 2
        joint = lm.aggregation.joint(lm.run(bridge("t5"), (TOKENS, TOKENS[:3]), "attention", part="all"))
        with pytest.raises(ValueError, match=r"got a map of lm.aggregation.joint; compute it again with"):
            lm.run_again(bridge("t5"), joint)
    if available(hooked_encoder):
        types = torch.tensor([0, 0, 0, 1, 1, 1])
        made = lm.run(hooked_encoder(), TOKENS, "attention", token_type_ids=types)
        assert torch.equal(lm.run_again(hooked_encoder(), made).scores, made.scores)


@pytest.mark.skipif(not available(bridge, "gpt2"), reason="no TransformerBridge in this TransformerLens")
def test_a_record_with_the_name_that_a_method_had_before(tmp_path):
    model, method = bridge("gpt2"), lm.methods.TokenPatching(n_exact=2)
    made = lm.run(model, TOKENS, method, queries=[-1])
    made.replace(method="attribution_patching").save(tmp_path / "map.safetensors")
    loaded = lm.MixingMap.load(tmp_path / "map.safetensors")
    again = lm.run_again(model, loaded)
    assert torch.equal(again.scores, made.scores)
    assert (again.method, again.parameters) == ("token_patching", made.parameters)
    assert describe(loaded.method) == describe("token_patching")


def test_refused(model):
    with pytest.raises(ValueError, match=r"made, with token_ids in its provenance, .*lm.run\(model"):
        lm.run_again(model, lm.MixingMap(scores=[[[1.0]]], tokens=["a"]))
    with pytest.raises(TypeError, match="expected a MixingMap"):
        lm.run_again(model, "attention")
    method = lm.methods.GradientAttention(target=lambda logits: logits[:, -1, 3])
    made = lm.run(model, TOKENS, method)
    with pytest.raises(ValueError, match=r"'gradient_attention', got one .*'Custom'.*; give method="):
        lm.run_again(model, made)
    assert torch.equal(lm.run_again(model, made, method).scores, made.scores)


@pytest.mark.parametrize("name", ["token_ids", "target_token_ids", "inputs"])
@pytest.mark.parametrize("value", [{"a": 1}, {}, "x", 5, None, [{"a": 1}], [], {"x": {"y": 1}}])
def test_a_record_of_another_kind(model, name, value):
    """Check the entries of a record that must be numbers: the error says so."""
    made = lm.run(model, TOKENS, "attention")
    if name == "inputs" and value == {}:
        return
    changed = made.replace(provenance={**made.provenance, name: value})
    with pytest.raises((TypeError, ValueError), match=r"expected"):
        lm.run_again(model, changed)
    repr(changed), lm.page(changed), changed.to_dataframe()


def test_names_that_are_no_strings_are_written_as_text():
    made = lm.MixingMap([[[1.0]]], tokens=["a"], provenance={"spans": {(0, 1): {(2, 3): 4}}})
    assert '"(0, 1)"' in made.to_dataframe().attrs["provenance"]
    assert "(0, 1)" in lm.page(made).html


@pytest.mark.parametrize(
    "details", [{"parts": {"a": 1}}, {"parts": [{"a": 1}]}, {"parts": 5}, [1], "x", None, {}]
)
def test_details_of_another_kind(model, details):
    made = lm.run(model, TOKENS, "information_flow_routes")
    changed = made.replace(provenance={**made.provenance, "details": details})
    with pytest.raises(ValueError, match="expected a map of information_flow_routes, got"):
        lm.graphs.information_flow_routes(changed)
    lm.page(changed)
