"""Compare the expansion rate with explicit matrices, and with the lengths of random vectors."""

import pytest
import torch

import lens_mix as lm
from lens_mix._model.anatomy import ValuePath
from lens_mix.experiments.expansion_rate import _compute_rates, expansion_rates
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, llama_like


def path(groups=2, biases=True):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    b_V, b_O = (draw(groups, 3), draw(8)) if biases else (None, None)
    return ValuePath(draw(groups, 8, 3), b_V, draw(4, 3, 8), b_O)


def affine(weight, bias):
    rows = torch.zeros(weight.shape[0] + 1, weight.shape[1] + 1, dtype=torch.float64)
    rows[:-1, :-1], rows[-1, :-1], rows[-1, -1] = weight, bias, 1
    return rows


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_the_matrices_written_out(groups):
    given = path(groups)
    heads, together = _compute_rates(given)
    wide_V = given.W_V.repeat_interleave(4 // groups, 0)
    wide_b = given.b_V.repeat_interleave(4 // groups, 0)
    for head in range(4):
        product = affine(wide_V[head], wide_b[head]) @ affine(given.W_O[head], torch.zeros(8))
        assert float(heads[head]) == pytest.approx(float(product.norm()) / 3)
    product = affine(torch.cat(list(wide_V), 1), wide_b.flatten()) @ affine(
        given.W_O.flatten(0, 1), given.b_O
    )
    assert together == pytest.approx(float(product.norm()) / 3)


def test_is_how_much_random_vectors_grow():
    given = path(4)
    x = torch.randn(200_000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = (x @ given.W_V[0] + given.b_V[0]) @ given.W_O[0]
    grown = ((out.square().sum(-1) + 1).mean() / (x.square().sum(-1) + 1).mean()).sqrt()
    assert float(_compute_rates(given)[0][0]) == pytest.approx(float(grown), rel=0.01)


def test_tables_have_every_head_and_their_sum():
    table = expansion_rates(llama_like())
    assert table["head"].tolist() == [0, 1, 2, 3, "all"] * 2
    assert (table["rate"] > 0).all()
    assert _compute_rates(path(2, biases=False))[1] > 0


@pytest.mark.parametrize(
    ("hook", "part"), [("v.hook_out", "value"), ("o.hook_out", "projection")], ids=["values", "outputs"]
)
def test_matrices_that_are_not_what_the_model_applies_have_no_rates(hook, part):
    model = build_or_skip(bridge, "llama")
    expected = expansion_rates(model)
    with (
        model.hooks(fwd_hooks=[(f"blocks.1.attn.{hook}", lambda out, hook: out * 1.5)]),
        pytest.raises(lm.UnsupportedModelError, match=f"expansion_rates .* block 1: {part} is not verified"),
    ):
        expansion_rates(model)
    assert expansion_rates(model).equals(expected)
