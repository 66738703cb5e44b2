"""Test aggregations of attention weights if an attention sink that is not a token has some of the weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._blocks.provenance import SINK
from lens_mix.graphs import layered_graph
from tests.matrix import build_or_skip
from tests.random_maps import map_of, random_attention
from tests.tiny_models import bridge, tokens

SIZE = 7


def with_sink(layers=4, heads=None, size=SIZE, seed=0, causal=True, **fields):
    """Return a map whose rows sum to between 0.1 and 0.9."""
    scores = random_attention(layers, heads, size, causal=causal, seed=seed)
    kept = torch.empty(scores.shape[:-1], dtype=torch.float64)
    kept.uniform_(0.1, 0.9, generator=torch.Generator().manual_seed(seed))
    fields = {"provenance": {"sink": True}, "causal": causal, **fields}
    return map_of(scores * kept[..., None], **fields)


def oracle(attention, weight=0.5):
    """Return the product of ((1 - w) A + w I) / rowsum, `[layer, query, key]`, with heads averaged."""
    attention = np.asarray(attention, dtype=np.float64)
    attention = attention.mean(1) if attention.ndim == 4 else attention
    identity, below, out = np.eye(attention.shape[-1]), None, []
    for layer in attention:
        mixed = (1 - weight) * layer + weight * identity
        mixed = mixed / mixed.sum(-1, keepdims=True)
        below = mixed if below is None else mixed @ below
        out.append(below)
    return np.stack(out)


def close(found, expected, atol=1e-13):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


@pytest.fixture(scope="module")
def run():
    """Run gpt-oss with large sinks, with attention and with attention and the residual."""
    model = build_or_skip(bridge, "gpt_oss", torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, 3.0)
    prompt = tokens(model, 1, SIZE, 1)[0]
    return lm.run(
        model, prompt, ["attention", lm.methods.AttentionWeights(per_head=True), "attn_res_w", "value_norm"]
    )


def test_a_run_says_where_rows_go_to_a_sink(run):
    plain, per_head, held, norms = run.values()
    assert 0.1 < float(plain.scores.sum(-1).min()) < 0.9
    for m in (plain, per_head, held):
        assert m.provenance["sink"] is True
        assert m.notes.count(SINK) == 1
        assert lm.rollout(m).notes.count(SINK) == lm.flow(m).notes.count(SINK) == 1
    assert "sink" not in norms.provenance
    assert SINK not in norms.notes
    without = build_or_skip(bridge, "llama", torch.float64)
    m = lm.run(without, tokens(without, 1, SIZE, 1)[0], "attention")
    assert "sink" not in m.provenance
    assert SINK not in m.notes


def test_the_definition_on_a_model(run):
    plain, per_head, held, _ = run.values()
    expected = oracle(plain.scores)
    for m in (plain, per_head, held):
        close(lm.rollout(m).scores, expected, 1e-12)
        close(lm.flow(m).scores[:2], lm.flow(plain).scores[:2], 1e-12)
    close(lm.flow(plain, layer=0).scores[0], expected[0], 1e-12)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("weight", [None, 0, 0.2, 0.5, 0.9, 1])
def test_rollout(heads, causal, weight):
    m = with_sink(heads=heads, causal=causal)
    found = lm.rollout(m, residual=weight)
    close(found.scores, oracle(m.scores, 0.5 if weight is None else weight))
    close(found.scores.sum(-1), np.ones(found.scores.shape[:-1]))
    assert found.residual == (0.5 if weight is None else weight)


def test_total_mixing():
    m = with_sink(layers=6)
    close(lm.rollout(m, total_mixing=1.5).scores, oracle(m.scores, 1 - 1.5 / 6))
    close(lm.rollout(m, total_mixing=9).scores, oracle(m.scores, 0))


def test_a_measured_residual_is_a_share_of_the_whole_row():
    m = with_sink(residual_shares=torch.linspace(0.1, 0.9, 4 * SIZE).reshape(4, SIZE))
    close(
        lm.rollout(m, residual="measured").scores,
        lm.rollout(m.normalized(), residual="measured").scores,
    )


def test_each_head_has_its_own_sums():
    m = with_sink(heads=2)
    found = lm.rollout(m, per_head=True).scores.numpy()
    merged, identity = oracle(m.scores), np.eye(SIZE)
    for layer in range(4):
        for head in range(2):
            mixed = m.scores[layer, head].numpy() + identity
            mixed = mixed / mixed.sum(-1, keepdims=True)
            close(found[layer, head], mixed if layer == 0 else mixed @ merged[layer - 1])


def test_the_receptive_field_keeps_as_much_of_the_residual():
    """Check that uniform attention with a sink has the same normalized rollout as without a sink."""
    even = torch.ones(SIZE, SIZE, dtype=torch.float64).tril()
    even = even / even.sum(-1, keepdim=True)
    kept = 0.6
    m = map_of((kept * even).repeat(4, 1, 1), provenance={"sink": True})
    found = lm.rollout(m, receptive_field=True).scores
    stays = (1 / (1 + kept)) ** torch.arange(1, 5, dtype=torch.float64)[:, None, None]
    close(found, stays * torch.eye(SIZE, dtype=torch.float64) + (1 - stays) * even, 1e-12)
    same = lm.rollout(m.normalized(), residual=1 / (1 + kept), receptive_field=True)
    close(found, same.scores, 1e-12)
    flows = [lm.flow(m, receptive_field=True), lm.flow(m.normalized(), residual=1 / (1 + kept))]
    close(flows[0].scores[0], flows[1].scores[0], 1e-12)


def test_flow_and_graphs_have_the_same_capacities():
    m = with_sink(layers=2)
    first, second = (oracle(layer[None])[0] for layer in m.scores)
    expected = np.minimum(second[:, :, None], first[None]).sum(1)
    flows = lm.flow(m, normalize=False).scores
    close(flows[0], first)
    close(flows[1], expected)
    graph = layered_graph(m)
    assert graph.edges[(0, 2), (1, 5)]["capacity"] == pytest.approx(first[5, 2], abs=1e-14)


def test_joint_stacks():
    source, target = (with_sink(layers=2, causal=causal) for causal in (False, True))
    cross = map_of(
        0.5 * random_attention(2, causal=False, size=SIZE),
        key_tokens=source.tokens,
        causal=False,
        provenance={"sink": True},
    )
    stack = lm.aggregation.joint({"encoder": source, "decoder": target, "cross": cross})
    layers = stack.scores.numpy()
    close(layers[0, :SIZE, :SIZE], oracle(source.scores[:1])[0])
    close(layers[2, SIZE:, SIZE:], oracle(target.scores[:1])[0])
    close(layers[3, SIZE:, :SIZE], cross.scores[0].numpy() / 1.5)
    close(layers[3, SIZE:, SIZE:], np.eye(SIZE) / 1.5)
    close(layers.sum(-1), np.ones(layers.shape[:-1]))


def test_an_all_zero_row_keeps_itself_beside_a_sink():
    m = with_sink(layers=1)
    scores = m.scores.clone()
    scores[0, 3] = 0
    found = lm.rollout(m.replace(scores=scores))
    close(found.scores[0, 3], np.eye(SIZE)[3])
    assert "all-zero rows" in found.notes[-1]


def test_rows_that_lack_something_else_are_divided_by_their_sum():
    """Check rows whose missing share is not that of the sink: other maps, and maps with dropped tokens."""
    m = with_sink(heads=2)
    whole = m.replace(provenance={})
    close(lm.rollout(whole).scores, lm.rollout(whole.merge_heads().normalized()).scores)
    dropped = m.drop_bos()
    expected = oracle(dropped.merge_heads().normalized().scores)
    close(lm.rollout(m, drop_bos=True).scores, expected)
    close(lm.rollout(dropped).scores, expected)
    groups = [[0, 1], [2, 3], [4, 5, 6]]
    for changed in (
        m.merge_heads("max"),
        m.merge_words(groups, keys="max"),
        m.merge_words(groups, queries="min"),
    ):
        close(lm.rollout(changed).scores, oracle(changed.merge_heads().normalized().scores))
    words = m.merge_words(groups)
    close(lm.rollout(words).scores, oracle(words.scores))
    assert m.drop(0, axis="query").provenance == m.provenance
    close(lm.rollout(m.normalized()).scores, oracle(m.normalized().scores))


def test_a_saved_map_keeps_it(tmp_path):
    m = with_sink()
    m.save(tmp_path / "map.safetensors")
    close(lm.rollout(lm.MixingMap.load(tmp_path / "map.safetensors")).scores, oracle(m.scores))


def test_others_take_the_scores_as_they_are():
    m = with_sink(layers=3)
    close(lm.layer_mean(m).scores[0], m.scores.mean(0))
    chained = lm.gradient_rollout(m, normalize=True)
    close(chained.scores, oracle(m.scores))
