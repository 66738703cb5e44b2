"""Test the measured masks of causal models, windows, padding and prefixes."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._passes.masks import AllowedKeys
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, hooked_encoder, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


def window(size, width):
    rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
    return (columns <= rows) & (columns > rows - width)


@pytest.mark.parametrize(
    ("factory", "name"),
    [(bridge, "gpt2"), (bridge, "bloom"), (hooked_transformer, "LN"), (hooked_transformer, "alibi")],
)
def test_causal_models_need_no_mask(factory, name):
    model = build_or_skip(factory, name)
    m = lm.run(model, prompt_of(model, 12), "value_zeroing")
    assert m.causal
    assert m.mask is None


@pytest.mark.parametrize(("factory", "name"), [(bridge, "bert"), (hooked_encoder, None)])
def test_encoders_see_everything(factory, name):
    model = build_or_skip(factory, *([name] if name else []))
    m = lm.run(model, prompt_of(model, 12), "value_zeroing")
    assert not m.causal
    assert m.mask is None


def test_sliding_windows():
    model = build_or_skip(bridge, "mistral")
    m = lm.run(model, prompt_of(model, 9), "attention")
    assert m.causal
    assert torch.equal(m.mask, window(9, 4))


def test_windows_in_some_layers():
    model = build_or_skip(bridge, "gemma3")
    m = lm.run(model, prompt_of(model, 9), "attention")
    assert m.mask.shape == (2, 9, 9)
    assert {int(layer.sum()) for layer in m.mask} == {int(window(9, 4).sum()), 45}


def test_local_attention_of_hooked_transformer():
    model = build_or_skip(hooked_transformer, "local")
    m = lm.run(model, prompt_of(model, 9), "attention")
    width = model.cfg.window_size
    expected = torch.stack([window(9, width if kind == "local" else 9) for kind in model.cfg.attn_types])
    assert torch.equal(m.mask.expand(2, 9, 9), expected)


def test_an_underflowed_weight_is_no_mask():
    """Use scores of ±200, for which the softmax is exactly 0 on some allowed keys."""
    model = build_or_skip(bridge, "gpt2")

    def sharpen(query, hook):
        return query * 1e4

    names = [n for n in model.hook_dict if n.endswith("attn.hook_q")]
    with model.hooks(fwd_hooks=[(name, sharpen) for name in names]):
        m = lm.run(model, prompt_of(model, 9), "attention")
    assert float((m.scores == 0).sum()) > 2 * 36
    assert m.causal
    assert m.mask is None


def test_padding_is_cut_and_the_rest_stays_a_triangle():
    model = build_or_skip(bridge, "gpt2")
    maps = list(
        lm.run_many(model, [tokens(model, 1, 9), tokens(model, 1, 5)], "attention", padding_side="left")
    )
    for m, size in zip(maps, (9, 5), strict=True):
        assert m.scores.shape[-2:] == (size, size)
        assert m.causal
        assert m.mask is None


def mask_of(allowed, layers=1):
    """Return the mask of one prompt without padding, in several equal layers."""
    places = torch.arange(len(allowed))
    by_layer = dict.fromkeys(range(layers), allowed[None])
    return AllowedKeys(by_layer, places[None], True, 1e-7).of_prompt(0, places, places, range(layers))


def test_a_prefix_mask():
    """Use a mask in which three positions see each other, and the others are causal."""
    allowed = torch.ones(6, 6).tril().bool()
    allowed[:3, :3] = True
    causal, mask = mask_of(allowed, layers=2).causal_and_mask()
    assert not causal
    assert torch.equal(mask, allowed)


def test_an_effect_of_a_hidden_key_is_refused():
    mask = mask_of(torch.ones(4, 4).tril().bool())
    scores = torch.rand(1, 4, 4)
    with pytest.raises(lm.UnsupportedModelError, match="a key that the attention mask hides has a score of"):
        mask.without_rounding(scores, None)
    small = scores.tril() + 1e-8 * scores.triu(1)
    assert torch.equal(mask.without_rounding(small, None), scores.tril())


def test_spans_are_hidden_only_where_all_their_positions_are():
    mask = mask_of(torch.ones(4, 4).tril().bool())
    out = mask.without_rounding(torch.full((1, 4, 2), 1e-9), [[0, 1], [2, 3]])
    assert (out > 0).int().tolist() == [[[1, 0], [1, 0], [1, 1], [1, 1]]]
