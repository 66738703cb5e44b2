"""Test areas under the ROC curve, and scores on constructed models that were computed on paper."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

import lens_mix as lm
from lens_mix.experiments import constructed_models, roc_area, score_constructed
from lens_mix.experiments.ground_truth import _compute_input_area, _compute_layer_area
from tests.shared_models import constructed

MODELS = constructed_models()
COPY = MODELS["copy"]


# ------------------------------------------------------------------ the area


def test_roc_area_by_hand():
    # Of the four pairs (true, false), three are in the right order and one is a tie.
    scores, truth = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, False, True, False])
    assert roc_area(scores, truth) == 3.5 / 4
    assert roc_area(-scores, truth) == 0.5 / 4
    assert roc_area(torch.zeros(4), truth) == 0.5


def test_roc_area_is_mann_whitney():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(6, (5, 7), generator=generator).float()
        truth = torch.rand(5, 7, generator=generator) < 0.3
        u = scipy.stats.mannwhitneyu(scores[truth].numpy(), scores[~truth].numpy()).statistic
        assert roc_area(scores, truth) == pytest.approx(u / int(truth.sum() * (~truth).sum()), abs=1e-12)


def test_roc_area_without_anything_to_compare():
    assert math.isnan(roc_area(torch.rand(3), torch.ones(3, dtype=torch.bool)))
    assert math.isnan(roc_area(torch.rand(3), torch.zeros(3, dtype=torch.bool)))
    assert math.isnan(roc_area(torch.rand(0), torch.zeros(0, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("scores", "truth", "text"),
    [
        (torch.rand(3), torch.tensor([True, False]), r"truth: expected the shape \(3,\), got \(2,\)"),
        (torch.rand(3), torch.ones(3), "truth: expected a tensor of True and False, got torch.float32"),
        (torch.tensor([1.0, math.nan]), torch.tensor([True, False]), "scores: expected finite numbers"),
    ],
)
def test_roc_area_refuses(scores, truth, text):
    with pytest.raises((TypeError, ValueError), match=text):
        roc_area(scores, truth)


def test_a_permuted_map_scores_as_chance():
    prompt = COPY.prompts(count=1)[0]
    routes, generator = COPY.routes(prompt), torch.Generator().manual_seed(0)
    clean = lm.run(constructed(COPY), prompt, "attention")
    row = clean.scores[-1, -1]
    areas = []
    for _ in range(100):
        scores = clean.scores.clone()
        scores[-1, -1] = row[torch.randperm(len(row), generator=generator)]
        areas.append(_compute_input_area(clean.replace(scores=scores, kind="input"), routes))
    areas = torch.tensor(areas)
    assert abs(areas.mean() - 0.5) < 3 * areas.std() / len(areas) ** 0.5
    assert _compute_input_area(clean.replace(kind="input"), routes) == 1


# ------------------------------------------------------------------ on paper: layer maps

# The groups are maps of weights, of the vectors that attention moves, of the whole block, and of a target.
WEIGHTS = ("attention", "attn_res_w")
VECTORS = ("value_norm", "attn_res", "attn_res_ln", "globenc")
TARGETS = ("attention_attribution", "gradient_attention")


def one_row(prompt, above: float) -> float:
    """Compute the area for one true cell among the keys before the last, with `above` false ones above it."""
    false = len(prompt) - 2
    return (false - above) / false


def false_in_relay(prompt) -> int:
    """Count layer 1's last row, and in layer 0 that row and the one before, without the true cells."""
    last = len(prompt) - 1
    return last + last + (last - 1) - 2


def false_in_induction(prompt) -> int:
    """Count layer 1's last row, and in layer 0 that row and the one after the earlier occurrence."""
    last, before = len(prompt) - 1, prompt.tolist().index(int(prompt[-1]))
    return last + last + (before + 1) - 2


def false_in_identity_blocks(prompt) -> int:
    """Count the last row in all four layers, and in the lowest layer the row three positions before it."""
    last = len(prompt) - 1
    return 4 * last + (last - 3) - 1


def same_before(prompt) -> int:
    return prompt.tolist()[:-1].count(int(prompt[-1]))


def two_true(false: int, wrong: float) -> float:
    """Compute the area for two true cells, with that many wrong pairs (true, false). Ties count half."""
    return 1 - wrong / (2 * false)


ON_PAPER = [
    # No other cell has a weight.
    *(
        (model, (*WEIGHTS, *VECTORS, *TARGETS, "alti", "value_zeroing", "decompx_local"), lambda p: 1)
        for model in ("copy", "copy_layernorm", "copy_feed_forward", "planted_key", "broadcast_sink")
    ),
    # One cell has a higher weight and moves nothing.
    *(
        (model, methods, area)
        for model in ("zero_value_heads", "cancelling_heads", "silent_sink")
        for methods, area in [
            (WEIGHTS, lambda p: one_row(p, 1)),
            ((*VECTORS, *TARGETS, "alti", "value_zeroing", "decompx_local"), lambda p: 1),
        ]
    ),
    # The erased cell is a tie before the feed-forward and 0 after it. The feed-forward's own output has only
    # that cell.
    ("erased_copy", (*WEIGHTS, *VECTORS, "alti"), lambda p: one_row(p, 0.5)),
    ("erased_copy", (*TARGETS, "value_zeroing", "atb_ff_res", "atb_ff_res_ln", "decompx_local"), lambda p: 1),
    ("erased_copy", ("atb_ff",), lambda p: one_row(p, 1 + (len(p) - 3) / 2)),
    # The unread cell has the same weight and a vector twice as long. Only methods with a target know what is
    # read.
    ("unread_copy", WEIGHTS, lambda p: one_row(p, 0.5)),
    ("unread_copy", (*VECTORS, "alti", "value_zeroing", "decompx_local"), lambda p: one_row(p, 1)),
    ("unread_copy", TARGETS, lambda p: 1),
    # Three rows of identity blocks, and one below the source, have a false cell with the true one's weight.
    ("identity_blocks", WEIGHTS, lambda p: 1 - 4 * 0.5 / false_in_identity_blocks(p)),
    ("identity_blocks", (*VECTORS, *TARGETS, "alti", "value_zeroing", "decompx_local"), lambda p: 1),
    # In layer 0 the answer's own row moves something too, which nothing reads. It is tied with both true
    # cells. Shares rank it above one of them, because the residual stream is longer in layer 1.
    ("relay", (*WEIGHTS, *VECTORS, "decompx_local"), lambda p: two_true(false_in_relay(p), 1)),
    ("relay", ("alti", "value_zeroing"), lambda p: two_true(false_in_relay(p), 1.5)),
    ("relay", TARGETS, lambda p: 1),
    ("induction", (*WEIGHTS, *VECTORS, "decompx_local"), lambda p: two_true(false_in_induction(p), 1)),
    ("induction", ("alti", "value_zeroing"), lambda p: two_true(false_in_induction(p), 1.5)),
    ("induction", ("attention_attribution",), lambda p: 1),
    # A softmax that gives one key all weight has no gradient, so the true cell below is tied with all false
    # ones.
    ("induction", ("gradient_attention",), lambda p: 0.75),
    # The tokens that are counted have the same weight as the first one, and no value.
    ("rasp_histogram", WEIGHTS, lambda p: one_row(p, 0.5 * same_before(p))),
    ("rasp_histogram", (*VECTORS, "alti", "value_zeroing", "decompx_local"), lambda p: 1),
    # Far from a threshold there is no gradient.
    ("rasp_histogram", ("gradient_attention",), lambda p: 0.5),
]


@pytest.mark.parametrize(
    ("name", "methods", "area"), ON_PAPER, ids=[f"{name}-{methods[0]}" for name, methods, _ in ON_PAPER]
)
def test_layer_maps_score_as_on_paper(name, methods, area):
    built = MODELS[name]
    model = constructed(built)
    for prompt in built.prompts(seed=7, count=2):
        for method, layers in lm.run(model, prompt, list(methods)).items():
            layers = layers.replace(scores=layers.scores.abs())
            assert _compute_layer_area(layers, built.routes(prompt)) == pytest.approx(area(prompt)), (
                method,
                prompt,
            )


# ------------------------------------------------------------------ on paper: input maps


def one_key(prompt, above: float) -> float:
    """Compute the area for one true token, with that many others above it. Ties count half."""
    false = len(prompt) - 1
    return (false - above) / false


def two_kinds(prompt) -> float:
    """Compute the area if all true tokens have 0, as all false ones except the first, which has more."""
    false = len(prompt) - same_before(prompt) - 1
    return 0.5 * (false - 1) / false


INPUT_ON_PAPER = [
    # Half stays in the residual stream, so the position itself is tied.
    ("copy", "attention", lm.rollout, lambda p: one_key(p, 0.5)),
    ("copy", "value_zeroing", lm.rollout, lambda p: 1),
    ("copy", "attention", lm.layer_mean, lambda p: 1),
    # The token and its position are the longer vector.
    ("copy", "attn_res", lm.layer_mean, lambda p: one_key(p, 1)),
    # The row is 0.45 for the first token, 0.5 for the position itself, and 0.05 for the true one.
    ("silent_sink", "attention", lm.rollout, lambda p: one_key(p, 2)),
    ("silent_sink", "value_norm", lm.rollout, lambda p: one_key(p, 0.5)),
    # There are four paths of a quarter each: both steps, one, the other, none.
    ("relay", "attention", lm.rollout, lambda p: one_key(p, 1.5)),
    ("relay", "value_zeroing", lm.rollout, lambda p: 1),
    # No single layer connects the answer with its source, which is tied at 0. The two keys with a cell are
    # above.
    ("relay", "attention", lm.layer_mean, lambda p: one_key(p, 2 + (len(p) - 3) / 2)),
    # In ((1 + x) / 2)³ (1 + x³) / 2, the term x³ has 2 of 16 paths, and x, x², x⁴ and x⁵ have 3 each.
    ("identity_blocks", "attention", lm.rollout, lambda p: one_key(p, 4)),
    # A row of zeros without a residual stream ends every path.
    ("identity_blocks", "value_zeroing", lm.rollout, lambda p: 0.5),
    ("identity_blocks", "value_norm", lm.rollout, lambda p: one_key(p, 0.5)),
    # Only the first token has a value.
    ("rasp_histogram", "value_zeroing", lm.layer_mean, two_kinds),
]


@pytest.mark.parametrize(("name", "method", "aggregate", "area"), INPUT_ON_PAPER)
def test_input_maps_score_as_on_paper(name, method, aggregate, area):
    built = MODELS[name]
    model = constructed(built)
    for prompt in built.prompts(seed=8, count=2):
        made = aggregate(lm.run(model, prompt, method))
        assert _compute_input_area(made, built.routes(prompt)) == pytest.approx(area(prompt)), prompt


def test_alti_logit_does_not_see_through_a_feed_forward():
    frame = score_constructed("alti_logit", [MODELS["copy"], MODELS["copy_feed_forward"]], count=3)
    areas = frame[frame.method == "alti_logit"].set_index("model").area
    assert areas.to_dict() == {"copy": 1.0, "copy_feed_forward": 0.5}


# ------------------------------------------------------------------ the table


def test_the_table():
    names = ["attention", "atb_ff", "decompx", "gradient_attention"]
    frame = score_constructed(names, [COPY, MODELS["rasp_fraction"]], count=2)
    assert list(frame) == ["model", "method", "aggregation", "area", "low", "high", "n", "note"]
    of_copy = frame[frame.model == "copy"]
    assert list(zip(of_copy.method, of_copy.aggregation, strict=True)) == [
        ("position", "layers"),
        ("position", "input"),
        *(("attention", way) for way in ("layers", "mean", "rollout", "flow")),
        ("atb_ff", "layers"),
        ("decompx", "input"),
        *(("gradient_attention", way) for way in ("layers", "mean", "rollout", "flow", "gradient_rollout")),
    ]
    refused = of_copy[of_copy.method == "atb_ff"].iloc[0]
    assert refused.n == 0
    assert math.isnan(refused.area)
    assert "feed-forward" in refused.note
    scored = frame[frame.note == ""]
    assert (scored.n == 2).all()
    assert ((scored.low <= scored.area) & (scored.area <= scored.high)).all()
    # The answer of rasp_fraction is before the end, and the target is read there.
    gradient = frame[(frame.model == "rasp_fraction") & (frame.method == "gradient_attention")]
    assert gradient[gradient.aggregation == "layers"].area.item() == 1
    again = score_constructed(names, [COPY, MODELS["rasp_fraction"]], count=2)
    assert again.equals(frame)


def test_position_is_scored_as_on_paper():
    frame = score_constructed("attention", [COPY], count=5)
    layers = frame[(frame.method == "position") & (frame.aggregation == "layers")].area.item()
    # Two of the false keys are after the true one.
    expected = [one_row(prompt, 2) for prompt in COPY.prompts(count=5)]
    assert layers == pytest.approx(sum(expected) / 5)


def test_aggregations_of_ones_own():
    last = {"last layer": lambda layers: layers.select_layers([-1]).replace(kind="input")}
    frame = score_constructed("attention", [COPY], last, count=2)
    assert frame[frame.aggregation == "last layer"].area.item() == 1
    assert "rollout" not in set(frame.aggregation)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="models: expected constructed models"):
        score_constructed(models=["copy"])
    with pytest.raises(ValueError, match="methods: expected one of"):
        score_constructed("no_method")
    with pytest.raises(ValueError, match="count: expected a whole number, 1 or more, got 0"):
        score_constructed("attention", [COPY], count=0)
