"""Test that a norm is read by its behavior, and not by the name of its class."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lens_mix as lm
from lens_mix._care.precision import relative_error
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix._model.anatomy import LinearNorm, Norm, read_norm
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


class Odd(nn.Module):
    """A norm with an unknown class name, and parameters of given names."""

    def __init__(self, width, *, centered, offset=0.0, weight="weight", bias=None, eps=1e-5, stored_eps=None):
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        for name, mean in ((weight, 1 - offset), (bias, 0.0)):
            if name is not None:
                numbers = mean + 0.25 * torch.randn(width, generator=generator)
                self.register_parameter(name, nn.Parameter(numbers))
        self.names, self.centered, self.offset = (weight, bias), centered, offset
        self.true_eps, self.eps = eps, eps if stored_eps is None else stored_eps

    def forward(self, x):
        weight, bias = (None if name is None else getattr(self, name) for name in self.names)
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        wide = wide - wide.mean(-1, keepdim=True) if self.centered else wide
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.true_eps)
        out = out if weight is None else out * (self.offset + weight)
        return (out if bias is None else out + bias).to(x.dtype)


def read(module, width):
    wrapper = SimpleNamespace(original_component=module)
    return read_norm(wrapper, SimpleNamespace(d_model=width, eps=1e-5))


@DTYPES
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("width", [24, 25])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": "bias"},
        {"offset": 1.0},
        {"offset": 1.0, "bias": "bias"},
        {"weight": None},
        {"weight": "gain", "bias": "shift"},
        {"eps": 1e-12},
        {"eps": 1e-2, "stored_eps": 1e-12},
        {"eps": 1e-12, "stored_eps": 1e-2, "bias": "bias"},
    ],
)
def test_a_norm_is_what_it_does(options, width, centered, dtype):
    module = Odd(width, centered=centered, **options).to(dtype)
    norm = read(module, width)
    assert norm.kind == ("layer" if centered else "rms")
    assert (norm.weight is None) == (options.get("weight", "") is None)
    assert (norm.bias is None) == ("bias" not in options)
    sizes = torch.tensor([[30.0], [1.0], [1e-2], [1e-3]], dtype=dtype)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(dtype) * sizes + 0.5 * sizes
    # Stored numbers are exact, while measured ones have the rounding error of the dtype.
    accepted = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}[dtype]
    assert relative_error(norm(x.to(torch.promote_types(dtype, torch.float32))), module(x)) < accepted


@DTYPES
def test_stored_numbers_are_taken_as_they_are(dtype):
    module = nn.LayerNorm(24, dtype=dtype)
    with torch.no_grad():
        module.weight.mul_(1.7)
        module.bias.add_(0.3)
    norm = read(module, 24)
    assert norm.weight.equal(module.weight)
    assert norm.bias.equal(module.bias)
    assert norm.eps == module.eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind"), [("mt5", "rms"), ("t5", "rms"), ("nemotron", "layer")])
def test_norms_with_misleading_names(name, kind, dtype):
    if name == "mt5" and transformer_lens_version()[0] < 4:
        pytest.skip("TransformerLens before 4 cannot run T5")
    model = build_or_skip(bridge, name, dtype)
    try:
        report = lm.check(model, prompt_of(model))
    except lm.UnsupportedModelError as problem:
        pytest.skip(str(problem))
    assert report.ok, str(report)
    assert {anatomy.attention_input.kind for anatomy in report.verification.anatomy.values()} == {kind}
    assert {anatomy.feed_forward_input.kind for anatomy in report.verification.anatomy.values()} == {kind}


def test_no_hook_sees_a_norm_measured():
    model = build_or_skip(bridge, "llama")
    lm.check(model, prompt_of(model))
    seen = []
    norm = model.blocks[0].ln1
    norm.register_forward_hook(lambda *a: seen.append(1))
    norm.original_component.register_forward_hook(lambda *a: seen.append(1))
    assert read_norm(norm, model.cfg).kind == "rms"
    assert seen == []


def test_a_norm_that_takes_more_is_read_as_stored():
    class Conditioned(nn.LayerNorm):
        def forward(self, x, condition):
            return super().forward(x) * condition

    assert read(Conditioned(24), 24).kind == "layer"


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_transposed_directions_read_the_same_numbers_as_the_norm(kind, has_weight):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = draw(6) if has_weight else None
    norm = Norm(kind, weight, None, 1e-5).linear_at(draw(2, 3, 6))
    directions, vectors = draw(2, 3, 6), draw(2, 3, 6)
    expected = (directions * norm(vectors)).sum(-1)
    torch.testing.assert_close((norm.transposed(directions) * vectors).sum(-1), expected)
    assert torch.equal(LinearNorm(None, vectors).transposed(directions), directions)
