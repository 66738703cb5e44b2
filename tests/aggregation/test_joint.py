"""Test the joint stack of an encoder-decoder against a recursion over source and prefix, and by hand."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.maps.explained import Explained
from lens_mix.method import RESIDUAL_KEY
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge

SOURCE, TARGET = ["a", "b", "c"], ["<s>", "x"]


def by_hand(own=False, encoder_layers=2, decoder_layers=2, heads=(), seed=0):
    """Return maps of the three parts with random rows that do not sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def scores(layers, queries, keys):
        return torch.rand(layers, *heads, queries, keys, generator=generator, dtype=torch.float64) + 0.1

    cross_keys = [*SOURCE, RESIDUAL_KEY] if own else SOURCE
    residual = 0.0 if own else 0.5
    return {
        "encoder": lm.MixingMap(scores(encoder_layers, 3, 3), SOURCE, residual=residual),
        "decoder": lm.MixingMap(scores(decoder_layers, 2, 2).tril(), TARGET, causal=True, residual=residual),
        "cross": lm.MixingMap(
            scores(decoder_layers, 2, len(cross_keys)), TARGET, key_tokens=cross_keys, residual=residual
        ),
    }


def recursion(maps, weights, encoder=True):
    """Return the shares of source and prefix in the target's positions after the last block."""
    rows = {}
    for name, part in maps.items():
        scores = part.scores if part.scores.ndim == 3 else part.scores.mean(1)
        rows[name] = scores / scores.sum(-1, keepdim=True)
    read = torch.eye(3, dtype=torch.float64)
    for layer in rows["encoder"] if encoder else ():
        w = weights["encoder"]
        read = ((1 - w) * layer + w * torch.eye(3, dtype=torch.float64)) @ read
    source, prefix = torch.zeros(2, 3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    for own, cross in zip(rows["decoder"], rows["cross"], strict=True):
        w = weights["decoder"]
        mixed = (1 - w) * own + w * torch.eye(2, dtype=torch.float64)
        source, prefix = mixed @ source, mixed @ prefix
        w = weights["cross"]
        kept = (1 - w) * (cross[:, 3:].sum(-1, keepdim=True)) + w
        source, prefix = kept * source + (1 - w) * cross[:, :3] @ read, kept * prefix
    return torch.cat([source, prefix], dim=1)


@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_its_rollout_is_the_recursion_over_source_and_prefix(own, encoder, heads):
    maps = by_hand(own, heads=heads)
    found = lm.rollout(lm.aggregation.joint(maps, encoder=encoder))
    weight = 0.0 if own else 0.5
    expected = recursion(maps, dict.fromkeys(maps, weight), encoder)
    torch.testing.assert_close(found.scores[-1, 3:], expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(found.scores.sum(-1), torch.ones_like(found.scores[..., 0]))
    assert found.tokens == SOURCE + TARGET
    assert float(found.scores[-1, 3, 4]) == 0  # the first target position sees no later one


def test_one_layer_by_hand():
    maps = {
        "encoder": lm.MixingMap([[[1.0, 1.0], [0.0, 1.0]]], ["a", "b"]),
        "decoder": lm.MixingMap([[[2.0, 0.0], [1.0, 1.0]]], ["x", "y"], causal=True),
        "cross": lm.MixingMap(
            [[[1.0, 0.0, 3.0], [1.0, 1.0, 2.0]]], ["x", "y"], key_tokens=["a", "b", RESIDUAL_KEY]
        ),
    }
    joined = lm.aggregation.joint(maps, residual=0)
    rows = lm.rollout(joined).layer(-1).select_queries([2, 3])
    # x: 1/4 of encoder output a (1/2 a, 1/2 b) and 3/4 of itself; y: 1/4 a + 1/4 b, 1/2 of (x + y) / 2.
    expected = torch.tensor([[0.125, 0.125, 0.75, 0.0], [0.125, 0.375, 0.25, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(rows.scores[0], expected)
    assert joined.provenance["joint"]["layers"] == ["encoder 0", "decoder 0", "cross 0"]
    assert (joined.provenance["joint"]["source"], joined.provenance["joint"]["target"]) == (2, 2)


def test_target_rows_keep_what_they_explain():
    maps = by_hand()
    entries = (Explained("x", 0.5), Explained("y", 0.75))
    maps["cross"] = maps["cross"].replace(explained=entries, provenance={"predicts_next": True})
    joint = lm.aggregation.joint(maps)
    assert joint.row_labels == [*SOURCE, "<s> → x", "x → y"]
    assert lm.rollout(joint).explanation() == "after 'x': 'y' 0.75"
    assert lm.aggregation.joint(by_hand()).explained is None


def test_flow_and_weights_by_part():
    maps = by_hand()
    weights = {"encoder": 0.1, "decoder": 0.2, "cross": 0.7}
    joined = lm.aggregation.joint(maps, residual=weights)
    torch.testing.assert_close(lm.rollout(joined).scores[-1, 3:], recursion(maps, weights))
    assert joined.provenance["joint"]["residual"] == weights
    flows = lm.flow(joined, layer=-1)
    torch.testing.assert_close(flows.scores.sum(-1), torch.ones(1, 5, dtype=torch.float64))
    # Cross-attention leaves 0.7 for the first target position's own token, so no flow to it is larger.
    unscaled = lm.flow(joined, layer=-1, normalize=False).scores[0]
    assert float(unscaled[3, 3]) <= 0.7 + 1e-9


@pytest.mark.parametrize(
    "method", ["attention", "value_norm", "attn_res", "attn_res_ln", "alti", "information_flow_routes"]
)
def test_of_a_model(method):
    model = build_or_skip(bridge, "bart", torch.float64)
    maps = lm.run(model, prompt_of(model), method, part="all")
    joined = lm.aggregation.joint(maps)
    found = lm.rollout(joined)
    assert found.scores.shape == (6, 12, 12)
    torch.testing.assert_close(found.scores.sum(-1), torch.ones(6, 12, dtype=torch.float64))
    assert bool((found.scores[-1, 7:, :7] > 0).all())
    # The encoder's rows are those of the encoder's own rollout.
    torch.testing.assert_close(found.scores[1, :7, :7], lm.rollout(maps["encoder"]).scores[-1])


def test_a_method_that_does_not_say_what_stays_needs_a_weight():
    maps = by_hand()
    maps["cross"] = maps["cross"].replace(residual=0.0)
    with pytest.raises(ValueError, match="residual: expected a weight above 0 for cross-attention"):
        lm.aggregation.joint(maps)
    weights = {"encoder": 0.5, "decoder": 0.5, "cross": 0.5}
    found = lm.rollout(lm.aggregation.joint(maps, residual={"cross": 0.5})).scores[-1, 3:]
    torch.testing.assert_close(found, recursion(maps, weights))


def test_an_empty_row_keeps_itself_or_is_told():
    maps = by_hand()
    scores = maps["cross"].scores.clone()
    scores[1, 0] = 0
    maps["cross"] = maps["cross"].replace(scores=scores)
    joined = lm.aggregation.joint(maps)
    assert joined.scores[-1, 3].tolist() == [0, 0, 0, 1, 0]
    assert any("cross: all-zero rows" in note and "layer 1 query 3" in note for note in joined.notes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda maps: list(maps.values()), TypeError, "maps: expected a dict of three maps"),
        (lambda maps: {"cross": maps["cross"]}, ValueError, "maps: expected one MixingMap for each of"),
        (
            lambda maps: {**maps, "cross": {"a": maps["cross"]}},
            ValueError,
            "maps: expected one MixingMap for each",
        ),
        (
            lambda maps: {**maps, "cross": maps["decoder"]},
            ValueError,
            "maps of cross-attention",
        ),
        (
            lambda maps: {**maps, "encoder": maps["encoder"].replace(tokens=["a", "b", "z"])},
            ValueError,
            "expected the source's tokens of encoder and cross to be the same",
        ),
        (
            lambda maps: {**maps, "decoder": maps["decoder"].select_layers([0])},
            ValueError,
            "expected the layers of decoder and cross to be the same",
        ),
        (
            lambda maps: {**maps, "cross": maps["cross"].select_queries([1])},
            ValueError,
            "maps.'cross'.: expected the rows of all 2 positions",
        ),
        (
            lambda maps: {**maps, "encoder": lm.rollout(maps["encoder"])},
            ValueError,
            "expected layer maps for joint",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        lm.aggregation.joint(change(by_hand()))


def test_formulas_that_know_of_no_other_residual_refuse_it():
    joined = lm.aggregation.joint(by_hand())
    for aggregate in (lm.rollout, lm.flow):
        with pytest.raises(
            ValueError, match="expected maps of one part for receptive_field, got a joint stack"
        ):
            aggregate(joined, receptive_field=True)
    with pytest.raises(ValueError, match="expected maps of one part for gradient_rollout, got a joint stack"):
        lm.gradient_rollout(joined)


def test_weights_that_are_none():
    with pytest.raises(ValueError, match=r"residual: expected some of \['encoder', 'decoder', 'cross'\]"):
        lm.aggregation.joint(by_hand(), residual={"middle": 0.5})
    with pytest.raises(ValueError, match="residual"):
        lm.aggregation.joint(by_hand(), residual=1.5)


def test_a_word_is_no_flag():
    with pytest.raises(TypeError, match="encoder: expected True or False, got 'no'"):
        lm.aggregation.joint({}, encoder="no")
