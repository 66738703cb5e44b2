"""Test rollout against the numbers of the package attention_flow, and its properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_mix.aggregation.rollout import residual_weight, rollout
from lens_mix.maps import MixingMap
from lens_mix.methods import METHODS
from tests.random_maps import REFERENCE, map_of, random_attention, reference_arrays

FLOWS = sorted(path.name for path in REFERENCE.glob("flow_*.npz"))


# ---------------------------------------------------------------------- the paper's own code


def test_the_reference_is_there():
    assert len(FLOWS) == 6


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("field", ["att_heads", "att_mean"])
def test_equals_attention_flow(name, field):
    reference = reference_arrays(name)
    mixing_map = map_of(reference[field], causal="causal" in name)
    assert torch.allclose(rollout(mixing_map).scores, reference["rollout"], rtol=0, atol=1e-12)
    plain = rollout(mixing_map, residual=0).scores
    assert torch.allclose(plain, reference["rollout_nores"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FLOWS)
def test_of_maps_that_hold_the_residual(name):
    reference = reference_arrays(name)
    mixing_map = map_of(reference["res"], method="value_zeroing", causal="causal" in name)
    assert torch.allclose(rollout(mixing_map).scores, reference["rollout"], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- the residual weight


def test_the_residual_follows_the_method():
    assert residual_weight(map_of(), None) == 0.5 == METHODS["attention"].residual
    assert residual_weight(map_of(method="value_zeroing"), None) == 0
    assert residual_weight(map_of(residual=0.2), None) == 0.2
    assert residual_weight(map_of(residual=0.2), 0.7) == 0.7
    assert residual_weight(map_of(method="custom"), 1) == 1.0
    with pytest.raises(ValueError, match=r"residual: expected a number .* method 'custom'.* got None"):
        rollout(map_of(method="custom"))


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_residual_outside_0_to_1_is_refused(wrong):
    with pytest.raises(ValueError, match="residual: expected a number from 0 to 1"):
        rollout(map_of(), residual=wrong)
    for no_number in ("0.5", True, [0.5]):
        with pytest.raises(TypeError, match="residual: expected a number"):
            rollout(map_of(), residual=no_number)


# ---------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 6),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 7),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_rows_sum_to_one_and_stay_causal(layers, heads, size, weight, causal, seed):
    result = rollout(
        map_of(random_attention(layers, heads, size, causal=causal, seed=seed), causal=causal),
        residual=weight,
    )
    scores = result.scores
    assert scores.shape == (layers, size, size)
    assert scores.dtype == torch.float64
    assert torch.allclose(scores.sum(-1), torch.ones(layers, size, dtype=torch.float64))
    assert (scores >= 0).all()
    if causal:
        assert torch.equal(scores, scores.tril())
    assert result.causal == causal


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_raw_scores_of_any_scale_roll_out_alike(seed, weight):
    scores = random_attention(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** (8 * torch.rand(4, 6, 1, generator=generator, dtype=torch.float64) - 4)
    assert torch.allclose(
        rollout(map_of(scores * scales), residual=weight).scores,
        rollout(map_of(scores), residual=weight).scores,
        rtol=0,
        atol=1e-13,
    )


def test_the_order_of_heads_does_not_matter():
    scores = random_attention(heads=4)
    permuted = rollout(map_of(scores[:, [2, 0, 3, 1]])).scores
    assert torch.allclose(permuted, rollout(map_of(scores)).scores, rtol=0, atol=1e-15)


def test_only_the_residual():
    assert torch.equal(rollout(map_of(), residual=1).scores[-1], torch.eye(6, dtype=torch.float64))


def test_half_precision_scores_are_rolled_out_in_float64():
    scores = random_attention().bfloat16()
    result = rollout(map_of(scores)).scores
    assert torch.equal(result, rollout(map_of(scores.double())).scores)


def test_the_map_given_is_unchanged():
    scores = random_attention(heads=2)
    before = scores.clone()
    rollout(map_of(scores), receptive_field=True, drop_bos=True, per_head=True)
    assert torch.equal(scores, before)


# ---------------------------------------------------------------------- options


def test_per_head_is_the_head_times_the_rollout_below():
    scores = random_attention(heads=3)
    result = rollout(map_of(scores), per_head=True)
    merged = rollout(map_of(scores)).scores
    identity = torch.eye(6, dtype=torch.float64)
    assert result.scores.shape == (4, 3, 6, 6)
    assert torch.allclose(result.scores[0, 1], 0.5 * scores[0, 1] + 0.5 * identity)
    assert torch.allclose(result.scores[3, 2], (0.5 * scores[3, 2] + 0.5 * identity) @ merged[2])
    assert torch.allclose(result.scores.mean(1), merged)
    with pytest.raises(ValueError, match="per_head: expected a map with heads"):
        rollout(map_of(), per_head=True)


def test_from_and_to_layers():
    mixing_map = map_of()
    whole = rollout(mixing_map).scores
    upto = rollout(mixing_map, to_layer=2)
    assert torch.equal(upto.scores, whole[:3])
    assert upto.layers == [0, 1, 2]
    assert upto.notes == ()
    upper = rollout(mixing_map, from_layer=2, to_layer=-1)
    assert upper.layers == [2, 3]
    assert torch.allclose(upper.scores[-1] @ whole[1], whole[3])
    assert upper.notes == (
        "rolled out from layer 2 on: keys are the inputs of that layer, not the prompt's tokens",
    )
    assert torch.equal(rollout(mixing_map, from_layer=-2).scores, upper.scores)


def test_from_and_to_layers_are_labels():
    mixing_map = map_of(layers=[5, 6, 7, 8])
    upper = rollout(mixing_map, from_layer=6, to_layer=7)
    assert upper.layers == [6, 7]
    assert torch.equal(upper.scores, rollout(map_of(mixing_map.scores[1:3])).scores)
    with pytest.raises(ValueError, match="layer: layer 0 does not exist; expected 5 to 8"):
        rollout(mixing_map, from_layer=0)
    with pytest.raises(ValueError, match="from_layer: expected to_layer or a layer before"):
        rollout(mixing_map, from_layer=7, to_layer=6)


def test_drop_bos_drops_first_and_lets_rows_sum_to_one():
    scores = random_attention()
    result = rollout(map_of(scores), drop_bos=True)
    rest = scores[:, 1:, 1:]
    rest = rest / rest.sum(-1, keepdim=True)
    assert torch.allclose(result.scores, rollout(map_of(rest)).scores, rtol=0, atol=1e-14)
    assert result.tokens == [" t1", " t2", " t3", " t4", " t5"]


def test_a_row_that_saw_only_the_dropped_token_keeps_itself():
    scores = random_attention(layers=2)
    scores[1, 3] = torch.tensor([1.0, 0, 0, 0, 0, 0])
    with_residual = rollout(map_of(scores), drop_bos=True)
    without = rollout(map_of(scores), drop_bos=True, residual=0)
    below = with_residual.scores[0, 2]
    assert torch.equal(with_residual.scores[1, 2], below)
    assert without.scores[1, 2].abs().sum() == 0
    assert "all-zero rows stay zero: layer 1 query 2" in without.notes
    assert torch.isfinite(without.scores).all()


def test_what_an_all_zero_row_loses_is_lost_above():
    scores = random_attention(layers=2)
    scores[0, 1] = 0
    result = rollout(map_of(scores, method="value_zeroing"))
    assert torch.allclose(1 - result.scores[1].sum(-1), scores[1, :, 1])


# ---------------------------------------------------------------------- the record that comes back


def test_the_record():
    before = map_of(random_attention(heads=2), parameters={"per_head": True}, provenance={"model": "gpt2"})
    after = rollout(before, receptive_field=True)
    assert (after.kind, after.method, after.residual) == ("input", "attention", 0.5)
    assert after.parameters == {"per_head": True}
    assert after.provenance == {
        "model": "gpt2",
        "aggregation": {
            "name": "rollout",
            "residual": 0.5,
            "receptive_field": True,
            "per_head": False,
            "drop_bos": False,
        },
    }
    assert after.tokens == before.tokens
    assert "attention rollout: input map" in repr(after)


def test_the_mask_of_the_result_is_what_can_be_reached():
    window = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-2)
    result = rollout(map_of(random_attention() * window, mask=window))
    for place in range(4):
        reached = torch.ones(6, 6, dtype=torch.bool).tril()
        assert torch.equal(result.visible()[place], reached & ~reached.tril(-(place + 2)))
        assert torch.equal(result.scores[place] > 0, result.visible()[place])
    assert rollout(map_of()).mask is None


# ---------------------------------------------------------------------- refused


def test_refused():
    with pytest.raises(TypeError, match="mixing_map: expected a MixingMap, got Tensor"):
        rollout(random_attention())
    with pytest.raises(ValueError, match="got kind 'input'"):
        rollout(rollout(map_of()))
    cross = MixingMap(torch.rand(2, 3, 4), ["a"] * 3, "attention", key_tokens=["b"] * 4)
    with pytest.raises(ValueError, match="4 other keys for 3 tokens"):
        rollout(cross)
    with pytest.raises(ValueError, match=r"follow one another, got layers \[0, 2, 3, 4\]"):
        rollout(map_of(layers=[0, 2, 3, 4]))
    with pytest.raises(ValueError, match="none below 0"):
        rollout(map_of(-random_attention()))


# ---------------------------------------------------------------------- how much is mixed


def test_measured_shares_are_mixed_in_row_by_row():
    mixing_map = map_of(random_attention(layers=2, size=4), causal=True).replace(
        residual_shares=[[1.0, 0.5, 0.25, 0.0], [0.0, 0.1, 0.2, 0.9]]
    )
    first, second = (
        torch.stack(
            [
                (1 - share) * row + share * torch.eye(4, dtype=torch.float64)[place]
                for place, (row, share) in enumerate(zip(rows, shares, strict=True))
            ]
        )
        for rows, shares in zip(
            mixing_map.normalized().scores.double(), mixing_map.residual_shares.tolist(), strict=True
        )
    )
    result = rollout(mixing_map, residual="measured")
    assert torch.allclose(result.scores, torch.stack([first, second @ first]), rtol=0, atol=1e-7)
    assert result.provenance["aggregation"]["residual"] == "measured"
    assert result.residual is None


def test_measured_shares_where_nothing_was_measured():
    with pytest.raises(ValueError, match="residual_shares=True"):
        rollout(map_of(), residual="measured")
    with pytest.raises(
        TypeError, match="residual: expected a number from 0 to 1, or 'measured', got 'measure'"
    ):
        rollout(map_of(), residual="measure")
    holding = map_of(method="attn_res", residual=0.0)
    assert torch.equal(rollout(holding, residual="measured").scores, rollout(holding).scores)


@pytest.mark.parametrize(("total", "weight"), [(0, 1.0), (0.5, 0.75), (2, 0.0), (5, 0.0)])
def test_a_total_of_mixing_is_a_weight_by_the_number_of_layers(total, weight):
    mixing_map = map_of(random_attention(layers=3, size=4), causal=True)
    result = rollout(mixing_map, total_mixing=total, to_layer=1)
    assert torch.equal(result.scores, rollout(mixing_map, residual=weight, to_layer=1).scores)
    assert result.residual == weight
    # `total_mixing` sets the weight, so a method without one is accepted.
    custom = mixing_map.replace(method="custom")
    assert rollout(custom, total_mixing=total, to_layer=1).residual == weight


def test_a_total_of_mixing_that_is_none():
    with pytest.raises(ValueError, match="total_mixing: expected residual=None"):
        rollout(map_of(), total_mixing=1, residual=0.5)
    with pytest.raises(ValueError, match="total_mixing: expected a finite number, 0 or more"):
        rollout(map_of(), total_mixing=-1)
