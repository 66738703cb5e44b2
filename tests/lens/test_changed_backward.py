"""The rules of a changed backward pass, one by one."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.lens.anatomy import ACTIVATIONS, Norm
from lens_mix.lens.changed_backward import changed_backward, pattern_gradient, ratio
from lens_mix.lens.model import Lens
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, gpt2_like, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


def by_the_scores(scores, hidden, sink, temperature, factor):
    """(what the model's own softmax makes of our gradient, what is wanted), by the scores."""
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
    leaf = scores.clone().requires_grad_(True)
    masked = leaf.masked_fill(hidden, -torch.inf)
    if sink:
        masked = torch.cat([masked, torch.full_like(masked[..., :1], 0.4)], dim=-1)
    whole = masked.softmax(-1)
    pattern = whole[..., : scores.shape[-1]]
    pattern.register_hook(lambda g: pattern_gradient(temperature, factor, pattern.detach(), g))
    pattern.backward(given)
    tempered = (masked.detach() / temperature).softmax(-1)[..., : scores.shape[-1]]
    return leaf.grad, factor * tempered * (given - (tempered * given).sum(-1, keepdim=True))


@pytest.mark.parametrize(("temperature", "factor"), [(2.0, 0.25), (1.0, 0.5), (0.7, 1.0), (2.0, 0.0)])
@pytest.mark.parametrize("sink", [False, True])
def test_the_softmax_goes_back_at_another_temperature(temperature, factor, sink):
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    found, wanted = by_the_scores(scores, hidden, sink, temperature, factor)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    assert bool((wanted.abs().max() > 0.01) == (factor > 0))


def test_weights_that_underflow_and_empty_rows_are_finite():
    scores = torch.tensor([[[[0.0, -50.0, -200.0, -1000.0]]]])
    hidden = torch.zeros(1, 4, dtype=torch.bool)
    found, wanted = by_the_scores(scores, hidden, False, 2.0, 1.0)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    empty = pattern_gradient(2.0, 1.0, torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert float(empty.abs().max()) == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ratio_is_that_of_act_and_z(activation):
    act = ACTIVATIONS[activation]
    z = torch.tensor([-30.0, -2.0, -0.3, 1e-7, 0.8, 25.0], dtype=torch.float64)
    torch.testing.assert_close(ratio(act, z) * z, act(z), atol=1e-14, rtol=1e-12)
    assert bool(torch.isfinite(ratio(act, torch.zeros(2, dtype=torch.float64))).all())


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_with_its_scale_held_is_linear(kind):
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = Norm(kind, weight[0], weight[1], 1e-5)
    leaf = x.clone().requires_grad_(True)
    out = norm.linearised(leaf)
    torch.testing.assert_close(out + norm.bias, norm(x))
    (gradient,) = torch.autograd.grad(out[:, 2].sum(), leaf)
    torch.testing.assert_close((gradient * x).sum(-1), out.detach()[:, 2])


@pytest.mark.parametrize("name", ["gpt_oss", "llama", "opt"])
def test_without_gradients_nothing_is_changed_and_idle_rules_are_an_error(name):
    model = build_or_skip(bridge, name)
    lens = Lens(model)
    anatomies = list(lm.check(model).proof.anatomy.values())
    rules = lm.Gim().rules
    clean = model(tokens(model, 1))
    with (
        lens.evaluation_mode(),
        pytest.raises(lm.UnsupportedModelError, match=r"expected a gradient through Gradient\(blocks.0"),
        changed_backward(lens, anatomies, rules),
    ):
        assert torch.allclose(model(tokens(model, 1), use_cache=False), clean, atol=1e-5)


def test_a_norm_that_is_not_as_it_was_read_is_refused(monkeypatch):
    """A hook of the user's on the output of a norm, which the linear part knows nothing of."""
    model = gpt2_like(torch.float64)
    ids = tokens(model, 1)
    before = lm.run(model, ids, "gim", queries=[-1]).scores
    original = Norm.linearised
    monkeypatch.setattr(Norm, "__call__", lambda self, x: 1.5 * original(self, x))
    with pytest.raises(lm.UnsupportedModelError, match="expected its parts to give its output within"):
        lm.run(model, ids, "gim", queries=[-1])
    monkeypatch.undo()
    torch.testing.assert_close(lm.run(model, ids, "gim", queries=[-1]).scores, before)
