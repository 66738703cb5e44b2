"""Test Value Zeroing against peers' own outputs, against a slow loop, and its options."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.distances import distance
from lens_mix.hooks import must_fire, record
from lens_mix.hooks.mixing import mix
from lens_mix.methods.value_zeroing import value_zeroing
from tests.matrix import build_or_skip, zeroed
from tests.norm_cases import blocks_of, each_model_with
from tests.reference_models import inseq_gpt2, official_bert, reference
from tests.tiny_models import gpt2_like, llama_like, tokens

CLASSES = ["TransformerBridge", "HookedEncoder", "HookedTransformer"]


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedEncoder"])
def test_official_value_zeroing(model_class, n):
    model = build_or_skip(official_bert, model_class)
    expected = reference("official_vz_tiny_f64")
    m = lm.run(model, expected[f"n{n}_input_ids"], "value_zeroing", engine="hooks")
    assert m.scores.dtype == torch.float64
    torch.testing.assert_close(m.scores, expected[f"n{n}_raw_cosdist"], atol=1e-12, rtol=0)
    torch.testing.assert_close(m.normalized().scores, expected[f"n{n}_vz"], atol=1e-10, rtol=0)
    torch.testing.assert_close(lm.rollout(m).scores, expected[f"n{n}_rollout_res_false"], atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedTransformer"])
def test_inseq_with_its_conventions(model_class, n):
    model = build_or_skip(inseq_gpt2, model_class)
    expected = reference("inseq_vz_gpt2_tiny")
    method = lm.methods.ValueZeroing(last_layer="after_final_norm", threshold=1e-5)
    m = lm.run(model, expected[f"n{n}_input_ids"], method, engine="hooks")
    theirs = expected[f"n{n}_vz"].double()
    seen = torch.ones(n, n).tril().bool()
    assert bool(theirs[:, ~seen].isnan().all())  # inseq has NaN for keys that a query cannot see.
    ours = m.normalized().scores
    torch.testing.assert_close(ours[:, seen], theirs[:, seen], atol=2e-4, rtol=0)
    assert ours[:, ~seen].abs().max() == 0


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("model_class", ["TransformerBridge", "HookedTransformer"])
def test_own_slow_loop_before_and_after_the_final_norm(model_class, n):
    model = build_or_skip(inseq_gpt2, model_class)
    expected = reference(f"own_gpt2_vz_gpt2_tiny_n{n}")
    before = lm.run(model, expected["input_ids"], "value_zeroing", engine="hooks").scores
    after = lm.run(
        model, expected["input_ids"], lm.methods.ValueZeroing(last_layer="after_final_norm"), engine="hooks"
    ).scores
    # The reference was stored in float32.
    torch.testing.assert_close(before, expected["raw_cosdist_f64"].double(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(after[-1], expected["raw_last_after_lnf_f64"].double(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(after[:-1], before[:-1], atol=0, rtol=0)


@each_model_with("metric", ["cosine", "euclidean"], "value_zeroing")
def test_equals_the_definition_written_out(case, metric):
    for block in blocks_of(case):
        anatomy, pattern = block.anatomy, block.recorded("pattern")

        def output(value, anatomy=anatomy, pattern=pattern, resid_pre=block.resid_pre):
            return anatomy.after(resid_pre, anatomy.value_path.project(mix(pattern, value)))

        expected = value_zeroing(output, block.recorded("value"), metric)
        torch.testing.assert_close(
            lm.methods.ValueZeroing(metric=metric)(block), expected, rtol=1e-10, atol=1e-10
        )


def slow_value_zeroing(model, prompt, zero, metric="cosine"):
    """Compute the definition by full forward passes, one per layer and position, without lens_mix."""
    layers = model.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(layers)]

    def post(fwd_hooks=(), layer=None):
        store = {}

        def keep(tensor, hook, name):
            store[name] = tensor.detach().clone()

        hooks = [(name, lambda t, hook, name=name: keep(t, hook, name)) for name in names]
        with torch.no_grad():
            model.run_with_hooks(prompt, fwd_hooks=[*fwd_hooks, *hooks])
        return [store[name] for name in names]

    clean = post()
    rows = []
    for layer in range(layers):
        columns = []
        for key in range(prompt.shape[1]):
            # Only the output of block `layer` is compared, and the blocks below are as in the clean pass.
            zeroed = post([(f"blocks.{layer}.attn.hook_v", lambda t, hook, key=key: zero(t, key))])[layer][0]
            if metric == "cosine":
                columns.append(1 - torch.cosine_similarity(clean[layer][0], zeroed, dim=-1))
            else:
                columns.append((clean[layer][0] - zeroed).norm(dim=-1))
        rows.append(torch.stack(columns, dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_equals_the_definition_by_whole_forward_passes(metric):
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 6)
    m = lm.run(model, prompt, lm.methods.ValueZeroing(metric=metric), engine="hooks")
    expected = slow_value_zeroing(model, prompt, zeroed, metric)
    torch.testing.assert_close(m.scores, expected, atol=1e-12, rtol=1e-9)


def test_chosen_heads_and_per_head_equal_the_definition():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 5)

    def zero(values, key, heads):
        values = values.clone()
        for head in heads:
            values[:, key, head] = 0
        return values

    two = lm.run(model, prompt, lm.methods.ValueZeroing(heads=[0, 2]), engine="hooks")
    expected = slow_value_zeroing(model, prompt, lambda v, k: zero(v, k, [0, 2]))
    torch.testing.assert_close(two.scores, expected, atol=1e-12, rtol=1e-9)
    each = lm.run(model, prompt, lm.methods.ValueZeroing(per_head=True), engine="hooks")
    assert each.scores.shape == (2, 4, 5, 5)
    for head in range(4):
        expected = slow_value_zeroing(model, prompt, lambda v, k, head=head: zero(v, k, [head]))
        torch.testing.assert_close(each.scores[:, head], expected, atol=1e-12, rtol=1e-9)
    some = lm.run(model, prompt, lm.methods.ValueZeroing(per_head=True, heads=[3, 1]), engine="hooks")
    torch.testing.assert_close(some.scores, each.scores[:, [3, 1]], atol=0, rtol=0)


def test_heads_may_differ_by_layer():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 5)
    by_layer = lm.run(model, prompt, lm.methods.ValueZeroing(heads={1: [0, 2]}), engine="hooks").scores
    all_heads = lm.run(model, prompt, "value_zeroing", engine="hooks").scores
    two = lm.run(model, prompt, lm.methods.ValueZeroing(heads=[0, 2]), engine="hooks").scores
    torch.testing.assert_close(by_layer[0], all_heads[0], atol=0, rtol=0)
    torch.testing.assert_close(by_layer[1], two[1], atol=0, rtol=0)


@pytest.mark.parametrize("heads", [None, [1, 3], {1: [0, 2]}])
def test_the_hooks_on_a_run_of_your_own(heads):
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 5)
    method = lm.methods.ValueZeroing(heads=heads)
    expected = lm.run(model, prompt, method, engine="hooks").scores
    _, clean = model.run_with_cache(prompt)
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.hook_resid_post"
        for key in range(5):
            with must_fire(*method.interventions(layer, key)) as hooks, model.hooks(fwd_hooks=hooks):
                _, zeroed = model.run_with_cache(prompt)
            column = 1 - torch.cosine_similarity(clean[name], zeroed[name], dim=-1)[0]
            torch.testing.assert_close(expected[layer, :, key], column, atol=1e-12, rtol=1e-9)
    per_head = lm.run(model, prompt, lm.methods.ValueZeroing(per_head=True), engine="hooks").scores
    kept = {}
    hooks = [*method.interventions(0, 2, heads=[3]), record(kept, "blocks.0.hook_resid_post")]
    model.run_with_hooks(prompt, fwd_hooks=hooks)
    found = distance(clean["blocks.0.hook_resid_post"], kept["blocks.0.hook_resid_post"], "cosine")
    torch.testing.assert_close(found[0], per_head[0, 3, :, 2], atol=1e-14, rtol=1e-9)


def test_grouped_query_heads_are_zeroed_one_at_a_time():
    """Heads 0 and 1 share a value head. Zeroing both in turn differs from zeroing the shared value twice."""
    model = llama_like(torch.float64)
    prompt = tokens(model, 1, 5)
    each = lm.run(model, prompt, lm.methods.ValueZeroing(per_head=True), engine="hooks").scores
    assert each.shape == (2, 4, 5, 5)
    assert (each[:, 0] - each[:, 1]).abs().max() > 1e-4
    both = lm.run(model, prompt, lm.methods.ValueZeroing(heads=[0, 1]), engine="hooks").scores

    def zero_shared(values, key):
        values = values.clone()
        values[:, key, 0 : values.shape[2] // 2] = 0
        return values

    torch.testing.assert_close(both, slow_value_zeroing(model, prompt, zero_shared), atol=1e-12, rtol=1e-9)


def test_spans_are_one_unit():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 6)
    m = lm.run(model, prompt, lm.methods.ValueZeroing(spans=[(0, 1), (2,), (3, 4, 5)]), engine="hooks")
    assert m.scores.shape == (2, 6, 3)
    assert m.key_tokens == ["".join(m.tokens[0:2]), m.tokens[2], "".join(m.tokens[3:6])]
    alone = lm.run(model, prompt, "value_zeroing", engine="hooks")
    torch.testing.assert_close(m.scores[:, :, 1], alone.scores[:, :, 2], atol=1e-14, rtol=0)

    def zero_span(values, key):
        values = values.clone()
        values[:, 3:6] = 0
        return values

    whole = slow_value_zeroing(model, prompt, zero_span)[:, :, 0]
    torch.testing.assert_close(m.scores[:, :, 2], whole, atol=1e-12, rtol=1e-9)
    with pytest.raises(ValueError, match="key"):
        lm.rollout(m)


def test_threshold_sets_small_scores_to_zero():
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 6)
    raw = lm.run(model, prompt, "value_zeroing").scores
    cut = float(raw.median())
    m = lm.run(model, prompt, lm.methods.ValueZeroing(threshold=cut))
    torch.testing.assert_close(m.scores, torch.where(raw < cut, 0.0, raw), atol=0, rtol=0)
    nothing = lm.run(model, prompt, lm.methods.ValueZeroing(threshold=10.0))
    assert nothing.scores.abs().max() == 0
    assert nothing.normalized().scores.abs().max() == 0
    assert any("all-zero" in note for note in nothing.notes)


def test_float32_keeps_the_digits_of_small_distances():
    """1 - cos in float32 is 0 or 6e-8 here. Half the squared distance of unit vectors keeps four digits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator, dtype=torch.float64)
    y = x + 1e-5 * torch.randn(200, 64, generator=generator, dtype=torch.float64)
    x, y = x.float(), y.float()
    exact = distance(x.double(), y.double(), "cosine")
    assert exact.max() < 1e-9
    torch.testing.assert_close(distance(x, y, "cosine").double(), exact, rtol=1e-2, atol=0)


def test_distance_of_zero_vectors():
    zero, one = torch.zeros(1, 3), torch.ones(1, 3)
    assert float(distance(zero, zero, "cosine")) == 0
    assert float(distance(zero, one, "cosine")) == 1
    assert float(distance(one, -one, "cosine")) == pytest.approx(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "manhattan"}, "metric: expected 'cosine' or 'euclidean', got 'manhattan'"),
        ({"last_layer": "final"}, "last_layer: expected"),
        ({"threshold": -1.0}, "threshold: expected a finite number, 0 or more"),
        ({"spans": []}, "spans: expected at least one"),
        ({"spans": [(0, 1), (1, 2)]}, "each position in one group"),
        ({"per_head": True, "heads": {0: [1]}}, "same heads in every layer"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lm.methods.ValueZeroing(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [4]}, r"heads: expected query heads 0\.\.3, got \[4\]"),
        ({"heads": []}, "heads: expected at least one"),
        ({"heads": {2: [0]}}, r"heads: layer 2 does not exist; expected 0 to 1, .* got 2"),
        ({"spans": [(0, 9)]}, r"spans: expected positions 0\.\.5, got \[9\]"),
    ],
)
def test_what_the_model_or_prompt_does_not_have_is_refused(options, message):
    model = gpt2_like(torch.float64)
    with pytest.raises(ValueError, match=message):
        lm.run(model, tokens(model, 1, 6), lm.methods.ValueZeroing(**options))
