"""Test attention flow against the numbers of the package attention_flow, and its properties."""

import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix.aggregation import flow, rollout
from lens_mix.aggregation.flow import _compute_even_flow
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from tests.matrix import slow
from tests.random_maps import REFERENCE, map_of, random_attention, reference_arrays

FLOWS = sorted(path.name for path in REFERENCE.glob("flow_*.npz"))
SOLVERS = [("scipy", 1e-7), ("networkx", 1e-12)]


def even(layers, size, causal=True):
    allowed = torch.ones(layers, size, size, dtype=torch.float64)
    allowed = allowed.tril() if causal else allowed
    return allowed / allowed.sum(-1, keepdim=True)


def close(left, right, atol=1e-7):
    return torch.allclose(left, right, rtol=0, atol=atol)


# ---------------------------------------------------------------------- the paper's own code


def test_the_reference_is_there():
    assert len(FLOWS) == 6


@pytest.mark.parametrize(
    ("solver", "atol", "name"),
    # networkx is slow, so the deepest stack is a slow test; shallow stacks test the same code.
    [
        slow(*solver, name) if solver[0] == "networkx" and "L12" in name else (*solver, name)
        for solver in SOLVERS
        for name in FLOWS
    ],
)
def test_equals_attention_flow(name, solver, atol):
    reference = reference_arrays(name)
    raw = flow(map_of(reference["att_heads"], causal="causal" in name), solver=solver, normalize=False)
    assert close(raw.scores[-1], reference["flow_raw_last"], atol)
    assert close(raw.normalized().scores, reference["flow_all_layers"], atol)
    assert close(raw.normalized().scores[-1], reference["flow_last"], atol)


@pytest.mark.parametrize("name", FLOWS)
def test_equals_attention_flow_by_default_and_with_heads_merged(name):
    reference = reference_arrays(name)
    found = flow(map_of(reference["att_mean"], causal="causal" in name))
    assert close(found.scores, reference["flow_all_layers"])


@pytest.mark.parametrize("name", FLOWS)
def test_of_maps_that_hold_the_residual(name):
    reference = reference_arrays(name)
    mixing_map = map_of(reference["res"], method="value_zeroing", causal="causal" in name)
    assert close(flow(mixing_map).scores, reference["flow_all_layers"])


# ---------------------------------------------------------------------- the record


def test_the_record_says_what_it_is():
    found = lm.flow(map_of(random_attention(heads=3), notes=("kept",)), layer=2)
    assert isinstance(found, MixingMap)
    assert (found.kind, found.causal, found.residual, found.layers) == ("input", True, 0.5, [2])
    assert found.scores.shape == (1, 6, 6)
    assert found.scores.dtype == torch.float64
    aggregation = found.provenance["aggregation"]
    assert aggregation["name"] == "flow"
    assert (aggregation["residual"], aggregation["normalize"], aggregation["layer"]) == (0.5, True, 2)
    assert found.notes[0] == "kept"
    assert "flow" in repr(found)
    assert "abnar-zuidema-2020" in lm.citation("flow")


def test_it_survives_saving(tmp_path):
    found = flow(map_of(), queries=[-1])
    found.save(tmp_path / "flow.safetensors")
    again = MixingMap.load(tmp_path / "flow.safetensors")
    assert torch.equal(again.scores, found.scores)
    assert again.provenance == found.provenance


def test_a_chosen_layer_is_that_layer_of_all():
    mixing_map = map_of(random_attention(layers=5))
    every = flow(mixing_map)
    for layer in (0, 1, 3, -1):
        alone = flow(mixing_map, layer=layer)
        assert torch.equal(alone.scores[0], every.layer(layer).scores[0])
        assert alone.layers == every.layer(layer).layers


def test_chosen_queries_keep_what_they_explain():
    explained = [Explained(f"t{position + 1}", 0.5) for position in range(6)]
    mixing_map = map_of(random_attention(layers=3)).replace(explained=explained)
    assert flow(mixing_map, queries=[-1, 2]).explained == (explained[5], explained[2])
    assert flow(mixing_map).explained == tuple(explained)


def test_chosen_queries_are_those_rows():
    window = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-2)
    scores = random_attention(layers=3)
    for mixing_map in (map_of(scores), map_of(scores * window, mask=window)):
        every = flow(mixing_map)
        cut = flow(mixing_map, queries=[-1, 2])
        assert torch.equal(cut.scores, every.scores[:, [5, 2]])
        assert torch.equal(cut.visible(), every.visible()[:, [5, 2]])
        assert (cut.queries, cut.tokens) == ([5, 2], every.tokens)
        assert cut.keys_are_tokens
        assert cut.causal
        assert [cut.top(3, query=query) for query in (" t5", 2)] == [every.top(3), every.top(3, query=2)]
        assert torch.equal(flow(mixing_map, queries=-1).scores[:, 0], every.scores[:, 5])


def test_zero_above_the_diagonal_and_rows_that_sum_to_1():
    for receptive_field in (False, True):
        scores = flow(map_of(random_attention(layers=6)), receptive_field=receptive_field).scores
        assert (scores.triu(1) == 0).all()
        assert close(scores.sum(-1), torch.ones(6, 6, dtype=torch.float64), 1e-12)


def test_raw_flows_are_at_most_1_and_at_least_the_rollout():
    mixing_map = map_of(random_attention(layers=6))
    raw = flow(mixing_map, normalize=False).scores
    assert raw.max() <= 1 + 1e-9
    assert (raw >= rollout(mixing_map).scores - 1e-8).all()


def test_permuting_heads_changes_nothing():
    scores = random_attention(heads=4)
    assert close(flow(map_of(scores)).scores, flow(map_of(scores[:, [2, 0, 3, 1]])).scores, 1e-8)


def test_the_residual_follows_the_method():
    scores = random_attention()
    assert flow(map_of(scores, method="value_zeroing")).residual == 0
    with_residual = map_of((scores + torch.eye(6)) / 2, method="value_zeroing")
    assert close(flow(map_of(scores)).scores, flow(with_residual).scores)
    assert close(flow(map_of(scores), residual=0.0).scores, flow(map_of(scores, residual=0.0)).scores, 0)
    with pytest.raises(ValueError, match="residual: expected a number"):
        flow(map_of(scores, method="custom"))
    only_itself = flow(map_of(scores), residual=1.0).scores
    assert close(only_itself, torch.eye(6, dtype=torch.float64).expand(4, 6, 6), 0)


def test_dropping_the_first_token():
    mixing_map = map_of(random_attention(layers=3))
    assert torch.equal(
        flow(mixing_map, drop_bos=True).scores, flow(mixing_map.drop_bos().normalized()).scores
    )


def test_half_precision_maps():
    mixing_map = map_of(random_attention(layers=4))
    half = mixing_map.replace(scores=mixing_map.scores.to(torch.bfloat16))
    assert close(flow(half).scores, flow(mixing_map).scores, 1e-2)


def test_an_all_zero_row_keeps_itself_or_stays_empty():
    scores = random_attention(layers=3)
    scores[:, 2] = 0
    kept = flow(map_of(scores))
    assert close(kept.scores[:, 2], torch.eye(6, dtype=torch.float64)[2].expand(3, 6), 0)
    assert any("all-zero rows" in note for note in kept.notes)
    assert (flow(map_of(scores), residual=0.0).scores[:, 2] == 0).all()


def test_one_token():
    assert torch.equal(flow(map_of(torch.ones(3, 1, 1))).scores, torch.ones(3, 1, 1, dtype=torch.float64))


def test_later_layers_and_a_later_start():
    late = map_of(random_attention(layers=4)).select_layers([2, 3])
    found = flow(late)
    assert found.layers == [2, 3]
    assert any("flow from layer 2 on" in note for note in found.notes)


def test_progress_changes_nothing(capsys):
    mixing_map = map_of(random_attention(layers=3, size=4))
    assert torch.equal(flow(mixing_map, progress=True).scores, flow(mixing_map).scores)
    assert "flow" in capsys.readouterr().err


# ---------------------------------------------------------------------- degeneration


def test_deep_bidirectional_stacks_are_told_to_degenerate():
    scores = random_attention(layers=8, heads=2, size=12, causal=False)
    found = flow(map_of(scores, causal=False), normalize=False)
    shares = found.provenance["aggregation"]["first_layer_share"]
    assert shares[:2] == [None, None]
    assert shares[-1] == 1.0
    first = 0.5 * scores[0].mean(0) + 0.5 * torch.eye(12)
    assert close(found.scores[-1], first.sum(0).clamp(max=1).expand(12, 12), 1e-8)
    assert any("100 % of the flows from layer 7 equal the bound of layer 0 alone" in n for n in found.notes)


def test_the_share_counts_pairs():
    mixing_map = map_of(random_attention(layers=4, size=8, causal=False), causal=False)
    found = flow(mixing_map, normalize=False, solver="networkx")
    first = 0.5 * mixing_map.scores[0] + 0.5 * torch.eye(8)
    last = 0.5 * mixing_map.scores[3] + 0.5 * torch.eye(8)
    bound = torch.minimum(first.sum(0)[None], last.sum(1)[:, None])
    expected = ((found.scores[3] - bound).abs() < 1e-7).double().mean().item()
    assert 0 < expected < 1
    assert found.provenance["aggregation"]["first_layer_share"][3] == pytest.approx(expected)
    assert flow(mixing_map).provenance["aggregation"]["first_layer_share"][3] == pytest.approx(expected)


def test_stacks_that_do_not_degenerate_carry_no_note():
    # Each position sees only itself in all layers except the top one, so the top layer sets the flow.
    scores = torch.stack([torch.eye(6, dtype=torch.float64)] * 3 + [random_attention(1)[0]])
    found = flow(map_of(scores), residual=0.0, normalize=False)
    assert close(found.scores[-1], scores[-1])
    assert found.provenance["aggregation"]["first_layer_share"][3] < 0.5
    assert not any("equal the bound of layer" in note for note in found.notes)


# ---------------------------------------------------------------------- receptive field


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_even_causal_attention_comes_out_even_but_for_the_residual(layers, weight):
    found = flow(map_of(even(layers, 9)), residual=weight, receptive_field=True, layer=-1).scores[0]
    for query in range(9):
        others = found[query, :query]
        assert close(others, others[:1].expand_as(others), 1e-7)
        if weight == 0:
            assert close(found[query, : query + 1], torch.full((query + 1,), 1 / (query + 1)).double(), 1e-7)
    plain = flow(map_of(even(4, 9)), layer=-1).scores[0]
    assert plain[-1, 0] > 1.4 * plain[-1, -2]


def test_a_bidirectional_map_is_unchanged():
    mixing_map = map_of(random_attention(layers=3, causal=False), causal=False)
    for normalize in (True, False):
        plain = flow(mixing_map, normalize=normalize).scores
        assert close(flow(mixing_map, normalize=normalize, receptive_field=True).scores, plain, 2e-8)


def test_later_tokens_change_nothing():
    scores = random_attention(layers=4, size=8)
    whole = flow(map_of(scores), receptive_field=True).scores
    prefix = flow(map_of(scores[:, :5, :5]), receptive_field=True).scores
    assert close(whole[:, :5, :5], prefix, 1e-7)


def test_a_sliding_window_is_divided_by_its_own_null_model():
    window = torch.ones(8, 8, dtype=torch.bool).tril() & torch.ones(8, 8, dtype=torch.bool).triu(-2)
    scores = window.double() / window.sum(-1, keepdim=True)
    found = flow(map_of(scores.expand(4, 8, 8), mask=window), receptive_field=True, residual=0.0)
    assert close(found.scores[0, 7, 5:], torch.full((3,), 1 / 3).double(), 1e-7)
    last = found.scores[3, 7]
    reached = last[last > 0]
    assert close(reached, torch.full_like(reached, 1 / len(reached)), 1e-6)


def test_a_mask_that_hides_the_diagonal():
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    mask[0, 0] = True
    scores = mask.double() / mask.sum(-1, keepdim=True)
    found = flow(map_of(scores.expand(3, 5, 5), mask=mask), receptive_field=True)
    assert found.scores.isfinite().all()
    assert found.scores[2, 4, 4] > 0
    others = found.scores[2, 4, :4]
    assert close(others, others[:1].expand_as(others), 1e-6)


def test_the_sum_of_a_row_is_kept():
    mixing_map = map_of(random_attention(layers=4))
    plain = flow(mixing_map, normalize=False).scores
    found = flow(mixing_map, normalize=False, receptive_field=True).scores
    assert close(found.sum(-1), plain.sum(-1), 1e-9)


def test_flow_of_even_attention_over_tokens_that_see_each_other():
    assert _compute_even_flow((0.5,), 4) == pytest.approx((0.625, 0.125))
    assert _compute_even_flow((0.5, 0.5), 4) == pytest.approx((1.0, 0.5))
    assert _compute_even_flow((0.5,) * 12, 4) == pytest.approx((1.0, 1.0))
    assert _compute_even_flow((0.5,) * 3, 1) == pytest.approx((1.0, 0.0))
    # The top layer is the identity, so the flows are those of the layer below: min(0.8 + 0.05, 1) and 0.05.
    assert _compute_even_flow((0.8, 1.0), 4) == pytest.approx((0.85, 0.05))


def test_the_null_model_of_a_map_that_holds_the_residual_keeps_as_much_of_it():
    """Check that uniform maps stay uniform; a null model without the residual would add its own slope."""
    weights = torch.tensor([0.9, 0.6, 0.8]).double()
    identity = torch.eye(9, dtype=torch.float64)
    scores = even(3, 9) * (1 - weights[:, None, None]) + identity * weights[:, None, None]
    held = flow(map_of(scores, residual=0.0, method="attn_res"), receptive_field=True, layer=-1).scores[0]
    mixed = flow(map_of(scores), residual=0.0, receptive_field=True, layer=-1).scores[0]
    for query in range(2, 9):
        others = held[query, :query]
        assert close(others, others[:1].expand_as(others), 1e-7)
        assert held[query, query] > others[0]
    # If the map is not marked as containing the residual, the slope remains.
    assert mixed[-1, :-1].std() / mixed[-1, :-1].mean() > 0.01


def test_a_causal_map_that_was_not_called_causal_warns():
    with pytest.warns(UserWarning, match="receptive_field had no effect"):
        found = flow(map_of(random_attention(), causal=False), receptive_field=True, layer=-1)
    assert any("receptive_field had no effect" in note for note in found.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow(map_of(), receptive_field=True, layer=-1)


def test_it_takes_the_slope_out_of_even_attention_with_noise():
    """Check a claim of docs/evidence/aggregation.md: a strong preference is found despite the bias."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.5 * torch.randn(6, 16, 16, generator=generator, dtype=torch.float64)
    logits[:, :, 9] += 3
    logits = logits.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf)
    mixing_map = map_of(logits.softmax(-1))
    assert int(flow(mixing_map, queries=-1, layer=-1).scores[0, 0].argmax()) == 0
    assert int(flow(mixing_map, queries=-1, layer=-1, receptive_field=True).scores[0, 0].argmax()) == 9


# ---------------------------------------------------------------------- refusals


def test_what_does_not_chain_is_refused():
    with pytest.raises(ValueError, match="expected layer maps for flow, got kind 'input'"):
        flow(flow(map_of()))
    with pytest.raises(ValueError, match="expected the tokens as keys for flow"):
        flow(map_of(torch.rand(2, 3, 4), key_tokens=list("abcd"), causal=False))
    with pytest.raises(ValueError, match="layers that follow one another"):
        flow(map_of(random_attention(layers=2), layers=[0, 3]))
    with pytest.raises(TypeError, match="mixing_map: expected a MixingMap, got Tensor"):
        flow(random_attention())


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_residual_outside_0_to_1_is_refused(wrong):
    with pytest.raises(ValueError, match="residual: expected a number from 0 to 1"):
        flow(map_of(), residual=wrong)


def test_negative_scores_are_refused():
    scores = random_attention()
    scores[1, 3, 2] = -0.25
    with pytest.raises(ValueError, match=r"expected none below 0 .* got -0.25"):
        flow(map_of(scores))


@pytest.mark.parametrize("queries", [[6], [-7], [], [1, 1], [1, -5], [True], ["a"]])
def test_queries_that_are_none_are_refused(queries):
    with pytest.raises((TypeError, ValueError), match="queries: expected"):
        flow(map_of(), queries=queries)


@pytest.mark.parametrize("processes", [0, -1, 1.5, True, None])
def test_a_number_of_processes_that_is_none_is_refused(processes):
    with pytest.raises((TypeError, ValueError), match="processes: expected a whole number, 1 or more"):
        flow(map_of(), processes=processes)


def test_unknown_layers_and_solvers_are_refused():
    with pytest.raises(ValueError, match="layer: layer 9 does not exist; expected "):
        flow(map_of(), layer=9)
    with pytest.raises(ValueError, match="solver: expected 'scipy' or 'networkx', got 'cvx'"):
        flow(map_of(), solver="cvx")
