"""Test maps after the feed-forward against references and a dense oracle with numerical integrals."""

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.activations import _mean_on_path, derivative, gated_multipliers, plain_multiplier
from lens_mix._algebra.definitions import through_norm
from lens_mix._algebra.feed_forward import feed_forward_maps
from lens_mix._model.anatomy import ACTIVATIONS
from lens_mix.methods.atb_ff import atb_ff
from tests.norm_cases import blocks_of, each_model, each_model_with, largest, read_by_a_norm, written_out
from tests.norm_oracle import norms, oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available, bridge, hooked_transformer

VARIANTS = {"on_path": "A", "fixed": "B"}
STAGES = {
    lm.methods.AtbFf: ("atbff", "FFN"),
    lm.methods.AtbFfRes: ("atbffres", "res2"),
    lm.methods.AtbFfResLn: ("atbffresln", "encoder"),
}


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("biases", VARIANTS)
@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_the_references(class_name, biases, row):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    methods = [stage(biases) for stage in STAGES]
    maps = lm.run(reference_bert(class_name), methods=methods, **reference_inputs(row)).values()
    slow, decompx = reference("atbff_oracle_tiny_f64"), reference("decompx_tiny_f64")
    for mixing_map, (name, theirs) in zip(maps, STAGES.values(), strict=True):
        assert mixing_map.parameters["biases"] == biases
        size = len(mixing_map.tokens)
        for layer in range(3):
            known = slow[f"{VARIANTS[biases]}.{name}_norm.{layer}"][row, :size, :size]
            assert largest(mixing_map.scores[layer], known) < 1e-10
            if biases == "on_path":
                known = decompx[f"local_nobias_{theirs}_norm.{layer}"][row, :size, :size]
                assert largest(mixing_map.scores[layer], known) < 1e-10


@each_model_with("biases", list(VARIANTS), "atb_ff")
def test_equals_the_vectors_written_out(case, biases):
    for block in blocks_of(case):
        second, maps = oracle(block, biases), feed_forward_maps(block, biases)
        assert largest(maps.output[0], norms(second.feed_forward)) < 1e-10
        assert largest(maps.residual[0], norms(second.feed_forward_residual)) < 1e-10
        assert largest(maps.normed[0], norms(second.output)) < 1e-10
        # The vectors and the column of the biases sum to the true output of the block.
        assert largest(second.output.sum(1), block.resid_post[0]) < 1e-10


@each_model("atb_ff", "parallel")
def test_equals_the_definition_written_out(case):
    """Compute the formula's integrals numerically, from the weights of the anatomy alone."""
    places, weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(64))
    path = list(zip((places + 1) / 2, weights / 2, strict=True))
    for block in blocks_of(case):
        anatomy, feed_forward, definition = block.anatomy, block.anatomy.feed_forward, written_out(block)
        norm, act = anatomy.feed_forward_input, ACTIVATIONS[feed_forward.activation]
        vectors = through_norm(norm, definition.normed, definition.mid)
        read = definition.mid if norm is None else norm(definition.mid)
        p = read @ feed_forward.W_in + (0 if feed_forward.b_in is None else feed_forward.b_in)
        if feed_forward.W_gate is None:
            m = sum(weight * derivative(act, point * p) for point, weight in path)
            output = atb_ff(vectors, feed_forward.W_in, m, feed_forward.W_out)
        else:
            u, p = p, read @ feed_forward.W_gate + (0 if feed_forward.b_gate is None else feed_forward.b_gate)
            m = sum(weight * act(point * p) for point, weight in path)
            m_gate = sum(weight * derivative(act, point * p) * point * u for point, weight in path)
            output = atb_ff(vectors, feed_forward.W_in, m, feed_forward.W_out)
            output = output + atb_ff(vectors, feed_forward.W_gate, m_gate, feed_forward.W_out)
        assert largest(lm.methods.AtbFf()(block), output.norm(dim=-1)) < 1e-10


@each_model("atb_ff")
def test_next_norm_is_the_one_that_reads_the_output(case):
    method = lm.methods.AtbFfResLn(next_norm=True)
    blocks = read_by_a_norm(blocks_of(case))
    maps = [method(block)[0] for block in blocks]
    for layer, block in enumerate(blocks):
        norm = None if block.anatomy.feed_forward_residual is not None else block.next_norm()
        expected = through_norm(norm, oracle(block).output[None], block.resid_post)[0]
        assert largest(maps[layer], norms(expected)) < 1e-10


@pytest.mark.parametrize("count", [3, 20])
def test_folding_W_in_changes_nothing(monkeypatch, count):
    from lens_mix._algebra import feed_forward, weight_cache
    from tests import kept_products

    if not available(bridge, "llama", torch.float64):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model = bridge("llama", torch.float64)
    # With 4 heads and d_model 24, 3 positions are below the break-even point and 20 are above it.
    tokens = torch.arange(count) % 40 + 3
    kept_products.forget()
    plain = lm.run(model, tokens, "atb_ff")
    assert kept_products.number("folded torch.float64") == model.cfg.n_layers
    # What one method stores in the cache is used by the other.
    zeroing = lm.run(model, tokens, "value_zeroing", engine="algebra")
    assert kept_products.number("folded torch.float64") == model.cfg.n_layers
    with monkeypatch.context() as patch:
        patch.setattr(feed_forward, "folded", lambda *arguments, **options: None)
        assert largest(plain.scores, lm.run(model, tokens, "atb_ff").scores) < 1e-12
    kept_products.forget()
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", 0)
    assert largest(plain.scores, lm.run(model, tokens, "atb_ff").scores) < 1e-12
    again = lm.run(model, tokens, "value_zeroing", engine="algebra")
    assert largest(zeroing.scores, again.scores) < 1e-12
    assert not kept_products.number("folded torch.float64")


def test_kept_matrices_see_edits(monkeypatch):
    from lens_mix._algebra import feed_forward

    if not available(bridge, "llama", torch.float64):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model = bridge("llama", torch.float64)
    tokens = torch.arange(9) + 3
    before = lm.run(model, tokens, "atb_ff").scores
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.data[0] *= 1.5
    after = lm.run(model, tokens, "atb_ff").scores
    monkeypatch.setattr(feed_forward, "folded", lambda *arguments, **options: None)
    assert largest(after, lm.run(model, tokens, "atb_ff").scores) < 1e-12
    assert largest(after, before) > 1e-3


def test_paths_are_integrated_some_at_a_time(monkeypatch):
    from lens_mix._algebra import activations

    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 3, 50, generator=generator, dtype=torch.float64)
    # One long path is among short ones, and one has length 0.
    end[1, 7], end[2, 9] = 60.0, start[2, 9]
    for activation in ("silu", "relu"):
        whole = _mean_on_path(activation, start, end)
        with monkeypatch.context() as patch:
            patch.setattr(activations, "_IN_CACHE", 4)
            assert largest(whole, _mean_on_path(activation, start, end)) < 1e-10


@pytest.mark.parametrize("length", [1e-3, 0.5, 2.0, 8.0, 15.0, 33.0])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if "relu" not in name])
def test_means_on_paths_are_good_to_the_last_digits(activation, length):
    start = torch.linspace(-40.0, 20.0, 61, dtype=torch.float64)
    # If each path is cut finely enough, ten points per interval leave no error.
    places, weights = np.polynomial.legendre.leggauss(10)
    pieces = 1 + round(4 * length)
    nodes = (torch.arange(pieces)[:, None] + (torch.as_tensor(places) + 1) / 2).flatten() / pieces * length
    values = ACTIVATIONS[activation](start[:, None] + nodes)
    expected = (values.unflatten(-1, (pieces, 10)) @ torch.as_tensor(weights)).sum(-1) / 2 / pieces
    assert largest(_mean_on_path(activation, start, start + length), expected) < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_multiplier_is_the_integrated_gradient(activation):
    ends = torch.tensor([-30.0, -3.0, -1e-9, 0.0, 1e-300, 1e-7, 0.5, 4.0, 30.0], dtype=torch.float64)
    function = ACTIVATIONS[activation]
    m = plain_multiplier(activation, ends, None)
    assert torch.isfinite(m).all()
    assert largest(m * ends, function(ends)) < 1e-12
    start = torch.linspace(-2, 2, len(ends), dtype=torch.float64)
    m = plain_multiplier(activation, ends, start)
    assert largest(m * (ends - start), function(ends) - function(start)) < 1e-12
    near = plain_multiplier(activation, start + 1e-9, start)
    assert torch.isfinite(near).all()
    assert near.abs().max() < 5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fixed", [False, True])
def test_gated_multipliers_are_complete_and_integrated_well(activation, fixed):
    generator = torch.Generator().manual_seed(0)
    draw = lambda scale: scale * torch.randn(200, generator=generator, dtype=torch.float64)  # noqa: E731
    end, up_end = draw(6), draw(3)
    end[:3] = torch.tensor([0.0, 1e-9, -1e-7])
    start, up_start = (draw(2), draw(2)) if fixed else (None, None)
    if fixed:
        start[3:5] = end[3:5] + torch.tensor([1e-8, 0.0])
    gate, up = gated_multipliers(activation, end, start, up_end, up_start)
    a, b = (start, up_start) if fixed else (torch.zeros_like(end), torch.zeros_like(end))
    function = ACTIVATIONS[activation]
    whole = function(end) * up_end - function(a) * b
    assert largest(gate * (end - a) + up * (up_end - b), whole) < 1e-10
    # A fine midpoint rule is independent of the library's nodes and intervals.
    t = ((torch.arange(40000, dtype=torch.float64) + 0.5) / 40000)[:, None]
    known = function(a + t * (end - a)).mean(0)
    assert largest(_mean_on_path(activation, a, end), known) < 1e-6
    assert largest(up, known) < 1e-6


def test_half_and_half_is_not_the_integrated_gradient():
    """The usual shortcut for gated neurons, half of the product per factor, is several per cent off."""
    end = torch.linspace(0.5, 6, 50, dtype=torch.float64)
    gate, _ = gated_multipliers("silu", end, None, torch.ones_like(end), None)
    share = gate * end / ACTIVATIONS["silu"](end)
    assert (share - 0.5).abs().max() > 0.05


def test_mixtures_and_cross_attention_are_refused_with_the_reason():
    if available(bridge, "mixtral"):
        with pytest.raises(lm.UnsupportedModelError, match="mixture feed-forward"):
            lm.run(bridge("mixtral"), torch.arange(3, 9), "atb_ff")
        assert lm.run(bridge("mixtral"), torch.arange(3, 9), "attn_res").scores.shape == (2, 6, 6)
    if available(hooked_transformer, "attn_only"):
        with pytest.raises(lm.UnsupportedModelError, match="found 'none'; attn_res stops before it"):
            lm.run(hooked_transformer("attn_only"), torch.arange(3, 9), "atb_ff_res")
    if available(bridge, "bart"):
        with pytest.raises(lm.UnsupportedModelError, match="expected a block without cross-attention"):
            lm.run(bridge("bart"), (torch.arange(3, 9), torch.arange(3, 8)), "atb_ff", part="decoder")


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="biases: expected 'on_path' or 'fixed', got 'A'"):
        lm.methods.AtbFf("A")
