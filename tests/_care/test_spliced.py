"""Test models in which SAELens has replaced hook points by sparse autoencoders.

SAELens needs TransformerLens 3 or earlier, and is not installed here. `splice` does what its `add_sae` does
(sae-lens 6.54): the hook point becomes a module, `acts_to_saes` has its name, and a Bridge of SAELens lists
its hook points without aliases.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import lens_mix as lm
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = ("attention", "value_zeroing", "input_gradients")


class Autoencoder(nn.Module):
    """An autoencoder that returns its reconstruction, plus the error if `has_error`."""

    def __init__(self, width: int, dtype: torch.dtype, has_error: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.encoder = nn.Parameter(torch.randn(width, 4 * width, generator=generator).to(dtype) / width)
        self.has_error = has_error

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        reconstructed = (activations @ self.encoder).relu() @ self.encoder.T
        return reconstructed + (activations - reconstructed).detach() if self.has_error else reconstructed


@contextlib.contextmanager
def splice(model: Any, name: str, has_error: bool = False) -> Any:
    """Put an autoencoder in the place of a hook point."""
    sae = Autoencoder(model.cfg.d_model, torch.float64, has_error)
    is_bridge = type(model).__name__ == "SAETransformerBridge"
    actual = {"hook_resid_post": "hook_out", "hook_mlp_out": "mlp.hook_out"}
    block, _, point = name.partition(".attn.") if ".attn." in name else name.rpartition(".")
    place = f"{block}.{actual.get(point, point)}" if is_bridge else name
    place = f"{block}.attn.o.hook_in" if is_bridge and point == "hook_z" else place
    owner, attribute = model.get_submodule(place.rpartition(".")[0]), place.rpartition(".")[2]
    before = getattr(owner, attribute)
    setattr(owner, attribute, sae)
    model.acts_to_saes = {name: sae}
    if is_bridge:
        model._hook_registry[place] = sae
    else:
        model.setup()
    try:
        yield
    finally:
        setattr(owner, attribute, before)
        model.acts_to_saes = {}
        if is_bridge:
            model._hook_registry[place] = before
        else:
            model.setup()


def build(kind: str) -> Any:
    if kind == "HookedSAETransformer":
        return build_or_skip(hooked_transformer, "LN", torch.float64)
    model = build_or_skip(bridge, "gpt2", torch.float64)
    listed = property(lambda self: dict(self._hook_registry))
    model.__class__ = type("SAETransformerBridge", (type(model),), {"hook_dict": listed})
    return model


KINDS = ("HookedSAETransformer", "SAETransformerBridge")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["hook_resid_post", "hook_mlp_out"])
def test_the_reconstruction_is_part_of_the_map(kind, point):
    model = build(kind)
    prompt = tokens(model, 1, 7)
    clean = lm.run(model, prompt, METHODS)
    with splice(model, f"blocks.0.{point}"):
        maps = lm.run(model, prompt, METHODS)
        seen = []
        watched = model.blocks[1].attn.hook_pattern
        handle = watched.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        model(prompt)
        handle.remove()
        with pytest.raises(lm.UnsupportedModelError, match=rf"SAEs replace blocks.0.{point}, .*reset_saes"):
            lm.run(model, prompt, "attn_res_ln")
    torch.testing.assert_close(maps["attention"].scores[1], seen[0][0].mean(0), atol=1e-10, rtol=0)
    assert (maps["attention"].scores[1] - clean["attention"].scores[1]).abs().max() > 1e-3
    assert maps["value_zeroing"].provenance["engine"] == "hooks"
    for m in maps.values():
        assert any(note.startswith(f"SAEs replace blocks.0.{point}") for note in m.notes)
    # Without it, the maps and their engines are those of the model again.
    again = lm.run(model, prompt, METHODS)
    for name in METHODS:
        torch.testing.assert_close(again[name].scores, clean[name].scores, atol=0, rtol=0)
        assert again[name].provenance["engine"] == clean[name].provenance["engine"]
        assert again[name].notes == clean[name].notes


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_error_term_the_maps_are_those_of_the_model(kind):
    model = build(kind)
    prompt = tokens(model, 1, 7)
    names = ["attention", "value_zeroing", "attn_res_ln"]
    clean = lm.run(model, prompt, names)
    with splice(model, "blocks.0.hook_mlp_out", has_error=True):
        maps = lm.run(model, prompt, names)
    for name in names:
        torch.testing.assert_close(maps[name].scores, clean[name].scores, atol=1e-10, rtol=0)
        assert maps[name].provenance["engine"] == clean[name].provenance["engine"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_sae_inside_of_attention_is_an_error(kind):
    model = build(kind)
    prompt = tokens(model, 1, 7)
    with splice(model, "blocks.1.attn.hook_z"):
        reason = r"found none at 'blocks.1.attn.hook_z' .*SAEs replace blocks.1.attn.hook_z, .*reset_saes"
        with pytest.raises(lm.UnsupportedModelError, match=reason):
            lm.run(model, prompt, "attention")
    assert lm.run(model, prompt, "attention").scores.shape == (2, 7, 7)
