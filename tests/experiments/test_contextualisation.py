"""Compare the contextualisation change with a slow computation, and test amplification and its pairs."""

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments.contextualisation import METHODS, amplification, change, changes, top_pairs
from tests.norm_cases import largest
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available


@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_the_slow_derivation(class_name):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    table = changes(lm.run(reference_bert(class_name), methods=list(METHODS), **reference_inputs(0)))
    assert list(table.columns) == ["feed_forward", "residual", "norm", "whole"]
    for layer in range(3):
        known = reference("atbff_oracle_tiny_f64")[f"ctx_change_A.{layer}"]
        assert largest(table.loc[layer].to_numpy(), known) < 1e-10


def maps():
    before = torch.tensor([[[1.0, 0, 0], [2, 3, 0], [4, 5, 6]]])
    after = torch.tensor([[[1.0, 0, 0], [9, 3, 0], [4, 5.5, 5]]])
    return [
        lm.MixingMap(scores=scores, tokens=["a", "b", "c"], method=name, causal=True)
        for scores, name in ((before, "x"), (after, "y"))
    ]


def test_hidden_pairs_do_not_count():
    before, after = maps()
    # The six visible pairs have the ranks 1 2 3 4 5 6 before, and 1 6 2 3 5 4 after.
    assert change(before, after).tolist() == pytest.approx([1 - (1 - 6 * (16 + 1 + 1 + 0 + 4) / 210)])
    assert change(before, before).tolist() == pytest.approx([0])


def test_amplified_pairs_come_largest_first():
    before, after = maps()
    amplified = amplification(before, after)
    assert amplified.scores[0, 1].tolist() == [7, 0, 0]
    table = top_pairs(amplified, 2)
    assert table[["query_token", "key_token"]].values.tolist() == [["b", "a"], ["c", "b"]]
    assert table["amplification"].tolist() == [7, 0.5]
    assert len(top_pairs(amplified, 10)) == 3
    assert len(top_pairs(amplified, 10, diagonal=True)) == 6


def test_maps_that_do_not_go_together_are_refused():
    before, after = maps()
    with pytest.raises(ValueError, match="after: expected a map of the same prompt and shape"):
        change(before, after.drop(0))
    with pytest.raises(ValueError, match=r"maps: expected .*, got none of \['attn_res_ln'"):
        changes({"atb_ff": before})
    with pytest.raises(ValueError, match="count: expected a whole number, 1 or more, got 0"):
        top_pairs(amplification(before, after), 0)
