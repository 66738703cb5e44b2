"""Keys that are hidden: the others share the row, and what goes to no key is told from rounding."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks import DEFAULT_ATTENTION, mask_keys
from lens_mix.hooks.gradient import pattern_gradient
from lens_mix.hooks.mixing import mix, sink
from lens_mix.lens.graph import Mixing
from lens_mix.methods.attribution_patching import hidden_effects
from lens_mix.methods.side_by_side import Layout, SideBySide

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def softmax(dtype: torch.dtype, *, to_no_key: float = 0.0) -> Float[Tensor, "1 head query key"]:
    """Many rows over 9 keys, rounded as models round; a further key that is cut off is an attention sink."""
    scores = 2 * torch.randn(1, 4, 500, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (scores.softmax(-1) * (1 - to_no_key)).to(dtype)


def without_a_key(pattern: Float[Tensor, "1 head query key"], key: int) -> Float[Tensor, "1 head query key"]:
    """As what is mixed shows it where each key's value is a vector of its own, of length 1."""
    _, heads, _, keys = pattern.shape
    values = torch.eye(keys, dtype=pattern.dtype)[None, :, None].expand(1, keys, heads, keys)
    function: Any = mask_keys(0, key)[1]
    return function.on_mixed(mix(pattern, values), values, pattern).transpose(1, 2)


def epsilon(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_sink(dtype):
    pattern = softmax(dtype)
    assert sink(pattern).dtype == torch.promote_types(dtype, torch.float32)
    assert not bool(sink(pattern).any())
    # Nor in rows that were shared out anew before.
    again = without_a_key(pattern, 3)
    assert not bool(sink(again).any())
    for _ in range(2):
        torch.testing.assert_close(
            again.double().sum(-1), torch.ones(1, 4, 500).double(), atol=epsilon(dtype), rtol=0
        )
        again = without_a_key(again, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_a_twentieth_keeps_its_share(dtype):
    pattern = softmax(dtype, to_no_key=0.05)
    assert bool((sink(pattern) - 0.05).abs().max() <= epsilon(dtype))
    weights = pattern.double()
    # By hand: a sink is one key more, which stays.
    expected = (weights / (1 - weights[..., 3:4])).index_fill(3, torch.tensor(3), 0)
    torch.testing.assert_close(
        without_a_key(pattern, 3).double(), expected, atol=4 * epsilon(dtype), rtol=2 * epsilon(dtype)
    )


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 2e-4), (torch.float64, 2e-6)])
def test_small_sinks_of_wide_dtypes_count(dtype, smallest):
    found = sink(softmax(dtype, to_no_key=smallest))
    torch.testing.assert_close(found, torch.full_like(found, smallest), atol=5e-7, rtol=0)


def uses(pattern: Float[Tensor, "1 1 query key"]) -> list[Tensor]:
    """What else shares rows out anew, on random values and gradients."""
    generator = torch.Generator().manual_seed(1)
    values, gradient, given = torch.randn(3, 1, 3, 1, 3, generator=generator).bfloat16().to(pattern.dtype)
    hidden = hidden_effects(Mixing(pattern, values, mix(pattern, values), gradient).at(torch.arange(3)))
    back = pattern_gradient(2.0, 1.0, pattern, given[:, None, :, 0])
    layout = Layout.of(3, torch.tensor([2]), 1)
    block: Any = types.SimpleNamespace(layer=0, attention_template=DEFAULT_ATTENTION)
    seen = torch.nn.functional.pad(pattern[:, :, :1], (0, len(layout.positions) - 3))
    beside = SideBySide(block, layout, torch.zeros(3, 1, 3)).on_pattern(seen, values)
    return [hidden, back, beside]


@pytest.mark.parametrize("to_no_key", [0.0, 0.05])
def test_every_use_tells_a_sink_from_rounding(to_no_key):
    row = ((1 - to_no_key) * torch.tensor([0.20066, 0.04740, 0.75194])).to(torch.bfloat16)
    pattern = row.expand(1, 1, 3, 3)
    exact = pattern.double()
    if not to_no_key:
        assert 2e-3 < 1 - float(exact[0, 0, 0].sum()) < 4e-3
        exact = exact / exact.sum(-1, keepdim=True)
    for found, expected in zip(uses(pattern), uses(exact), strict=True):
        bound = 5e-3 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)
