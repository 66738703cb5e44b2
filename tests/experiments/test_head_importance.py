"""Test head importance against maps, pruning and gradients, and its errors."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.experiments import HeadImportance, ablation_importance, head_importance, importance_correlations
from lens_mix.hooks import prune_heads
from tests import tiny_models
from tests.tiny_models import available, bridge, gpt2_like, hooked_encoder_decoder


def prompts(model, count=3):
    return [tiny_models.tokens(model, 1, 5 + seed, seed=seed)[0] for seed in range(count)]


def test_attribution_is_the_mean_of_the_largest_entries():
    model = gpt2_like(torch.float64)
    some = prompts(model)
    found = head_importance(model, some)
    maps = [lm.run(model, prompt, lm.methods.AttentionAttribution(per_head=True)).scores for prompt in some]
    expected = sum(scores.amax((-1, -2)) for scores in maps) / 3
    assert (found.scores - expected).abs().max() <= 1e-12
    assert (found.name, found.examples) == ("attribution", 3)


def test_targets_one_for_each_prompt():
    model = gpt2_like(torch.float64)
    some = prompts(model, 2)
    targets = [lm.targets.logit(7), lm.targets.logit_difference(3, 9)]
    found = head_importance(model, some, targets=targets)
    alone = [
        head_importance(model, [prompt], targets=target) for prompt, target in zip(some, targets, strict=True)
    ]
    assert (found.scores - (alone[0].scores + alone[1].scores) / 2).abs().max() <= 1e-12
    method = lm.methods.AttentionAttribution(target=targets[0], n_steps=3)
    same = head_importance(model, some[:1], method=method)
    assert (same.scores - alone[0].scores).abs().max() > 0
    with pytest.raises(ValueError, match="targets: expected one, or one for each of 2 prompts, got 1"):
        head_importance(model, some, targets=targets[:1])


def test_attention():
    model = gpt2_like(torch.float64)
    some = prompts(model)
    found = head_importance(model, some, "attention")
    maps = [lm.run(model, prompt, lm.methods.AttentionWeights(per_head=True)).scores for prompt in some]
    # The first query of a causal model gives itself the weight 1 in every head.
    assert (found.scores - sum(scores[:, :, 1:].amax((-1, -2)) for scores in maps) / 3).abs().max() <= 1e-12
    assert found.scores.max() < 1
    # Rows sum to 1, so the mean over visible keys is the same for every head.
    mean = head_importance(model, some, "attention", statistic="mean")
    assert mean.scores.max() - mean.scores.min() <= 1e-12


def test_rough_completeness_is_told():
    model = gpt2_like(torch.float64)
    some = prompts(model, 2)
    rough = lm.methods.AttentionAttribution(method="riemann_left", n_steps=1)
    found = head_importance(model, some, method=rough)
    assert any("completeness in doubt for 2 prompts" in note for note in found.notes)
    assert head_importance(model, some, method=lm.methods.AttentionAttribution(n_steps=32)).notes == ()


def test_taylor_is_the_slope_of_the_loss_in_a_head_mask():
    model = gpt2_like(torch.float64)
    (prompt,) = prompts(model, 1)
    found = head_importance(model, [prompt], "taylor")
    for layer in range(2):
        for head in range(4):
            losses = []
            for size in (1e-5, -1e-5):
                factor = torch.ones(4, dtype=torch.float64)
                factor[head] += size
                with torch.no_grad():
                    logits = model.run_with_hooks(
                        prompt[None], fwd_hooks=[lm.hooks.scale_pattern(layer, factor)]
                    )[0]
                losses.append(torch.nn.functional.cross_entropy(logits[:-1], prompt[1:]).item())
            slope = abs(losses[0] - losses[1]) / 2e-5
            assert found.scores[layer, head].item() == pytest.approx(slope, abs=1e-7)
    assert found.scores.min() > 0


def test_ablation_is_the_difference_of_the_metric():
    model = gpt2_like(torch.float64)
    (prompt,) = prompts(model, 1)

    def metric(pruned):
        return pruned(prompt[None])[0, -1].softmax(-1)[7].item()

    found = ablation_importance(model, metric)
    with torch.no_grad():
        whole = model(prompt[None])[0, -1].softmax(-1)[7].item()
        for layer, head in [(0, 0), (0, 3), (1, 2)]:
            logits = model.run_with_hooks(prompt[None], fwd_hooks=[prune_heads(layer, head)])
            without = logits[0, -1].softmax(-1)[7].item()
            assert found.scores[layer, head].item() == pytest.approx(whole - without, abs=1e-12)
    assert found.scores.abs().min() > 0
    with pytest.raises(RuntimeError, match="expected every hook to fire"):
        ablation_importance(model, lambda pruned: 1.0)


def test_heads_whose_patterns_do_not_mix_the_values_are_not_pruned():
    """A hook overwrites z. Without the error, pruning would change nothing, so that all heads had 0."""
    model = gpt2_like(torch.float64)
    (prompt,) = prompts(model, 1)
    z = torch.ones((), dtype=torch.float64)
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", lambda mixed, hook: z.expand_as(mixed))]),
        pytest.raises(lm.UnsupportedModelError, match="pruned can't run on this model: block 1: mixing"),
    ):
        ablation_importance(model, lambda pruned: float(pruned(prompt[None])[0, -1, 7].detach()))


def test_encoder_decoder_stack():
    if available(bridge, "bart"):
        model = bridge("bart", torch.float64)
    else:
        if transformer_lens_version()[0] < 3:
            pytest.skip("its decoder is not causal on TransformerLens 2.x: refused, see tests/test_runner.py")
        model = hooked_encoder_decoder(torch.float64)
    pair = (tiny_models.tokens(model, 1)[0], tiny_models.tokens(model, 1, 5, 2)[0])
    for by in ("attribution", "attention", "taylor"):
        found = head_importance(model, [pair], by, part="encoder")
        assert found.scores.shape == (2, 4)
        assert found.scores.min() > 0


def test_ranking_and_top():
    importance = HeadImportance(torch.tensor([[3.0, 1.0], [2.0, 1.0]]), "mine", 1)
    assert importance.ranking() == [(0, 1), (1, 1), (1, 0), (0, 0)]
    assert importance.top(2) == [(0, 0, 3.0), (1, 0, 2.0)]
    table = importance.to_dataframe()
    assert list(table.columns) == ["layer", "head", "importance"]
    assert table.importance.tolist() == [3.0, 1.0, 2.0, 1.0]


def test_correlation():
    one = HeadImportance(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "one", 1)
    two = HeadImportance(torch.tensor([[1.0, 4.0], [9.0, 16.0]]), "two", 1)
    three = HeadImportance(-one.scores, "three", 1)
    assert one.correlation(two, "spearman") == pytest.approx(1)
    assert one.correlation(two) == pytest.approx(0.9843740386976972)
    assert one.correlation(three) == pytest.approx(-1)
    table = importance_correlations({"a": one, "b": two, "c": three})
    assert table.loc["a", "c"] == pytest.approx(-1)
    assert table.loc["b", "a"] == table.loc["a", "b"] == pytest.approx(one.correlation(two))
    with pytest.raises(ValueError, match="constant importance"):
        one.correlation(HeadImportance(torch.ones(2, 2), "flat", 1))
    with pytest.raises(ValueError, match="other: expected scores of shape"):
        one.correlation(HeadImportance(torch.ones(2, 3), "wide", 1))
    with pytest.raises(ValueError, match="how: expected"):
        one.correlation(two, "kendall")
    with pytest.raises(ValueError, match="at least two"):
        importance_correlations({"a": one})


def test_bad_input():
    model = gpt2_like(torch.float64)
    some = prompts(model, 1)
    for arguments, keywords, message in [
        ((model, []), {}, "prompts: expected at least one"),
        ((model, some, "gradient"), {}, "by: expected 'attribution'"),
        ((model, some), {"statistic": "sum"}, "statistic: expected"),
        ((model, some, "taylor"), {"method": lm.methods.AttentionAttribution()}, "method: applies to"),
    ]:
        with pytest.raises(ValueError, match=message):
            head_importance(*arguments, **keywords)
    with pytest.raises(ValueError, match=r"scores: expected shape \[layer, head\]"):
        HeadImportance(torch.ones(3), "flat", 1)
    with pytest.raises(ValueError, match="finite"):
        HeadImportance(torch.full((2, 2), torch.nan), "nan", 1)
